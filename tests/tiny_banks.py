"""Banks of random bits in every format that experts have, all dimensions different."""

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.models.experts import bank_weights
from pallas_kernels.masked_expert_gemm import ExpertBank
from pallas_kernels.mxfp4 import BLOCK, Mxfp4

EXPERTS = 11

# Name -> (dtype of the matrices or None for MXFP4, of the biases or None for none, D, F). Wide
# biases in narrow records leave gaps, since one expert's matrices are an odd number of items.
FORMATS = {
    "float32": (jnp.float32, None, 10, 6),
    "bfloat16": (jnp.bfloat16, None, 10, 6),
    "bfloat16 with float32 biases": (jnp.bfloat16, jnp.float32, 9, 7),
    "MXFP4 with bfloat16 biases": (None, jnp.bfloat16, 2 * BLOCK, 3 * BLOCK),
    "MXFP4 with float32 biases": (None, jnp.float32, BLOCK, 3 * BLOCK),
}


def bank(name: str, seed: int) -> ExpertBank:
    """A bank that holds every expert, in slots that are not their ids."""
    dtype, bias_dtype, d, f = FORMATS[name]
    rng = np.random.default_rng(seed)

    def random(shape, dtype):
        bits = rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
        array = bits.view(dtype)[..., 0]
        with np.errstate(invalid="ignore"):  # bfloat16's NaNs
            # Whether a NaN keeps its payload is up to the hardware that moves it as a number.
            return jnp.asarray(np.where(np.isnan(array), 0, array).astype(dtype))

    def matrix(rows, columns):
        shape = (EXPERTS, rows, columns)
        if dtype is not None:
            return random(shape, dtype)
        blocks = (EXPERTS, rows, columns // BLOCK)
        return Mxfp4(random((*blocks, 16), jnp.uint8), random(blocks, jnp.uint8))

    biases = {"gate_bias": f, "up_bias": f, "down_bias": d}
    return ExpertBank(
        gate=matrix(f, d),
        up=matrix(f, d),
        down=matrix(d, f),
        slot_of=jnp.asarray(rng.permutation(EXPERTS), jnp.int32),
        **{
            name: None if bias_dtype is None else random((EXPERTS, width), bias_dtype)
            for name, width in biases.items()
        },
    )


def expert_bits(bank: ExpertBank, slot: int) -> list[bytes]:
    """The bytes of every leaf of the expert in a slot."""
    return [np.asarray(leaf[slot]).tobytes() for leaf in jax.tree.leaves(bank_weights(bank))]
