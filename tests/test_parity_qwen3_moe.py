"""Our Qwen3-MoE against what transformers computed for checkpoints that transformers saved.

The numbers were recorded by `tests.record_references`; `test_live_torch` computes them anew.
"""

import functools
import json

import numpy as np
import pytest

from tests import parity
from tests.reference_cases import (
    CHECKPOINTS,
    PROMPT_LENGTHS,
    TARGET_TOLERANCE,
    block_name,
    prompt_name,
    read_case,
)

every_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)
every_prompt = pytest.mark.parametrize("length", PROMPT_LENGTHS)


@pytest.fixture(scope="module")
def target(data_dir):
    """Loads a checkpoint once."""
    return functools.cache(lambda name: parity.load_target(data_dir / name))


@pytest.fixture(scope="module")
def case(data_dir):
    """Reads a recorded case."""
    return functools.partial(read_case, data_dir)


def test_one_checkpoint_is_one_file_and_the_other_is_sharded(data_dir):
    assert (data_dir / "qwen3_moe_norm" / "model.safetensors").exists()
    index = json.loads((data_dir / "qwen3_moe_nonorm" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


@every_checkpoint
def test_every_dimension_of_a_checkpoint_is_another_number(target, name):
    c = target(name).config
    sizes = [c.vocab_size, c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim]
    sizes += [c.num_experts, c.top_k, c.expert_width, c.dense_width]
    sizes += [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim]
    assert len(set(sizes)) == len(sizes)


def test_the_checkpoints_differ_in_norm_topk_prob_and_one_has_a_dense_layer(target):
    norm, nonorm = (target(name).config for name in CHECKPOINTS)
    assert norm.norm_topk_prob and not nonorm.norm_topk_prob
    assert norm.dense_layers == (1,) and nonorm.dense_layers == ()


@every_checkpoint
@every_prompt
def test_a_pass_without_cache_equals_transformers_layer_by_layer(target, case, name, length):
    theirs = case(prompt_name(name, length))
    ours = parity.prompt_arrays(target(name), theirs)
    assert ours.keys() == theirs.keys() - {"input_ids"}
    assert parity.worst_error(ours, theirs) < TARGET_TOLERANCE


@every_checkpoint
@every_prompt
def test_prefill_in_chunks_through_a_cache_equals_transformers(target, case, name, length):
    theirs = case(prompt_name(name, length))
    ours = parity.cached_prompt_arrays(target(name), theirs)
    assert ours.keys() == theirs.keys() - {"input_ids"}
    assert parity.worst_error(ours, theirs) < TARGET_TOLERANCE


@every_checkpoint
@pytest.mark.parametrize("restricted", [False, True], ids=["natural", "restricted"])
def test_a_verification_block_equals_transformers(target, case, name, restricted):
    theirs = case(block_name(name))
    ours = parity.block_arrays(target(name), theirs, restricted=restricted)
    assert parity.worst_error(ours, theirs) < TARGET_TOLERANCE


@every_checkpoint
def test_the_recorded_set_of_every_layer_changes_the_routing(target, case, name):
    theirs = case(block_name(name))
    for layer in target(name).config.moe_layers:
        picks = np.argsort(-theirs[f"restricted/router_logits/{layer}"], axis=-1)
        natural = picks[:, : target(name).config.top_k]
        assert not theirs["allowed"][layer][natural].all()


@every_checkpoint
def test_the_recorded_tree_branches_and_its_siblings_are_apart(case, name):
    parents, depth = (case(block_name(name))[key] for key in ("parents", "depth"))
    children = [np.flatnonzero(parents == node) for node in range(len(parents))]
    assert depth.max() == 4
    assert any(len(nodes) > 1 and (np.diff(nodes) > 1).any() for nodes in children)
