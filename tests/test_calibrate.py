"""experiments.calibrate, run for real on a few training prompts."""

import json

import pytest

from acceptmoe_jax.selection import CommitmentTable
from tests import pocket


@pytest.fixture(scope="module")
def table_file(tmp_path_factory):
    output = tmp_path_factory.mktemp("calibrate") / "commitment.json"
    done = pocket.run_program(
        "calibrate",
        f"--target={pocket.TARGET}",
        f"--draft={pocket.HEAD}",
        "--pocket_prompts=8",
        "--max_new_tokens=32",
        "--dtype=float32",
        f"--output={output}",
    )
    assert done.returncode == 0, done.stderr
    return output


def test_the_table_says_what_it_was_measured_on(table_file):
    raw = json.loads(table_file.read_text())
    assert raw["data"] == "training split of the pocket families, 2 prompts each"
    assert raw["seed"] == 0
    assert (raw["target_hash"], raw["head_hash"]) == pocket.engine().model.hashes


def test_the_table_counts_a_node_of_every_tree(table_file):
    table = CommitmentTable.load(table_file)
    assert len(table.phat) == 6  # the root and 5 draft steps
    assert sum(table.nodes) == 64 * table.verifications
    assert table.phat[0] == 1 and table.nodes[0] == table.reach[0] == table.verifications
    assert 1 < table.mean_accepted_length <= 6


def test_the_shipped_table_belongs_to_the_shipped_pair():
    table = pocket.engine().commitment
    assert table.verifications > 500
    assert "training split" in table.data


def test_without_prompts_nothing_is_measured(tmp_path):
    done = pocket.run_program(
        "calibrate", "--target=x", "--draft=y", f"--output={tmp_path / 'commitment.json'}"
    )
    assert done.returncode == 1
    assert "error: give either --prompts or --pocket_prompts" in done.stderr
    assert not list(tmp_path.iterdir())
