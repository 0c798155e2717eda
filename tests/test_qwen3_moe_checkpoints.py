"""Qwen3-MoE checkpoints, from transformers and from us, in and out."""

import pathlib

import flax.traverse_util
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from acceptmoe_jax.models.qwen3_moe import Qwen3MoeConfig
from acceptmoe_jax.runtime import pretrained
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.key_maps import target_key
from acceptmoe_jax.weights.saving import save_qwen3_moe
from pallas_kernels.masked_expert_gemm import ExpertBank


def load_target(directory: pathlib.Path) -> tuple[Checkpoint, Qwen3MoeConfig, dict, tuple]:
    checkpoint = Checkpoint.open(directory)
    config = Qwen3MoeConfig.from_hf(checkpoint.config, checkpoint.config_file)
    loaded = pretrained.load_target(checkpoint, config, jnp.float32)
    return checkpoint, config, loaded.target, loaded.banks


@pytest.mark.parametrize("name", ["qwen3_moe_norm", "qwen3_moe_nonorm"])
def test_checkpoints_of_transformers_fill_the_model_exactly(data_dir, name):
    checkpoint, config, params, banks = load_target(data_dir / name)
    flat = flax.traverse_util.flatten_dict(params)
    for path, leaf in flat.items():
        np.testing.assert_array_equal(leaf, checkpoint.read(target_key(path)))
    for layer, bank in enumerate(banks):
        for expert in range(config.num_experts if bank is not None else 0):
            key = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
            np.testing.assert_array_equal(bank.down[expert], checkpoint.read(key))


def test_a_target_saved_by_us_is_the_same_checkpoint(data_dir, tmp_path):
    original, _, params, banks = load_target(data_dir / "qwen3_moe_norm")
    save_qwen3_moe(
        tmp_path, original.config, params, banks, dtype=jnp.float32, max_shard_bytes=200_000
    )
    saved = Checkpoint.open(tmp_path)
    assert saved.source.name == "model.safetensors.index.json"
    assert saved.config == original.config
    assert set(saved.entries) == set(original.entries)
    for key in original.entries:
        np.testing.assert_array_equal(saved.read(key), original.read(key))


def test_experts_are_saved_by_id_wherever_their_slots_are(data_dir, tmp_path):
    original, config, params, banks = load_target(data_dir / "qwen3_moe_norm")
    order = np.random.default_rng(3).permutation(config.num_experts)
    shuffled = [
        bank
        and ExpertBank(
            gate=bank.gate[order],
            up=bank.up[order],
            down=bank.down[order],
            slot_of=jnp.asarray(np.argsort(order), jnp.int32),
        )
        for bank in banks
    ]
    save_qwen3_moe(tmp_path, original.config, params, shuffled, dtype=jnp.float32)
    saved = Checkpoint.open(tmp_path)
    for key in original.entries:
        np.testing.assert_array_equal(saved.read(key), original.read(key))


def test_weights_are_saved_in_bfloat16_unless_told_otherwise(data_dir, tmp_path):
    original, _, params, banks = load_target(data_dir / "qwen3_moe_norm")
    save_qwen3_moe(tmp_path, original.config, params, banks)
    saved = Checkpoint.open(tmp_path)
    assert {entry.dtype for entry in saved.entries.values()} == {np.dtype(ml_dtypes.bfloat16)}
