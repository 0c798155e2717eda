"""tree_attention in Mosaic GPU, with `mma`, for sm_90 and sm_120.

A thread block is one query head, 64 rows and one split of the columns; its four warps divide the
rows. Heads that share a kv head meet its tiles in the L2 cache. Splits are those of the Triton
kernels, and a second launch merges them in their order.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.compat import require_mosaic
from pallas_kernels.tree_attention.triton import FLOOR, LOG2_E, tiles_of_split

_ROWS = 64  # 16 for each of the four warps
_COLUMNS = 32
_PROGRAMS = 320  # two thread blocks a multiprocessor
# Shared memory of a pipeline, so that any device holds two thread blocks a multiprocessor.
_PIPELINE_BYTES = 44 << 10
# A head's width is padded to whole ones, in which the four warps divide a merged block.
_LANES = 32
_MERGE_ROWS = 16


def mosaic(
    q_TNH: Float[Array, "T N H"],
    k_SKH: Float[Array, "S K H"],
    v_SKH: Float[Array, "S K H"],
    mask_TS: Bool[Array, "T S"],
    sinks_N: Float[Array, "N"] | None,
    begin: Int[Array, ""],
    end: Int[Array, ""],
    *,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """See `tree_attention`.

    Raises:
      NotImplementedError: if this version of jax has no `mma`.
      ValueError: if the numbers are not bfloat16, which interpret mode alone can do without.
    """
    require_mosaic("mosaic")
    if q_TNH.dtype != jnp.bfloat16 and not interpret:
        raise ValueError(f"Mosaic's tensor cores take bfloat16 numbers, not {q_TNH.dtype}")
    rows, heads, width = q_TNH.shape
    length = k_SKH.shape[0]
    blocks = pl.cdiv(rows, _ROWS)
    splits = max(1, min(_PROGRAMS // (blocks * heads), pl.cdiv(length, _COLUMNS)))
    span = [jnp.asarray(place, jnp.int32).reshape(1) for place in (begin, end)]
    pad_rows, pad_width = (0, -rows % _ROWS), (0, -width % _LANES)
    mask = jnp.pad(mask_TS.astype(jnp.int8), (pad_rows, (0, -length % _COLUMNS)))
    partial = _split(
        *span,
        jnp.pad(q_TNH, (pad_rows, (0, 0), pad_width)),
        jnp.pad(k_SKH, ((0, 0), (0, 0), pad_width)),
        jnp.pad(v_SKH, ((0, 0), (0, 0), pad_width)),
        mask,
        scale=width**-0.5 * LOG2_E,
        splits=splits,
        interpret=interpret,
    )
    sinks = () if sinks_N is None else (sinks_N,)
    out = _merge(*span, *partial, *sinks, dtype=q_TNH.dtype, interpret=interpret)
    return out[:rows, :, :width]


@functools.partial(jax.jit, static_argnames=("scale", "splits", "interpret"))
def _split(begin, end, q, k, v, mask, *, scale, splits, interpret):
    """Unnormalised sums, greatest scores and sums of weights of each split.

    A jitted function of its own, so that the layers of a model share one lowering.
    """
    # Versions of jax that have no Mosaic GPU import this module too.
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import mosaic_helpers as helpers

    rows, heads, width = q.shape
    group = heads // k.shape[1]
    of_scores = helpers.MmaLayouts.of(_ROWS, _COLUMNS)
    of_sums = helpers.MmaLayouts.of(_ROWS, width)
    by_row = of_scores.acc.reduce(1)
    tile_bytes = _COLUMNS * (2 * width * k.dtype.itemsize + _ROWS)

    def over_columns(row, shape):
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(row, shape, [0]), of_scores.acc)

    def as_operand(weights):
        """What a product left as the first operand of the next: the same registers, regrouped."""
        if interpret:
            return weights
        to = of_sums.lhs

        @plgpu.inline_mgpu(
            arg_types=(of_scores.acc,),
            return_type=plgpu.ShapeDtypeStruct(weights.shape, weights.dtype, to),
        )
        def regrouped(_, array):
            layout = to.to_mgpu()
            registers = array.registers.reshape(layout.registers_shape(array.shape))
            return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

        return regrouped(weights)

    def kernel(begin_ref, end_ref, q, k, v, mask, sums_ref, tops_ref, totals_ref):
        block, head, split = (jax.lax.axis_index(name) for name in ("block", "head", "split"))
        begin, end = begin_ref[0], end_ref[0]
        first, last, live = tiles_of_split(split, begin, end, _COLUMNS, splits)
        here = pl.ds(block * _ROWS, _ROWS)
        kv_head = head // group

        @pl.when(split < live)
        def _():
            queries = helpers.load(q.at[here, head], of_scores.lhs)

            def step(index, k_tile, v_tile, mask_tile, carry):
                top, total, sums = carry
                scores = helpers.mma(
                    helpers.zeros((_ROWS, _COLUMNS), of_scores.acc),
                    queries,
                    helpers.load(k_tile.T, of_scores.rhs),
                    interpret=interpret,
                )
                seen = helpers.load(mask_tile, of_scores.acc) != 0
                scores = jnp.where(seen, scores * scale, -jnp.inf)
                new_top = jnp.maximum(top, scores.max(axis=1))
                weights = jnp.exp2(scores - over_columns(new_top, scores.shape))
                keep = jnp.exp2(top - new_top)
                total = total * keep + weights.sum(axis=1)
                # A weight of zero does not silence what stands outside the range.
                column = (first + index[0]) * _COLUMNS + plgpu.broadcasted_iota(
                    jnp.int32, (_COLUMNS, width), 0, layout=of_sums.rhs
                )
                values = helpers.load(v_tile, of_sums.rhs)
                values = jnp.where((column >= begin) & (column < end), values, 0)
                sums = helpers.mma(
                    sums * over_columns(keep, sums.shape),
                    as_operand(weights.astype(v.dtype)),
                    values,
                    interpret=interpret,
                )
                plgpu.commit_smem()  # its reads are done before the next copy overwrites them
                return new_top, total, sums

            tile = plgpu.BlockSpec(
                (_COLUMNS, None, width),
                lambda i: (first + i, kv_head, 0),
                transforms=helpers.swizzled(k.shape[0], width, width, k.dtype),
            )
            top, total, sums = plgpu.emit_pipeline(
                step,
                grid=(last - first,),
                in_specs=[
                    tile,
                    tile,
                    plgpu.BlockSpec((_ROWS, _COLUMNS), lambda i: (block, first + i)),
                ],
                max_concurrent_steps=max(2, _PIPELINE_BYTES // tile_bytes),
                init_carry=(
                    plgpu.layout_cast(jnp.full(_ROWS, FLOOR, jnp.float32), by_row),
                    plgpu.layout_cast(jnp.zeros(_ROWS, jnp.float32), by_row),
                    helpers.zeros((_ROWS, width), of_sums.acc),
                ),
            )(k, v, mask)
            plgpu.store(tops_ref.at[split, head, here], top, optimized=False)
            plgpu.store(totals_ref.at[split, head, here], total, optimized=False)
            plgpu.store(sums_ref.at[split, head, here], sums, optimized=False)

    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((splits, heads, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((splits, heads, rows), jnp.float32),
            jax.ShapeDtypeStruct((splits, heads, rows), jnp.float32),
        ],
        grid=(splits, rows // _ROWS, heads),  # the last is the fastest: heads share their tiles
        grid_names=("split", "block", "head"),
        compiler_params=helpers.EXPLICIT_LAYOUTS,
        interpret=helpers.interpreter(interpret),
        kernel_name="tree_attention_splits",
    )(begin, end, q, k, v, mask)


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def _merge(begin, end, sums, tops, totals, *sinks, dtype, interpret):
    """The splits' results as one, normalised; [T, N, H] in whole blocks of rows."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import mosaic_helpers as helpers

    splits, heads, rows, width = sums.shape
    layout = helpers.MmaLayouts.of(_MERGE_ROWS, width).acc
    by_row = layout.reduce(1)

    def kernel(begin_ref, end_ref, sums_ref, tops_ref, totals_ref, *refs):
        *sink_refs, out_ref = refs
        block, head = (jax.lax.axis_index(name) for name in ("block", "head"))
        *_, live = tiles_of_split(0, begin_ref[0], end_ref[0], _COLUMNS, splits)
        here = pl.ds(block * _MERGE_ROWS, _MERGE_ROWS)

        def each_row(value):
            return plgpu.layout_cast(jnp.full(_MERGE_ROWS, value, jnp.float32), by_row)

        def over_lanes(row):
            shape = (_MERGE_ROWS, width)
            return plgpu.layout_cast(jax.lax.broadcast_in_dim(row, shape, [0]), layout)

        def step(split, carry):
            top, total, merged = carry
            split_top = helpers.load(tops_ref.at[split, head, here], by_row)
            split_total = helpers.load(totals_ref.at[split, head, here], by_row)
            split_sums = helpers.load(sums_ref.at[split, head, here], layout)
            new_top = jnp.maximum(top, split_top)
            keep, add = jnp.exp2(top - new_top), jnp.exp2(split_top - new_top)
            merged = merged * over_lanes(keep) + split_sums * over_lanes(add)
            return new_top, total * keep + split_total * add, merged

        top, total = each_row(FLOOR), each_row(0)
        if sink_refs:  # one more column, whose value is zero
            top = each_row(sink_refs[0][head].astype(jnp.float32) * LOG2_E)
            total = each_row(1)
        start = (top, total, helpers.zeros((_MERGE_ROWS, width), layout))
        _, total, merged = jax.lax.fori_loop(0, live, step, start)
        out = merged / over_lanes(jnp.where(total == 0, each_row(1), total))  # sees nothing: zeros
        plgpu.store(out_ref.at[here, head], out.astype(dtype), optimized=False)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, heads, width), dtype),
        grid=(rows // _MERGE_ROWS, heads),
        grid_names=("block", "head"),
        compiler_params=helpers.EXPLICIT_LAYOUTS,
        interpret=helpers.interpreter(interpret),
        kernel_name="tree_attention_merge",
    )(begin, end, sums, tops, totals, *sinks)
