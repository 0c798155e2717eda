"""MXFP4 and GPT-OSS checkpoints as transformers reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from acceptmoe_jax.models import decoder
from acceptmoe_jax.models.experts import EXPERT_MATRICES, bank_shapes, resident_bank
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.saving import save_gpt_oss
from pallas_kernels.masked_expert_gemm import ExpertBank
from pallas_kernels.mxfp4 import Mxfp4, dequantise, quantise
from tests.tiny_models import GPT_OSS

pytestmark = pytest.mark.torch


def test_every_byte_reads_as_transformers_reads_it():
    """From scale 2 (below, XLA flushes subnormal numbers) to 254; transformers does not know that
    255 is NaN. It returns its matrices transposed."""
    scales = np.arange(2, 255, dtype=np.uint8)
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(2, 8, 16), (253, 2, 8, 16))
    scales = np.broadcast_to(scales[:, None, None], (253, 2, 8))
    for ours, theirs in ((jnp.float32, torch.float32), (jnp.bfloat16, torch.bfloat16)):
        expected = convert_moe_packed_tensors(
            torch.tensor(blocks.copy()), torch.tensor(scales.copy()), dtype=theirs
        )
        actual = dequantise(Mxfp4(jnp.asarray(blocks), jnp.asarray(scales)), ours)
        actual = np.asarray(actual, np.float32)
        expected = expected.transpose(1, 2).float().numpy()
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[bool, Checkpoint]:
    """A random model saved by us, as MXFP4 (True) and converted (False), its values the same."""
    rng = np.random.default_rng(5)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape), decoder.abstract_params(GPT_OSS, jnp.float32)
    )
    banks = [random_bank(layer) for layer in range(GPT_OSS.num_layers)]
    saved = {}
    for mxfp4 in (True, False):
        directory = tmp_path_factory.mktemp(f"mxfp4_{mxfp4}")
        save_gpt_oss(directory, GPT_OSS.to_hf(mxfp4), params, banks, mxfp4=mxfp4)
        saved[mxfp4] = Checkpoint.open(directory)
    return saved


def random_bank(layer: int) -> ExpertBank:
    """Matrices that MXFP4 holds exactly, and biases."""
    rng = np.random.default_rng(layer)
    weights = {name: rng.normal(size=shape) for name, shape in bank_shapes(GPT_OSS).items()}
    weights = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in weights.items()}
    weights |= {name: jax.jit(quantise)(weights[name]) for name in EXPERT_MATRICES}
    return resident_bank(weights, GPT_OSS.num_experts)


def test_transformers_unpacks_our_blocks_to_the_converted_matrices(checkpoints):
    packed, converted = checkpoints[True], checkpoints[False]
    for layer in range(GPT_OSS.num_layers):
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            theirs = convert_moe_packed_tensors(
                torch.from_numpy(packed.read(f"{key}_blocks")),
                torch.from_numpy(packed.read(f"{key}_scales")),
            )
            np.testing.assert_array_equal(theirs.float(), converted.read(key).astype(np.float32))


def test_transformers_loads_the_converted_checkpoint_that_we_save(checkpoints):
    model, report = GptOssForCausalLM.from_pretrained(
        checkpoints[False].directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    tensors = model.state_dict()
    assert set(tensors) == set(checkpoints[False].entries)
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, checkpoints[False].read(key).astype(np.float32))
