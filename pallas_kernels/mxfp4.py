"""MXFP4: blocks of 32 four-bit floats that share an exponent, 4.25 bits a weight.

The format is that of the OCP Microscaling specification 1.0, the layout that of GPT-OSS on the
hub. A weight is one of {0, 0.5, 1, 1.5, 2, 3, 4, 6} with a sign, times 2^(scale - 127); the scale
255 makes its whole block NaN. Blocks lie along the input.

Both directions are exact in float32 wherever the weights are normal numbers: every product is one
with a power of two. Subnormal ones (below 2^-126: only scales 0 and 1 hold any) read as 0 and
round to 0, since XLA's CPU code flushes them; what exceeds float32 (only scales 253 and 254 hold
any) reads as infinity.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, UInt8, UInt32

BLOCK = 32

# The value of each code; the fourth bit is the sign.
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# [256, 2]: both values of a byte, the low nibble first. On the CPU one look-up a byte costs a
# tenth of what building the two floats from the bits does.
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)

_NAN_SCALE = 255
# The largest scale at which all values are finite in float32.
_MAX_SCALE = 252


@flax.struct.dataclass
class Mxfp4:
    """Packed matrices `[..., out, in]`.

    Attributes:
      blocks: byte j of a block holds its elements 2j (low nibble) and 2j + 1 (high nibble).
      scales: biased exponents of the blocks.
    """

    blocks: UInt8[Array, "*lead out blocks 16"]
    scales: UInt8[Array, "*lead out blocks"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices that are packed."""
        return (*self.scales.shape[:-1], BLOCK * self.scales.shape[-1])

    def __getitem__(self, index) -> "Mxfp4":
        """Chooses among the leading axes only: `out` and `in` are indexed once dequantised."""
        return Mxfp4(self.blocks[index], self.scales[index])


def dequantise(packed: Mxfp4, dtype: jnp.dtype = jnp.float32) -> Float[Array, "*lead out in"]:
    """The numbers that are packed, exactly (see the module), as float32 or bfloat16."""
    pairs = jnp.asarray(_PAIRS).at[packed.blocks].get(mode="promise_in_bounds")
    values = _scaled(pairs.reshape(*packed.scales.shape, BLOCK), packed.scales)
    return values.reshape(packed.shape).astype(dtype)


def quantise(weights: Float[Array, "*lead out in"]) -> Mxfp4:
    """The nearest MXFP4 weights: each element rounded to nearest, ties to even, at a block's scale.

    The scale is the one of the specification, floor(log2(largest)) - 2, at which elements may
    saturate at 6, or the next one, whichever has the smaller squared error (the specification's if
    neither has). What MXFP4 holds exactly stays what it is, -0 included. A block with a NaN or an
    infinity, which no code stands for, becomes NaN.

    Args:
      weights: float32 or bfloat16; `in` must be a multiple of 32.
    """
    values, scales, above = _rounded(weights)
    values = jnp.where(above[..., None], values / 2, values)
    # {0, 0.5, 1, 1.5, 2, 3, 4, 6} -> 0 .. 7
    codes = jnp.where(values < 2, 2 * values, jnp.where(values < 4, values + 2, values / 2 + 4))
    codes = codes.astype(jnp.uint8) | jnp.signbit(_blocks(weights)).astype(jnp.uint8) << 3
    scales = jnp.where(scales == _NAN_SCALE, _NAN_SCALE, scales + above)
    return Mxfp4(codes[..., ::2] | codes[..., 1::2] << 4, scales.astype(jnp.uint8))


def round_to_mxfp4(weights: Float[Array, "*lead out in"]) -> Float[Array, "*lead out in"]:
    """`dequantise(quantise(weights))` bit for bit, without the packing; in the weights' dtype.

    For training with the rounding in the loop. It has no useful gradient: the caller passes the
    gradient straight through.
    """
    values, scales, _ = _rounded(weights)
    rounded = _scaled(values, scales).reshape(weights.shape).astype(weights.dtype)
    return jnp.copysign(rounded, weights)


def _blocks(weights: Float[Array, "*lead out in"]) -> Float[Array, "*lead out blocks 32"]:
    if weights.shape[-1] % BLOCK:
        raise ValueError(f"rows of {weights.shape[-1]} are not whole blocks of {BLOCK}")
    return weights.reshape(*weights.shape[:-1], -1, BLOCK)


def _rounded(
    weights: Float[Array, "*lead out in"],
) -> tuple[
    Float[Array, "*lead out blocks 32"],
    Int[Array, "*lead out blocks"],
    Bool[Array, "*lead out blocks"],
]:
    """(rounded magnitudes in units of 2^(scale - 127), the specification's scales or 255, which
    blocks are rounded at the scale above: theirs are even or whole, up to 8)."""
    magnitudes = jnp.abs(_blocks(weights).astype(jnp.float32))
    exponents = (_bits(jnp.max(magnitudes, axis=-1)) >> 23).astype(jnp.int32)  # NaN prevails
    scales = jnp.clip(exponents - 2, 0, _MAX_SCALE)
    scaled = magnitudes * _power_of_two(127 - scales)[..., None]
    at_scale, at_next = _nearest(scaled), 2 * _nearest(scaled / 2)
    above = _squared_error(scaled, at_next) < _squared_error(scaled, at_scale)
    above &= scales < _MAX_SCALE
    scales = jnp.where(exponents == 255, _NAN_SCALE, scales)
    return jnp.where(above[..., None], at_next, at_scale), scales, above


def _nearest(magnitudes: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest of {0, 0.5, 1, 1.5, 2, 3, 4, 6}; between two, the one whose code is even."""
    fine, coarse = magnitudes < 2, magnitudes >= 4
    steps = jnp.round(magnitudes * jnp.where(fine, 2.0, jnp.where(coarse, 0.5, 1.0)))
    return jnp.minimum(steps * jnp.where(fine, 0.5, jnp.where(coarse, 2.0, 1.0)), 6)


def _squared_error(
    exact: Float[Array, "*blocks 32"], rounded: Float[Array, "*blocks 32"]
) -> Float[Array, "*blocks"]:
    """In whole numbers: errors of up to 2 in steps of 1/256, whose squares add up to 2^23 at most.

    So the sum, and with it the choice of scale, does not depend on the order that XLA adds in.
    """
    return jnp.sum(jnp.square(jnp.round(jnp.abs(exact - rounded) * 256)), axis=-1)


def _scaled(
    values: Float[Array, "*blocks 32"], scales: Integer[Array, "*blocks"]
) -> Float[Array, "*blocks 32"]:
    """`values * 2^(scale - 127)`; NaN at the scale 255."""
    # In two factors: the power of the scale 0 is no normal float32.
    exponents = scales.astype(jnp.int32) - 127
    first = exponents >> 1
    second = jnp.where(scales == _NAN_SCALE, jnp.nan, _power_of_two(exponents - first))
    return values * _power_of_two(first)[..., None] * second[..., None]


def _power_of_two(exponents: Int[Array, "..."]) -> Float[Array, "..."]:
    """Exactly, for exponents from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponents + 127) << 23, jnp.float32)


def _bits(values: Float[Array, "..."]) -> UInt32[Array, "..."]:
    return jax.lax.bitcast_convert_type(values, jnp.uint32)
