"""masked_expert_gemm as Triton kernels (through Pallas): three launches and a plain sum.

1. `list_picks` lists the picks of each used expert. Pick p is row p // k at rank p % k.
2. `gate_up` writes what the activation makes of each pick: `hidden[p]`.
3. `down` writes each pick's output, `y[p]`, and XLA sums these by weight, in rank order.

A program of the two products is a used expert and a tile of its output rows. It gathers the
expert's own rows and streams the weights of its tile once, whatever rows they serve. The row tile
is the smallest of `ROW_TILES` that holds the expert's picks: on all 64 rows GPT-OSS would be bound
by arithmetic, and either family would read as many bytes of rows (from L2) as of weights. Longer
lists, which only a prefill has, go through in groups of the largest tile.

Nothing is accumulated over experts, since each pick has a place of its own in `hidden` and `y`.
So the down product has a program for each expert and tile, enough to fill a device without
partial sums, and the order of the one sum depends on neither slots nor the experts in use.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.masked_expert_gemm.activation import GatedActivation
from pallas_kernels.masked_expert_gemm.bank import ExpertBank, Matrix
from pallas_kernels.masked_expert_gemm.fp4 import PLANES, WORDS, decode, words
from pallas_kernels.mxfp4 import Mxfp4

# The least that tensor cores take, and the most that a block of 64 tree nodes needs.
ROW_TILES = (16, 32, 64)

# Picks that `list_picks` looks at at once.
_CHUNK = 1024


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    Attributes:
      out: output rows of a program, of each of its matrices.
      step: what a step of its loop reads of each row, in elements (MXFP4: in words of four).
      num_warps: of a program.
      num_stages: of the pipeline: one less are in flight while a program waits.
    """

    out: int
    step: int
    num_warps: int = 4
    num_stages: int = 3


