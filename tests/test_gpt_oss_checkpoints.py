"""GPT-OSS checkpoints in both formats, in and out: MXFP4 as published, and floats as converted."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.experts import bank_weights
from acceptmoe_jax.models.families import target_config
from acceptmoe_jax.runtime import pretrained
from acceptmoe_jax.runtime.programs import Weights
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.safetensors_io import TensorEntry, save_sharded
from acceptmoe_jax.weights.saving import save_gpt_oss
from pallas_kernels.mxfp4 import Mxfp4, dequantise
from tests.gpt_oss_layout import U8, layout
from tests.tiny_models import GPT_OSS

E, F, D = GPT_OSS.num_experts, GPT_OSS.expert_width, GPT_OSS.hidden_size
EXPERTS = "model.layers.{}.mlp.experts."
NIBBLES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def published_tensors() -> dict[str, np.ndarray]:
    """A random model in MXFP4, no two rows alike."""
    rng = np.random.default_rng(11)
    tensors = {}
    for key, (shape, dtype) in layout(GPT_OSS.to_hf(mxfp4=True), mxfp4=True).items():
        if key.endswith("_scales"):
            tensors[key] = rng.integers(118, 126, shape, dtype=np.uint8)
        elif dtype == U8:
            tensors[key] = rng.integers(0, 256, shape, dtype=np.uint8)
        else:
            tensors[key] = rng.normal(size=shape).astype(dtype)
    return tensors


def values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What is packed, in float64: `[E, out, in]`."""
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    numbers = NIBBLES[nibbles] * 2.0 ** (scales[..., None].astype(int) - 127)
    return numbers.reshape(*scales.shape[:-1], -1)


def converted_tensors() -> dict[str, np.ndarray]:
    """The same model in bfloat16, which holds its values exactly."""
    tensors = published_tensors()
    for layer in range(GPT_OSS.num_layers):
        for name in ("gate_up_proj", "down_proj"):
            key = EXPERTS.format(layer) + name
            numbers = values(tensors.pop(f"{key}_blocks"), tensors.pop(f"{key}_scales"))
            tensors[key] = numbers.swapaxes(1, 2).astype(ml_dtypes.bfloat16)
    return tensors


def write(directory: pathlib.Path, tensors: dict[str, np.ndarray], mxfp4: bool) -> Checkpoint:
    save_sharded(directory, tensors)
    (directory / "config.json").write_text(json.dumps(GPT_OSS.to_hf(mxfp4)))
    return Checkpoint.open(directory)


def load(checkpoint: Checkpoint, dtype: jnp.dtype = jnp.float32) -> Weights:
    config = target_config(checkpoint.config, checkpoint.config_file)
    return pretrained.load_target(checkpoint, config, dtype)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("published"), published_tensors(), mxfp4=True)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("converted"), converted_tensors(), mxfp4=False)


def assert_same_tensors(saved: Checkpoint, original: Checkpoint) -> None:
    assert set(saved.entries) == set(original.entries)
    for key in original.entries:
        assert saved.entries[key].dtype == original.entries[key].dtype
        np.testing.assert_array_equal(saved.read(key), original.read(key))


# --- In ----------------------------------------------------------------------------------------


def test_gate_and_up_are_the_even_and_the_odd_rows(published):
    bank = load(published).banks[3]
    key = f"{EXPERTS.format(3)}gate_up_proj"
    gate_up = values(published.read(f"{key}_blocks"), published.read(f"{key}_scales"))
    gate_up_bias = published.read(f"{key}_bias")
    for matrix, bias, first in ((bank.gate, bank.gate_bias, 0), (bank.up, bank.up_bias, 1)):
        matrix, bias = np.asarray(dequantise(matrix)), np.asarray(bias)
        assert matrix.shape == (E, F, D)
        for expert in range(E):
            for row in range(F):
                at = (expert, 2 * row + first)
                np.testing.assert_array_equal(matrix[expert, row], gate_up[at])
                assert bias[expert, row] == gate_up_bias[at]


def test_both_formats_are_the_same_model(published, converted):
    packed, floats = load(published), load(converted)
    jax.tree.map(np.testing.assert_array_equal, packed.target, floats.target)
    for packed_bank, float_bank in zip(packed.banks, floats.banks, strict=True):
        assert float_bank.down.shape == (E, D, F)
        unpacked = {
            name: dequantise(leaf) if isinstance(leaf, Mxfp4) else leaf
            for name, leaf in bank_weights(packed_bank).items()
        }
        jax.tree.map(np.testing.assert_array_equal, unpacked, bank_weights(float_bank))


def test_packed_experts_stay_packed(published):
    for bank in load(published, jnp.bfloat16).banks:
        matrices = (bank.gate, bank.up, bank.down)
        leaves = jax.tree.leaves(matrices)
        assert {leaf.dtype for leaf in leaves} == {U8}
        weights = sum(np.prod(matrix.shape) for matrix in matrices)
        assert 8 * sum(leaf.nbytes for leaf in leaves) == 4.25 * weights
        assert bank.down_bias.dtype == jnp.bfloat16


def test_what_is_no_matrix_is_as_in_the_file(published):
    params = load(published).target
    for name, leaf in (
        ("layers.2.self_attn.sinks", params["layers_2"]["self_attn"]["sinks"]),
        ("layers.1.self_attn.o_proj.bias", params["layers_1"]["self_attn"]["o_proj"]["bias"]),
        ("layers.4.mlp.router.bias", params["layers_4"]["mlp"]["router"]["bias"]),
        ("layers.4.mlp.router.weight", params["layers_4"]["mlp"]["router"]["weight"]),
    ):
        np.testing.assert_array_equal(leaf, published.read(f"model.{name}"))


