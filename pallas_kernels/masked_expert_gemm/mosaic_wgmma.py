"""One product of masked_expert_gemm as a Mosaic GPU kernel, with `wgmma`: sm_90 alone.

The weights are the left operand, 64 output features an instruction, and the rows the right one;
both are read from shared memory by the tensor cores themselves, and no thread loads either.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_helpers as helpers
from pallas_kernels.masked_expert_gemm.mosaic import ALIGN

# Output features of an instruction, and of a thread block over all its matrices.
_FEATURES, _TILE = 64, 128
# Elements of the input in a step: 128 bytes, the widest swizzle.
_STEP = 64
# Shared memory of a pipeline: two thread blocks a multiprocessor.
_PIPELINE_BYTES = 96 << 10


@functools.partial(jax.jit, static_argnames=("row_tiles", "finish", "name", "interpret"))
def product(
    work: Int[Array, "4 E"],
    x: Float[Array, "1 X in"],
    matrices: tuple[Float[Array, "C out in"], ...],
    biases: tuple[Float[Array, "C out"] | None, ...],
    *,
    row_tiles: tuple[int, ...],
    finish: Callable[..., Float[Array, "..."]],
    name: str,
    interpret: bool,
) -> Float[Array, "1 E R out"]:
    """As `mosaic_product.product`, of weights that are numbers and one row tile.

    Raises:
      ValueError: if the weights' width is no multiple of 16.
    """
    (rows,) = row_tiles
    num_experts = work.shape[1]
    _, num_out, width = matrices[0].shape
    features = _TILE // len(matrices) if num_out % _TILE == 0 else _FEATURES
    tiles = pl.cdiv(num_out, features)
    step = min(_STEP, width)
    step_bytes = step * x.dtype.itemsize * (rows + features * len(matrices))
    tiled = helpers.swizzled(ALIGN, math.gcd(width, x.shape[2]), step, x.dtype)
    if not tiled:
        raise ValueError(f"wgmma takes weights with a width of a multiple of 16, not {width}")
    operands, structure = jax.tree.flatten(
        (matrices, [_padded(bias, tiles * features) for bias in biases])
    )

    def kernel(work, x, *refs):
        *refs, out = refs
        matrices, biases = jax.tree.unflatten(structure, refs)
        i, tile = jax.lax.axis_index("expert"), jax.lax.axis_index("tile")
        columns = pl.ds(tile * features, features)

        @pl.when(work[0, i] > 0)
        def _():
            first, slot, expert = (work[j, i] for j in (1, 2, 3))

            def multiply(*sums):
                def add_products(_, x_tile, *weight_tiles):
                    for of_matrix, weights in zip(sums, weight_tiles):
                        plgpu.wgmma(of_matrix, weights, x_tile.T)
                    plgpu.wgmma_wait(len(sums))  # the step before has read its tiles

                tile_of = functools.partial(plgpu.BlockSpec, transforms=tiled, delay_release=1)
                plgpu.emit_pipeline(
                    add_products,
                    grid=(pl.cdiv(width, step),),
                    in_specs=[tile_of((rows, step), lambda k: (0, k))]
                    + [tile_of((features, step), lambda k: (tile, k))] * len(sums),
                    max_concurrent_steps=max(2, _PIPELINE_BYTES // step_bytes),
                )(x.at[0, pl.ds(first * ALIGN, rows)], *(m.at[slot] for m in matrices))
                return [of_matrix[...] for of_matrix in sums]

            accumulators = [plgpu.ACC((features, rows), jnp.float32)] * len(matrices)
            sums = pl.run_scoped(multiply, *accumulators)
            sums = [
                s if bias is None else s + _column(bias.at[slot, columns], s.shape)
                for s, bias in zip(sums, biases)
            ]
            y = finish(*sums).astype(out.dtype)
            y = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
            place = out.at[0, expert, pl.ds(0, rows), columns]
            plgpu.store(place.T, y, optimized=False)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((1, num_experts, rows, tiles * features), x.dtype),
        grid=(num_experts, tiles),
        grid_names=("expert", "tile"),
        compiler_params=helpers.EXPLICIT_LAYOUTS,
        interpret=helpers.interpreter(interpret),
        kernel_name=name,
    )(work, x, *operands)


def _column(bias, shape):
    column = helpers.load(bias, plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(column, shape, [0]), plgpu.Layout.WGMMA)


def _padded(bias, features):
    """To whole tiles: none is read beyond."""
    if bias is None:
        return None
    return jnp.pad(bias, ((0, 0), (0, features - bias.shape[1])))
