"""MXFP4 decoded in registers: by bit operations, since a GPU has no table at hand."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, UInt8

# What turns the bits of a float16 into FP4's exponents: the difference of their biases, 15 - 1.
_BIAS = 14


def power(scales: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """`2^(scale - 127 + 14)`; NaN at the scale 255, infinite above 240."""
    scales = scales.astype(jnp.int32)
    bits = jnp.minimum(scales + _BIAS, 255) << 23 | jnp.where(scales == 255, 1 << 22, 0)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def decode(
    pairs: UInt8[Array, "*shape"], powers: Float[Array, "*shape"]
) -> tuple[BFloat16[Array, "*shape"], BFloat16[Array, "*shape"]]:
    """The elements in the low and in the high nibbles, exactly.

    FP4's three bits of exponent and mantissa are those of a float16 that is 2^14 times smaller,
    its subnormal included.
    """
    bits = pairs.astype(jnp.uint16)
    low = (bits & 0x07) << 9 | (bits & 0x08) << 12
    high = (bits & 0x70) << 5 | (bits & 0x80) << 8
    halves = (jax.lax.bitcast_convert_type(half, jnp.float16) for half in (low, high))
    return tuple((half.astype(jnp.float32) * powers).astype(jnp.bfloat16) for half in halves)
