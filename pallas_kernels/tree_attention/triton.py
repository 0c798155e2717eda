"""tree_attention in Pallas Triton: the columns in splits, then one merge of the splits' results.

The query rows of a kv head, T nodes times G heads that share it, are one matrix: each tile of keys
and values serves a block of them. Too few such blocks would leave most of a GPU idle, so the
columns in [begin, end) are split as well (flash decoding), evenly, by what the range holds and not
by what the cache could hold. A split keeps the softmax of what it has seen unnormalised, relative
to its own greatest score; the second launch merges them in the order of the columns, so that the
same input gives the same bits.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

# Below every score and finite: it starts a running maximum, and less itself is 0 and not NaN.
FLOOR = -1e30
LOG2_E = math.log2(math.e)
_MERGE_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
      rows: query rows of a program, at most.
      columns: of a tile of keys and values.
      programs: how many the splits aim at; every GPU named in `devices` runs these at once.
      warps: of a program of `rows` rows; a smaller one has `_FEW_WARPS`.
      stages: tiles in flight.
    """

    rows: int
    columns: int
    programs: int
    warps: int
    stages: int


_FEW_WARPS = 4


def tiles_for(width: int, dtype: jnp.dtype) -> Tiles:
    """What fits the registers of every device; `width` is that of a head, H."""
    if dtype == jnp.float32:  # full precision, which tensor cores do not have
        return Tiles(rows=32, columns=32, programs=160, warps=8, stages=2)
    return Tiles(rows=128, columns=32, programs=160, warps=8, stages=2 if width > 64 else 3)


