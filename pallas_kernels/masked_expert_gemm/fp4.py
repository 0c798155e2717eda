"""MXFP4 weights inside a Triton kernel: 16-bit words of four codes to bfloat16, by bit operations.

A word holds four neighbouring elements of a row, so that a tile of words gives four planes of
weights: plane n holds the elements 4j + n. The rows of the other operand are split in the same
way, and the product is the sum over planes; no weight changes its place.

On a GPU two words make one register, and two weights are decoded at once: six operations, which a
kernel bound by its bytes can afford, where one weight at a time takes three times as many. Triton
offers this as inline assembly only, which interpret mode cannot run: there the same operations
are written in jnp, and a test runs the assembly on every word and scale against `dequantise`.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, UInt8, UInt16

from pallas_kernels.mxfp4 import BLOCK, Mxfp4

PLANES = 4
WORDS = BLOCK // PLANES  # of a block

# Sign and magnitude go to where bfloat16 has its sign and the low end of its exponent: a number
# 2^-126 times too small, subnormal where the code is. `mul.bf16x2` keeps subnormals, and both
# factors are powers of two.
DECODE = """{{ .reg .b32 sign, magnitude, unit;
shl.b32 sign, $1, {sign_by};
and.b32 sign, sign, 0x80008000;
{magnitude_shift}.b32 magnitude, $1, {magnitude_by};
and.b32 magnitude, magnitude, 0x01c001c0;
or.b32 sign, sign, magnitude;
mov.b32 unit, 0x7e807e80;
mul.rn.bf16x2 sign, sign, unit;
mul.rn.bf16x2 $0, sign, $2;
}}"""


def words(matrix: Mxfp4) -> Mxfp4:
    """The same memory, with a row's blocks as 16-bit words: `[C, out, in / 4]`."""
    pairs = matrix.blocks.reshape(*matrix.scales.shape[:2], -1, 2)
    return matrix.replace(blocks=jax.lax.bitcast_convert_type(pairs, jnp.uint16))


def decode(
    word: UInt16[Array, "out words"],
    scale: UInt8[Array, "out blocks"],
    interpret: bool,
) -> tuple[BFloat16[Array, "out words"], ...]:
    """The four planes of a tile, exactly, but for weights of the scale 0: they read as 0.

    (The largest of those is 1.5 * 2^-125.)
    """
    wide = scale.astype(jnp.uint16)
    factor = _bfloat16(jnp.where(wide == 255, jnp.uint16(0x7FC0), wide << 7))
    factor = jnp.broadcast_to(factor[:, :, None], (*factor.shape, WORDS)).reshape(word.shape)
    if interpret:
        return tuple(_value(word >> 4 * plane & 15) * factor for plane in range(PLANES))
    planes = []
    for plane in range(PLANES):
        planes += plgpu.elementwise_inline_asm(
            assembly(plane),
            args=[word, factor],
            constraints="=r,r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(word.shape, jnp.bfloat16)],
        )
    return tuple(planes)


def assembly(plane: int) -> str:
    """PTX that decodes a plane: $1 holds two words, $2 their factors and $0 the two weights."""
    by = 6 - 4 * plane  # from the code's bits 2..0 to bits 8..6
    return DECODE.format(
        sign_by=12 - 4 * plane,
        magnitude_shift="shl" if by > 0 else "shr",
        magnitude_by=abs(by),
    )


def _value(code):
    """{0, 0.5, 1, 1.5, 2, 3, 4, 6} with a sign, without the subnormals that a CPU would flush."""
    magnitude = code & 7
    bits = jnp.where(magnitude == 1, jnp.uint16(252), magnitude + 252) << 6
    return _bfloat16(jnp.where(magnitude == 0, jnp.uint16(0), bits) | (code & 8) << 12)


def _bfloat16(bits):
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
