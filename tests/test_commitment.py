"""Commitment tables: estimation from counts, the file, and refusals."""

import dataclasses
import json

import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.selection import CommitmentTable, config_hash

TARGET = config_hash({"model_type": "qwen3_moe", "hidden_size": 96})
HEAD = config_hash({"model_type": "llama", "hidden_size": 96})
ORIGIN = dict(target_hash=TARGET, head_hash=HEAD, data="training prompts", seed=7)


def table(**changes):
    made = CommitmentTable.from_counts([40, 30, 12, 0], [40, 400, 300, 150], 40, **ORIGIN)
    return dataclasses.replace(made, **changes)


def test_phat_is_reach_over_verifications_with_a_floor():
    assert table().phat == (1.0, 0.75, 0.3, 1e-3)


def test_per_node_phat_is_reach_over_nodes():
    per_node = CommitmentTable.from_counts(
        [40, 30, 12, 0], [40, 400, 300, 0], 40, per_node=True, **ORIGIN
    )
    assert per_node.phat == (1.0, 0.075, 0.04, 1e-3)


def test_reach_over_verifications_adds_up_to_the_mean_accepted_length():
    # Tokens a verification, bonus included: depth of the last accepted node + 1.
    accepted_lengths = [1, 3, 2, 5, 1, 4, 4]
    reach = [sum(length > depth for length in accepted_lengths) for depth in range(5)]
    nodes = [7] + [70] * 4
    made = CommitmentTable.from_counts(reach, nodes, len(accepted_lengths), **ORIGIN)
    assert made.mean_accepted_length == pytest.approx(20 / 7)


def test_a_saved_table_loads_as_it_was(tmp_path):
    path = tmp_path / "commitment.json"
    table().save(path)
    loaded = CommitmentTable.load(path)
    assert loaded == table()
    assert loaded.source == str(path)


def test_the_file_holds_what_says_where_the_numbers_come_from(tmp_path):
    path = tmp_path / "commitment.json"
    table().save(path)
    record = json.loads(path.read_text())
    assert record == {
        "version": 1,
        "target_hash": TARGET,
        "head_hash": HEAD,
        "phat": [1.0, 0.75, 0.3, 1e-3],
        "reach": [40, 30, 12, 0],
        "nodes": [40, 400, 300, 150],
        "verifications": 40,
        "data": "training prompts",
        "seed": 7,
        "per_node": False,
    }


def test_a_table_of_the_same_target_and_head_is_accepted():
    table().check(TARGET, HEAD)


@pytest.mark.parametrize(
    ("target", "head", "named", "unnamed"),
    [("other", HEAD, "target", "head"), (TARGET, "other", "head", "target")],
)
def test_a_table_of_another_model_is_refused_by_file_and_config(
    tmp_path, target, head, named, unnamed
):
    path = tmp_path / "commitment.json"
    table().save(path)
    with pytest.raises(UserError) as refusal:
        CommitmentTable.load(path).check(target, head)
    assert str(path) in str(refusal.value)
    assert f"another {named} config" in str(refusal.value)
    assert f"another {unnamed} config" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version 2"),
        ({"version": None}, "version"),
        ({"phat": None}, "phat"),
        ({"phat": [1.0, "x", 0.3, 0.1]}, "phat"),
        ({"phat": [0.9, 0.7, 0.3, 0.1]}, "phat"),
        ({"phat": [1.0, 0.7, float("nan"), 0.1]}, "phat"),
        ({"phat": [1.0, 0.7]}, "phat"),
        ({"reach": [40, 30, 31, 0]}, "reach"),
        ({"reach": [40.5, 30, 12, 0]}, "reach"),
        ({"nodes": [40, 29, 300, 150]}, "nodes"),
        ({"verifications": 0}, "verifications"),
        ({"verifications": True}, "verifications"),
        ({"seed": "7"}, "seed"),
        ({"data": 3}, "data"),
        ({"per_node": 1}, "per_node"),
        ({"fhat": [1.0]}, "fhat"),
    ],
)
def test_a_malformed_table_is_refused_by_file_and_key(tmp_path, change, named):
    path = tmp_path / "commitment.json"
    table().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as refusal:
        CommitmentTable.load(path)
    assert str(path) in str(refusal.value)
    assert named in str(refusal.value)


@pytest.mark.parametrize("key", ["version", "target_hash", "phat", "reach", "seed"])
def test_a_table_that_lacks_a_key_is_refused_by_name(tmp_path, key):
    path = tmp_path / "commitment.json"
    table().save(path)
    record = json.loads(path.read_text())
    del record[key]
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=key):
        CommitmentTable.load(path)


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "commitment.json"
    path.write_text(content)
    with pytest.raises(UserError, match="commitment.json"):
        CommitmentTable.load(path)


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(UserError, match="absent.json"):
        CommitmentTable.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("reach", "nodes", "verifications"),
    [
        ([], [], 3),
        ([3, 2], [3, 9], 0),
        ([2, 2], [3, 9], 3),
        ([3, 2], [2, 9], 3),
        ([3, 2], [3, 1], 3),
        ([3, 1, 2], [3, 9, 9], 3),
        ([3, 2, 1], [3, 9], 3),
    ],
)
def test_counts_that_contradict_each_other_are_refused(reach, nodes, verifications):
    with pytest.raises(ValueError):
        CommitmentTable.from_counts(reach, nodes, verifications, **ORIGIN)


def test_the_config_hash_follows_what_the_model_computes():
    raw = {"hidden_size": 96, "rope_scaling": {"factor": 2.0, "type": "yarn"}, "eos": [1, 2]}
    assert config_hash(raw) == config_hash(dict(reversed(raw.items())))
    assert config_hash(raw) == config_hash(
        raw | {"transformers_version": "5.1", "torch_dtype": "bfloat16", "_name_or_path": "x"}
    )
    assert config_hash(raw) != config_hash(raw | {"hidden_size": 97})
    nested = raw | {"rope_scaling": {"factor": 4.0, "type": "yarn"}}
    assert config_hash(raw) != config_hash(nested)
    assert len(config_hash(raw)) == 64