def triton(
    q_TNH: Float[Array, "T N H"],
    k_SKH: Float[Array, "S K H"],
    v_SKH: Float[Array, "S K H"],
    mask_TS: Bool[Array, "T S"],
    sinks_N: Float[Array, "N"] | None,
    begin: Int[Array, ""],
    end: Int[Array, ""],
    *,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """See `tree_attention`."""
    nodes, heads, width = q_TNH.shape
    tiles = tiles_for(width, q_TNH.dtype) if tiles is None else tiles
    length, kv_heads, _ = k_SKH.shape
    group = heads // kv_heads
    rows = nodes * group
    block = min(tiles.rows, max(16, pl.next_power_of_2(rows)))
    blocks = pl.cdiv(rows, block)
    splits = max(1, min(tiles.programs // (blocks * kv_heads), pl.cdiv(length, tiles.columns)))
    span = [jnp.asarray(place, jnp.int32).reshape(1) for place in (begin, end)]
    partial_shape = (splits, kv_heads, blocks * block)
    sums, tops, totals = pl.pallas_call(
        functools.partial(_split_kernel, group=group, block=block, columns=tiles.columns),
        grid=(blocks, kv_heads, splits),  # the first is the fastest: its blocks share their tiles
        out_shape=[
            jax.ShapeDtypeStruct((*partial_shape, width), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.warps if block == tiles.rows else _FEW_WARPS,
            num_stages=tiles.stages,
        ),
        interpret=interpret,
        name="tree_attention_splits",
    )(*span, q_TNH, k_SKH, v_SKH, mask_TS)
    return pl.pallas_call(
        functools.partial(_merge_kernel, group=group, columns=tiles.columns),
        grid=(pl.cdiv(rows, _MERGE_ROWS), kv_heads),
        out_shape=jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="tree_attention_merge",
    )(*span, *([] if sinks_N is None else [sinks_N]), sums, tops, totals)


def tiles_of_split(
    split: Int[Array, ""], begin: Int[Array, ""], end: Int[Array, ""], columns: int, splits: int
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Divides the tiles that hold a column of [begin, end) among the splits, in order.

    Returns:
      The first tile of `split`, the one after its last, and how many splits have any.
    """
    first, last = begin // columns, pl.cdiv(end, columns)
    share = jnp.maximum(pl.cdiv(last - first, splits), 1)
    tile = first + split * share
    return tile, jnp.minimum(tile + share, last), pl.cdiv(last - first, share)


def _rows(index, block, group, kv_head):
    """(row of the kv head, its node, its query head) of each row of a block."""
    row = index * block + jnp.arange(block, dtype=jnp.int32)
    return row, row // group, kv_head * group + row % group


def _lanes(width):
    """(lane, which lanes count) as rows; a tile's width is a power of two."""
    lane = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)[None, :]
    return lane, lane < width


def _split_kernel(
    begin_ref,
    end_ref,
    q_ref,
    k_ref,
    v_ref,
    mask_ref,
    sums_ref,
    tops_ref,
    totals_ref,
    *,
    group,
    block,
    columns,
):
    index, kv_head, split = (pl.program_id(axis) for axis in range(3))
    begin, end = begin_ref[0], end_ref[0]
    tile, last, live = tiles_of_split(split, begin, end, columns, pl.num_programs(2))
    row, node, head = _rows(index, block, group, kv_head)
    lane, in_head = _lanes(q_ref.shape[2])
    counts = (node < q_ref.shape[0])[:, None]
    q = plgpu.load(q_ref.at[node[:, None], head[:, None], lane], mask=counts & in_head, other=0)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scale = q_ref.shape[2] ** -0.5 * LOG2_E

    def step(tile, carry):
        top, total, sums = carry
        column = tile * columns + jnp.arange(columns, dtype=jnp.int32)
        inside = (column >= begin) & (column < end)
        at = (column[:, None], kv_head, lane)
        k = plgpu.load(k_ref.at[at], mask=inside[:, None] & in_head, other=0)
        v = plgpu.load(v_ref.at[at], mask=inside[:, None] & in_head, other=0)
        seen = plgpu.load(
            mask_ref.at[node[:, None], column[None, :]],
            mask=counts & inside[None, :],
            other=False,
        )
        scores = plgpu.dot(q, k, trans_b=True, precision=precision)
        scores = jnp.where(seen, scores * scale, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - new_top[:, None])
        keep = jnp.exp2(top - new_top)
        total = total * keep + weights.sum(axis=1)
        added = plgpu.dot(weights.astype(v.dtype), v, precision=precision)
        return new_top, total, sums * keep[:, None] + added

    start = (
        jnp.full(block, FLOOR, jnp.float32),
        jnp.zeros(block, jnp.float32),
        jnp.zeros((block, lane.shape[1]), jnp.float32),
    )
    top, total, sums = jax.lax.fori_loop(tile, last, step, start)

    @pl.when(split < live)
    def _():
        tops_ref[split, kv_head, pl.ds(index * block, block)] = top
        totals_ref[split, kv_head, pl.ds(index * block, block)] = total
        plgpu.store(sums_ref.at[split, kv_head, row[:, None], lane], sums, mask=in_head)


def _merge_kernel(begin_ref, end_ref, *refs, group, columns):
    *sink_refs, sums_ref, tops_ref, totals_ref, out_ref = refs
    index, kv_head = pl.program_id(0), pl.program_id(1)
    _, _, live = tiles_of_split(0, begin_ref[0], end_ref[0], columns, sums_ref.shape[0])
    row, node, head = _rows(index, _MERGE_ROWS, group, kv_head)
    lane, in_head = _lanes(out_ref.shape[2])
    counts = node < out_ref.shape[0]

    def step(split, carry):
        top, total, sums = carry
        split_top = tops_ref[split, kv_head, pl.ds(index * _MERGE_ROWS, _MERGE_ROWS)]
        split_total = totals_ref[split, kv_head, pl.ds(index * _MERGE_ROWS, _MERGE_ROWS)]
        split_sums = plgpu.load(
            sums_ref.at[split, kv_head, row[:, None], lane], mask=in_head, other=0
        )
        new_top = jnp.maximum(top, split_top)
        keep, add = jnp.exp2(top - new_top), jnp.exp2(split_top - new_top)
        total = total * keep + split_total * add
        return new_top, total, sums * keep[:, None] + split_sums * add[:, None]

    top = jnp.full(_MERGE_ROWS, FLOOR, jnp.float32)
    total = jnp.zeros(_MERGE_ROWS, jnp.float32)
    if sink_refs:  # one more column, whose value is zero
        (sink_ref,) = sink_refs
        top = plgpu.load(sink_ref.at[head], mask=counts, other=0).astype(jnp.float32) * LOG2_E
        total = jnp.ones(_MERGE_ROWS, jnp.float32)
    sums = jnp.zeros((_MERGE_ROWS, lane.shape[1]), jnp.float32)
    _, total, sums = jax.lax.fori_loop(0, live, step, (top, total, sums))
    out = sums / jnp.where(total == 0, 1, total)[:, None]  # a row that sees nothing: zeros
    plgpu.store(
        out_ref.at[node[:, None], head[:, None], lane],
        out.astype(out_ref.dtype),
        mask=counts[:, None] & in_head,
    )
