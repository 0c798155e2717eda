"""What the Mosaic GPU kernels share: operands of tensor cores, and interpret mode.

Import it where `compat.require_mosaic` has passed: jax before 0.11 lacks what it imports.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

# TMA tells its swizzled layouts apart by the bytes of a row.
_SWIZZLES = (128, 64, 32)

# Every load and sum names its layout, so that none has to be inferred, which takes seconds.
EXPLICIT_LAYOUTS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclasses.dataclass(frozen=True)
class MmaLayouts:
    """How the four warps of a block hold the operands of an `mma` of m rows and n columns.

    `m_warps` of them divide the rows and the others the columns; an operand that they do not
    divide is held by each.
    """

    lhs: plgpu.Layout
    rhs: plgpu.Layout
    acc: plgpu.Layout

    @classmethod
    def of(cls, m: int, n: int, dtype: jnp.dtype = jnp.bfloat16) -> "MmaLayouts":
        """For `[m, k] @ [k, n]` of operands in `dtype`, with k a multiple of 16.

        Raises:
          ValueError: if four warps cannot divide the product.
        """
        for m_warps in (4, 2, 1):
            if m % (16 * m_warps) == 0 and n % (32 // m_warps) == 0:
                layouts = (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
                return cls(*(layout(jnp.dtype(dtype), m_warps=m_warps) for layout in layouts))
        raise ValueError(f"four warps cannot divide an mma of {m} rows and {n} columns")


def zeros(shape: tuple[int, ...], layout: plgpu.Layout) -> Float[Array, "..."]:
    """An accumulator of zeros."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def load(ref: jax.Ref, layout: plgpu.Layout) -> Array:
    """The whole of `ref`, in shared or global memory, as registers in `layout`."""
    return plgpu.load(ref, layout=layout, optimized=False)


def mma(
    acc: Float[Array, "m n"], a: Float[Array, "m k"], b: Float[Array, "k n"], *, interpret: bool
) -> Float[Array, "m n"]:
    """`acc + a @ b`; interpret mode has no rule for `plgpu.mma` and takes the plain product."""
    if interpret:
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(acc, a, b)


def swizzled(rows: int, columns: int, step: int, dtype: jnp.dtype) -> tuple:
    """Transforms of a tile in shared memory that is `step` columns wide and read row by row.

    Empty where `[rows, columns]` in global memory is not whole swizzled tiles.
    """
    itemsize = jnp.dtype(dtype).itemsize
    for swizzle in _SWIZZLES:
        width = swizzle // itemsize
        if columns % width == 0 and step % width == 0 and rows % 8 == 0:
            return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(swizzle)
    return ()


def interpreter(interpret: bool) -> plgpu.InterpretGPUParams | None:
    """`interpret=` of `plgpu.kernel`: a race between threads or with a copy is an error."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else None