def floats_beside_blocks(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{EXPERTS.format(2)}down_proj"] = np.zeros((E, F, D), np.float32)


def no_experts(tensors: dict[str, np.ndarray]) -> None:
    for key in [key for key in tensors if key.startswith(EXPERTS.format(2))]:
        del tensors[key]


def no_scales(tensors: dict[str, np.ndarray]) -> None:
    del tensors[f"{EXPERTS.format(2)}gate_up_proj_scales"]


def input_first(tensors: dict[str, np.ndarray]) -> None:
    key = f"{EXPERTS.format(2)}down_proj_blocks"
    tensors[key] = tensors[key].swapaxes(1, 2)


def float_blocks(tensors: dict[str, np.ndarray]) -> None:
    key = f"{EXPERTS.format(2)}down_proj_blocks"
    tensors[key] = tensors[key].astype(np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            floats_beside_blocks,
            r"holds a layer's experts in two formats: model.layers.2.mlp.experts.down_proj, "
            r"model.layers.2.mlp.experts.gate_up_proj_blocks, .*",
        ),
        (
            no_experts,
            r"holds neither model.layers.2.mlp.experts.gate_up_proj nor "
            r"model.layers.2.mlp.experts.gate_up_proj_blocks",
        ),
        (no_scales, r"lacks 1 tensor \(model.layers.2.mlp.experts.gate_up_proj_scales\)"),
        (
            input_first,
            r"model.layers.2.mlp.experts.down_proj_blocks has the shape \[13, 2, 32, 16\], "
            r"expected \[13, 32, 2, 16\]",
        ),
        (
            float_blocks,
            "layers.2.mlp.experts.down_proj_blocks has the dtype float32, expected uint8",
        ),
    ],
)
def test_experts_in_no_known_format_are_named_before_any_is_read(
    tmp_path, monkeypatch, change, message
):
    tensors = published_tensors()
    change(tensors)
    checkpoint = write(tmp_path, tensors, mxfp4=True)
    monkeypatch.setattr(TensorEntry, "read_into", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(UserError, match=message) as error:
        load(checkpoint)
    assert "model.safetensors" in str(error.value)


def test_a_width_that_is_not_whole_blocks_is_refused(published):
    config = dict(published.config, intermediate_size=48)
    odd = Checkpoint(published.directory, config, published.source, published.entries)
    with pytest.raises(UserError, match="config.json: intermediate_size = 48 is not a multiple"):
        load(odd)


# --- Out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mxfp4", [True, False])
def test_a_model_saved_by_us_is_the_same_checkpoint(published, converted, tmp_path, mxfp4):
    original = published if mxfp4 else converted
    weights = load(original)
    save_gpt_oss(
        tmp_path,
        original.config,
        weights.target,
        weights.banks,
        mxfp4=mxfp4,
        max_shard_bytes=100_000,
    )
    saved = Checkpoint.open(tmp_path)
    assert saved.source.name == "model.safetensors.index.json"
    assert saved.config == original.config
    assert_same_tensors(saved, original)


def test_packed_experts_are_saved_as_numbers(published, converted, tmp_path):
    weights = load(published)
    save_gpt_oss(tmp_path, converted.config, weights.target, weights.banks, mxfp4=False)
    assert_same_tensors(Checkpoint.open(tmp_path), converted)


def test_numbers_that_mxfp4_holds_are_packed_without_loss(published, converted, tmp_path):
    weights = load(converted)
    save_gpt_oss(tmp_path, published.config, weights.target, weights.banks, mxfp4=True)
    saved = Checkpoint.open(tmp_path)
    assert set(saved.entries) == set(published.entries)
    for bank, expected in zip(load(saved).banks, weights.banks, strict=True):
        for matrix in ("gate", "up", "down"):
            np.testing.assert_array_equal(
                dequantise(getattr(bank, matrix)), getattr(expected, matrix)
            )


@pytest.mark.parametrize("mxfp4", [True, False])
def test_experts_are_saved_by_id_wherever_their_slots_are(published, converted, tmp_path, mxfp4):
    original = published if mxfp4 else converted
    weights = load(original)
    order = np.random.default_rng(3).permutation(E)
    slot_of = jnp.asarray(np.argsort(order), jnp.int32)
    shuffled = [
        jax.tree.map(lambda leaf: leaf[order], bank).replace(slot_of=slot_of)
        for bank in weights.banks
    ]
    save_gpt_oss(tmp_path, original.config, weights.target, shuffled, mxfp4=mxfp4)
    assert_same_tensors(Checkpoint.open(tmp_path), original)


def test_matrices_that_are_not_whole_blocks_are_not_saved_as_mxfp4(converted, tmp_path):
    weights = load(converted)
    narrow = [
        bank.replace(gate=bank.gate[:, :48], up=bank.up[:, :48], down=bank.down[..., :48])
        for bank in weights.banks
    ]
    with pytest.raises(UserError, match="intermediate_size = 48 is not a multiple of 32"):
        save_gpt_oss(tmp_path, converted.config, weights.target, narrow, mxfp4=True)
    assert not list(tmp_path.iterdir())
