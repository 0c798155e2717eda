"""Our targets against what transformers computed for the tiny checkpoints of both families.

The numbers were recorded by `tests.record_references`; `test_live_torch` computes them anew.
What is particular to a family is in `test_parity_qwen3_moe` and `test_parity_gpt_oss`.
"""

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


@every_checkpoint
def test_every_dimension_of_a_checkpoint_is_another_number(data_dir, name):
    config = parity.load_target(data_dir / name).config
    sizes = [value for value in vars(config).values() if type(value) is int]
    sizes += [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
    assert len(sizes) >= 12 and len(set(sizes)) == len(sizes)


@every_checkpoint
@every_prompt
def test_a_pass_without_cache_equals_transformers_layer_by_layer(data_dir, name, length):
    theirs = read_case(data_dir, prompt_name(name, length))
    ours = parity.prompt_arrays(parity.load_target(data_dir / name), theirs)
    assert ours.keys() == theirs.keys() - {"input_ids"}
    assert parity.worst_error(ours, theirs) < TARGET_TOLERANCE


@every_checkpoint
@every_prompt
def test_prefill_in_chunks_through_a_cache_equals_transformers(data_dir, name, length):
    theirs = read_case(data_dir, prompt_name(name, length))
    ours = parity.cached_prompt_arrays(parity.load_target(data_dir / name), theirs)
    assert ours.keys() == theirs.keys() - {"input_ids"}
    assert parity.worst_error(ours, theirs) < TARGET_TOLERANCE


@every_checkpoint
@pytest.mark.parametrize("restricted", [False, True], ids=["natural", "restricted"])
def test_a_verification_block_equals_transformers(data_dir, name, restricted):
    theirs = read_case(data_dir, block_name(name))
    target = parity.load_target(data_dir / name)
    ours = parity.block_arrays(target, theirs, restricted=restricted)
    assert parity.worst_error(ours, theirs) < TARGET_TOLERANCE


@every_checkpoint
def test_the_recorded_set_of_every_layer_changes_the_routing(data_dir, name):
    theirs = read_case(data_dir, block_name(name))
    config = parity.load_target(data_dir / name).config
    for layer in config.moe_layers:
        picks = np.argsort(-theirs[f"restricted/router_logits/{layer}"], axis=-1)
        natural = picks[:, : config.top_k]
        assert not theirs["allowed"][layer][natural].all()


@every_checkpoint
def test_the_recorded_tree_branches_and_its_siblings_are_apart(data_dir, name):
    theirs = read_case(data_dir, block_name(name))
    parents, depth = theirs["parents"], theirs["depth"]
    children = [np.flatnonzero(parents == node) for node in range(len(parents))]
    assert depth.max() >= 4
    assert any(len(nodes) > 1 and (np.diff(nodes) > 1).any() for nodes in children)