def tiles_for(matrices: tuple[Matrix, ...], dtype: jnp.dtype) -> Tiles:
    """Cuts for matrices that are read together, for rows of `dtype`.

    A step takes 64 output rows and 128 bytes of each; of MXFP4 64 bytes, which become 256. Then a
    multiprocessor holds four programs on sm_90 and three on sm_120 (of MXFP4, whose numbers are
    in registers, three and two), and each waits with two steps in flight: 64 and 48 KB of weights
    (of MXFP4 24 and 16). The bandwidth times about 0.8 us of latency, divided among the
    multiprocessors, asks for 29 KB on an H200, 20 on an H100 and 8 on the RTX cards. A larger step
    would cost MXFP4 the programs that it adds in bytes.
    """
    _, out, into = matrices[0].shape
    step = 32 if isinstance(matrices[0], Mxfp4) else 128 // dtype.itemsize

    def fitted(size: int, axis: int) -> int:
        return max(16, min(size, pl.next_power_of_2(axis)))

    return Tiles(out=fitted(64 // len(matrices), out), step=fitted(step, into // _planes(matrices)))


def triton(
    x_TD: Float[Array, "T D"],
    bank: ExpertBank,
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    used_ids_E: Int[Array, "E"],
    used_count: Int[Array, ""],
    activation: GatedActivation,
    interpret: bool,
) -> Float[Array, "T k D"]:
    """See `expert_picks`; float32."""
    rows, top_k = expert_ids_Tk.shape
    work = _list_picks(bank.slot_of, expert_ids_Tk, weights_Tk, used_ids_E, used_count, interpret)
    hidden = _product(
        "masked_expert_gemm_gate_up",
        work,
        _in_planes(x_TD, _planes((bank.gate,))),
        (bank.gate, bank.up),
        (bank.gate_bias, bank.up_bias),
        activation,
        picks_a_row=top_k,
        out_planes=_planes((bank.down,)),
        out_dtype=x_TD.dtype,
        interpret=interpret,
    )
    y = _product(
        "masked_expert_gemm_down",
        work,
        hidden,
        (bank.down,),
        (bank.down_bias,),
        lambda y: y,
        picks_a_row=1,
        out_planes=1,
        out_dtype=jnp.float32,
        interpret=interpret,
    )
    return y.reshape(rows, top_k, -1)


def _planes(matrices: tuple[Matrix, ...]) -> int:
    return PLANES if isinstance(matrices[0], Mxfp4) else 1


def _in_planes(x_TD, planes):
    """[planes, T, D / planes]: plane n has the elements planes * j + n of each row."""
    return jnp.moveaxis(x_TD.reshape(x_TD.shape[0], -1, planes), 2, 0)


def _list_picks(
    slot_of, expert_ids_Tk, weights_Tk, used_ids_E, used_count, interpret
) -> tuple[Int[Array, "U"], Int[Array, "U"], Int[Array, "U T"]]:
    """For each expert in use its slot, how many picks it has, and which, ascending.

    U is the most experts that there can be. Behind `used_count` the counts are 0; what lies
    behind a list's count is not written.
    """
    rows = expert_ids_Tk.shape[0]
    picks = expert_ids_Tk.size
    listed = min(slot_of.shape[0], picks)
    chunk = min(_CHUNK, pl.next_power_of_2(picks))

    def kernel(slot_of, ids, weights, used_ids, used_count, slots, counts, lists):
        i = pl.program_id(0)
        used = i < used_count[0]
        expert = used_ids[i]

        def list_chunk(c, before):
            pick = c * chunk + jnp.arange(chunk)
            inside = used & (pick < picks)
            mine = plgpu.load(ids.at[pick], mask=inside, other=-1) == expert
            mine &= plgpu.load(weights.at[pick], mask=inside, other=0) != 0
            ones = mine.astype(jnp.int32)
            # What is not mine goes behind the list: where interpret mode writes masked elements.
            place = jnp.where(mine, before + jnp.cumsum(ones) - 1, rows)
            plgpu.store(lists.at[i, place], pick, mask=mine)
            return before + jnp.sum(ones)

        counts[i] = jax.lax.fori_loop(0, pl.cdiv(picks, chunk), list_chunk, jnp.int32(0))
        slots[i] = plgpu.load(slot_of.at[expert], mask=used, other=0)

    return pl.pallas_call(
        kernel,
        grid=(listed,),
        out_shape=(
            jax.ShapeDtypeStruct((listed,), jnp.int32),
            jax.ShapeDtypeStruct((listed,), jnp.int32),
            jax.ShapeDtypeStruct((listed, rows), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="masked_expert_gemm_list_picks",
        interpret=interpret,
    )(slot_of, expert_ids_Tk.reshape(-1), weights_Tk.reshape(-1), used_ids_E, used_count[None])


def _product(
    name: str,
    work: tuple[Int[Array, "U"], Int[Array, "U"], Int[Array, "U T"]],
    rows_PRK: Float[Array, "planes rows in"],
    matrices: tuple[Matrix, ...],
    biases: tuple[Float[Array, "C out"] | None, ...],
    finish: Callable[..., Array],
    *,
    picks_a_row: int,
    out_planes: int,
    out_dtype: jnp.dtype,
    interpret: bool,
) -> Float[Array, "planes picks out"]:
    """`finish` of the rows' products with each matrix, for each pick; other places keep rubbish."""
    slots, _, lists = work
    picks = picks_a_row * rows_PRK.shape[1]
    longest = lists.shape[1]
    num_out = matrices[0].shape[1]
    tiles = tiles_for(matrices, rows_PRK.dtype)
    row_tiles = ROW_TILES[: 1 + sum(tile < longest for tile in ROW_TILES[:-1])]

    def kernel(slots, counts, lists, rows, matrices, biases, result):
        i = pl.program_id(1)
        slot, count = slots[i], counts[i]
        out = pl.program_id(0) * tiles.out + jnp.arange(tiles.out)

        def run(row_tile, group):
            place = group * row_tile + jnp.arange(row_tile)
            live = place < count
            # Behind all picks, where nobody reads: interpret mode writes masked elements there.
            pick = plgpu.load(lists.at[i, place], mask=live, other=picks)
            sums = _sums(rows, pick // picks_a_row, live, matrices, slot, out, tiles, interpret)
            for n, bias in enumerate(biases):
                if bias is not None:
                    bias = plgpu.load(bias.at[slot, out], mask=out < num_out, other=0)
                    sums[n] += bias.astype(jnp.float32)
            plgpu.store(
                result.at[out[None] % out_planes, pick[:, None], out[None] // out_planes],
                finish(*sums).astype(out_dtype),
                mask=live[:, None] & (out < num_out)[None],
            )

        for fewer, row_tile in zip((0, *row_tiles), row_tiles):
            is_last = row_tile == row_tiles[-1]

            @pl.when((count > fewer) & (is_last | (count <= row_tile)))
            def _():
                if row_tile >= longest or not is_last:
                    run(row_tile, 0)
                else:
                    groups = pl.cdiv(count, row_tile)
                    jax.lax.fori_loop(0, groups, lambda group, _: run(row_tile, group), None)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(num_out, tiles.out), slots.shape[0]),
        out_shape=jax.ShapeDtypeStruct((out_planes, picks, num_out // out_planes), out_dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        name=name,
        interpret=interpret,
    )(*work, rows_PRK, tuple(words(m) if isinstance(m, Mxfp4) else m for m in matrices), biases)


def _sums(
    rows,
    row: Int[Array, "R"],
    live: Bool[Array, "R"],
    matrices,
    slot: Int[Array, ""],
    out: Int[Array, "O"],
    tiles: Tiles,
    interpret: bool,
) -> list[Float[Array, "R O"]]:
    """The products of gathered rows with a tile of each matrix, accumulated in float32."""
    planes, _, width = rows.shape
    steps = pl.cdiv(width, tiles.step)
    packed = isinstance(matrices[0], Mxfp4)
    # A float32 product takes float32 inputs as they are, not rounded to TF32.
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None

    def load_scales(k):
        if not packed:
            return [None] * len(matrices)
        block = k * (tiles.step // WORDS) + jnp.arange(tiles.step // WORDS)
        return [load_weights(matrix.scales, slot, out, block, k < steps) for matrix in matrices]

    def step(k, state):
        sums, scales = state
        column = k * tiles.step + jnp.arange(tiles.step)
        mask = live[:, None] & _inside(column, width)[None]
        x = [
            plgpu.load(rows.at[plane, row[:, None], column[None]], mask=mask, other=0)
            for plane in range(planes)
        ]
        for n, (matrix, scale) in enumerate(zip(matrices, scales)):
            tile = load_weights(matrix.blocks if packed else matrix, slot, out, column)
            for x_plane, w_plane in zip(x, decode(tile, scale, interpret) if packed else (tile,)):
                sums[n] += jax.lax.dot_general(
                    x_plane,
                    w_plane.astype(rows.dtype),
                    (((1,), (1,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
        # Triton pipelines no loads of single bytes: the next step's scales are on their way
        # through this one.
        return sums, load_scales(k + 1)

    zeros = [jnp.zeros((row.shape[0], out.shape[0]), jnp.float32) for _ in matrices]
    return jax.lax.fori_loop(0, steps, step, (zeros, load_scales(0)))[0]


def load_weights(
    ref,
    slot: Int[Array, ""],
    out: Int[Array, "O"],
    column: Int[Array, "K"],
    wanted: Bool[Array, ""] | bool = True,
) -> Array:
    """A tile of the matrix in a slot, 0 beyond its edges. All weights are read through this."""
    _, num_out, width = ref.shape
    mask = _inside(out, num_out)[:, None] & _inside(column, width)[None] & wanted
    return plgpu.load(ref.at[slot, out[:, None], column[None]], mask=mask, other=0)


def _inside(index, size):
    """Where a tile's indices are inside; a constant, which costs no load its mask, if all are."""
    return index < size if size % index.shape[0] else jnp.full(index.shape, True)
