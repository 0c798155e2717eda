"""What the tiny GPT-OSS checkpoints show of the family; `test_parity_targets` has the numbers.

That each case would notice a missing clamp, and a window that counts rows, is asserted where the
cases are recorded (`torch_gpt_oss.refuse_lenient_cases`).
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mxfp4 import Mxfp4
from tests import parity
from tests.reference_cases import GPT_OSS, TARGET_TOLERANCE, block_name, prompt_name, read_case

every_checkpoint = pytest.mark.parametrize("name", GPT_OSS)


def test_one_checkpoint_is_converted_and_the_other_stays_packed(data_dir):
    converted, packed = (parity.load_target(data_dir / name) for name in GPT_OSS)
    assert not any(isinstance(bank.gate, Mxfp4) for bank in converted.banks)
    for bank in packed.banks:
        assert all(isinstance(matrix, Mxfp4) for matrix in (bank.gate, bank.up, bank.down))


def test_the_configs_spell_rotary_positions_in_the_two_ways(data_dir):
    converted, packed = (json.loads((data_dir / n / "config.json").read_text()) for n in GPT_OSS)
    assert "rope_parameters" in converted and "rope_scaling" not in converted
    assert "rope_scaling" in packed and "rope_parameters" not in packed
    ropes = [parity.load_target(data_dir / name).config.rope for name in GPT_OSS]
    assert [rope.truncate for rope in ropes] == [False, True]


@every_checkpoint
def test_the_recorded_tree_is_deeper_than_the_window_and_wider(data_dir, name):
    """Some node sees its root no more; and a window of rows would hide what positions show."""
    case = read_case(data_dir, block_name(name))
    window = parity.load_target(data_dir / name).config.sliding_window
    nodes, prefix = len(case["parents"]), len(case["prefix_ids"])
    assert case["depth"].max() >= window and prefix > window
    hidden_by_rows = [
        (node, parent) for node, parent in enumerate(case["parents"]) if node - parent >= window
    ]
    assert hidden_by_rows and nodes > window


def test_gates_are_clamped_from_above_and_ups_on_both_sides(data_dir):
    """(up + 1) gate sigmoid(1.702 gate), by hand."""
    activation = parity.load_target(data_dir / GPT_OSS[0]).config.activation
    gate, up, expected = np.array(
        [
            (1.0, 0.5, 1.2686936),
            (10.0, 9.0, 55.999625),  # as of gate 7, up 7
            (-3.0, 9.0, -0.1445705),  # as of gate -3, up 7
            (-10.0, -9.0, 2.434777e-6),  # as of gate -10, up -7
        ],
        np.float32,
    ).T
    np.testing.assert_allclose(activation(gate, up), expected, rtol=1e-5)


@every_checkpoint
def test_every_bias_and_sink_matters_to_the_case(data_dir, name):
    """Else a checkpoint whose biases are lost on the way would pass for right."""
    target = parity.load_target(data_dir / name)
    case = read_case(data_dir, prompt_name(name, 37))

    def error_without(kind: str) -> float:
        def drop(path, leaf):
            keys = [getattr(key, "key", getattr(key, "name", "")) for key in path]
            return jnp.zeros_like(leaf) if ".".join(map(str, keys)).endswith(kind) else leaf

        params, banks = jax.tree_util.tree_map_with_path(drop, (target.params, target.banks))
        changed = dataclasses.replace(target, params=params, banks=banks)
        return parity.worst_error(parity.prompt_arrays(changed, case), case)

    kinds = [f"self_attn.{part}_proj.bias" for part in "qkvo"]
    kinds += ["self_attn.sinks", "router.bias", "gate_bias", "up_bias", "down_bias"]
    errors = {kind: error_without(kind) for kind in kinds}
    assert min(errors.values()) > 1000 * TARGET_TOLERANCE, errors
