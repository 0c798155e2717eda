"""One product of masked_expert_gemm as a Mosaic GPU kernel, with `mma`."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_helpers as helpers
from pallas_kernels.masked_expert_gemm.bank import Matrix
from pallas_kernels.masked_expert_gemm.mosaic import ALIGN, ROWS
from pallas_kernels.masked_expert_gemm.mosaic_mxfp4 import decode, power
from pallas_kernels.mxfp4 import BLOCK, Mxfp4

# Output features of a thread block's tile, over all the matrices that it multiplies by.
_TILE = 128
# Elements of the input in a step of numbers: 128 bytes, the widest swizzle.
_STEP = 64
# Blocks of MXFP4 in a step, at most, by rows: a step's rows take more memory than its weights.
_BLOCKS = {16: 6, 32: 3, 64: 3}
_HALF = BLOCK // 2
# Shared memory of a pipeline, so that any device holds two thread blocks a multiprocessor.
_PIPELINE_BYTES = 44 << 10


@dataclasses.dataclass(frozen=True)
class _Tile:
    """What a thread block computes: `rows` rows by the `index`-th tile of `features` features."""

    rows: int
    features: int
    index: Int[Array, ""]
    width: int  # of the rows and of the matrices

    @property
    def columns(self) -> pl.Slice:
        return pl.ds(self.index * self.features, self.features)

    @property
    def layouts(self) -> helpers.MmaLayouts:
        return helpers.MmaLayouts.of(ROWS, self.features)

    @property
    def row_blocks(self) -> range:
        return range(self.rows // ROWS)

    def zeros(self, matrices: list) -> list[list[Float[Array, "16 features"]]]:
        """A sum for each block of rows and matrix."""
        shape = (ROWS, self.features)
        return [[helpers.zeros(shape, self.layouts.acc) for _ in matrices] for _ in self.row_blocks]


@functools.partial(
    jax.jit, static_argnames=("row_tiles", "finish", "name", "interpret", "out_planes")
)
def product(
    work: Int[Array, "4 E"],
    x: Float[Array, "in_planes X in"],
    matrices: tuple[Matrix, ...],
    biases: tuple[Float[Array, "C out"] | None, ...],
    *,
    row_tiles: tuple[int, ...],
    finish: Callable[..., Float[Array, "..."]],
    name: str,
    interpret: bool,
    out_planes: int = 1,
) -> Float[Array, "out_planes E R out"]:
    """`finish` of the products of each used expert's rows with its matrices, plus their biases.

    A jitted function of its own, so that the layers of a model share one lowering.

    Args:
      work: for each used expert how many rows it has (0: it is none), the first of them in units
        of `ALIGN` rows, its slot, and itself.
      x: rows; where the matrices are packed their even elements and their odd ones, apart.
      row_tiles: an expert's rows go into the smallest of them that holds them.
      finish: of as many sums as there are matrices.
      out_planes: 2 to write the even output features and the odd ones apart.

    Returns:
      Rows by expert, R being the largest row tile, and features in whole tiles. Finite numbers
      that stand for nothing follow an expert's rows in its row tile; what lies beyond, and all
      rows of unused experts, are not written.
    """
    num_experts = work.shape[1]
    _, num_out, width = matrices[0].shape
    views = [(m, plane) for plane in range(out_planes) for m in range(len(matrices))]
    features = _features(num_out // out_planes, _TILE // len(views))
    tiles = pl.cdiv(num_out // out_planes, features)
    sums_of = _packed_sums if isinstance(matrices[0], Mxfp4) else _dense_sums
    operands, structure = jax.tree.flatten(
        (
            [_in_planes(matrix, out_planes, features) for matrix in matrices],
            [_bias_in_planes(bias, out_planes, features) for bias in biases],
        )
    )

    def kernel(work, x, *refs):
        *refs, out = refs
        matrices, biases = jax.tree.unflatten(structure, refs)
        i = jax.lax.axis_index("expert")
        count = work[0, i]

        def run(rows):
            first, slot, expert = (work[j, i] for j in (1, 2, 3))
            tile = _Tile(rows, features, jax.lax.axis_index("tile"), width)
            own = [x.at[plane, pl.ds(first * ALIGN, rows)] for plane in range(x.shape[0])]
            weights = [
                jax.tree.map(lambda ref: ref.at[slot, :, plane], matrices[m]) for m, plane in views
            ]
            for r, sums in enumerate(sums_of(tile, own, weights, interpret)):
                sums = [
                    s if biases[m] is None else s + _row(tile, biases[m].at[slot, plane])
                    for s, (m, plane) in zip(sums, views)
                ]
                for plane in range(out_planes):
                    y = finish(*sums[plane * len(matrices) :][: len(matrices)])
                    place = out.at[plane, expert, pl.ds(r * ROWS, ROWS), tile.columns]
                    plgpu.store(place, y.astype(out.dtype), optimized=False)

        for fewer, rows in zip((0, *row_tiles), row_tiles):
            pl.when((fewer < count) & (count <= rows))(functools.partial(run, rows))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(
            (out_planes, num_experts, row_tiles[-1], tiles * features), x.dtype
        ),
        grid=(num_experts, tiles),
        grid_names=("expert", "tile"),
        compiler_params=helpers.EXPLICIT_LAYOUTS,
        interpret=helpers.interpreter(interpret),
        kernel_name=name,
    )(work, x, *operands)


def _dense_sums(tile, x, matrices, interpret):
    """Sums by block of rows and matrix, of weights that are numbers."""
    (x,) = x
    layouts = tile.layouts
    step = min(_STEP, -(-tile.width // ROWS) * ROWS)
    step_bytes = step * x.dtype.itemsize * (tile.rows + tile.features * len(matrices))

    def add_products(_, *tiles_and_sums):
        *tiles, sums = tiles_and_sums
        x_tiles, weight_tiles = tiles[: len(sums)], tiles[len(sums) :]
        b = [helpers.load(weights.T, layouts.rhs) for weights in weight_tiles]
        for r, rows in enumerate(x_tiles):
            a = helpers.load(rows, layouts.lhs)
            sums[r] = [helpers.mma(s, a, w, interpret=interpret) for s, w in zip(sums[r], b)]
        plgpu.commit_smem()  # its reads are done before the next copy overwrites what they read
        return sums

    of_rows = functools.partial(
        plgpu.BlockSpec,
        (ROWS, step),
        transforms=helpers.swizzled(ROWS, x.shape[1], step, x.dtype),
    )
    of_weights = plgpu.BlockSpec(
        (tile.features, step),
        lambda k: (tile.index, k),
        transforms=helpers.swizzled(matrices[0].shape[0], tile.width, step, x.dtype),
    )
    return plgpu.emit_pipeline(
        add_products,
        grid=(pl.cdiv(tile.width, step),),
        in_specs=[of_rows(lambda k, r=r: (r, k)) for r in tile.row_blocks]
        + [of_weights] * len(matrices),
        max_concurrent_steps=max(2, _PIPELINE_BYTES // step_bytes),
        init_carry=tile.zeros(matrices),
    )(*[x] * len(tile.row_blocks), *matrices)


def _packed_sums(tile, x, matrices, interpret):
    """Sums by block of rows and matrix, of MXFP4: the even elements of a block, then the odd."""
    layouts = tile.layouts
    blocks = math.gcd(tile.width // BLOCK, _BLOCKS[tile.rows])
    steps = tile.width // BLOCK // blocks
    step_bytes = blocks * _HALF * (2 * x[0].dtype.itemsize * tile.rows)
    step_bytes += blocks * _HALF * tile.features * len(matrices)

    def scales_of(step):
        """Loaded a step ahead into registers: their rows are not aligned as copies need it."""
        return [
            [
                helpers.load(m.scales.at[tile.columns, step * blocks + b], layouts.rhs.reduce(0))
                for b in range(blocks)
            ]
            for m in matrices
        ]

    def add_products(index, *tiles_and_carry):
        *tiles, (sums, scales) = tiles_and_carry
        x_tiles, weight_tiles = tiles[: 2 * len(sums)], tiles[2 * len(sums) :]
        next_scales = scales_of(jnp.minimum(index[0] + 1, steps - 1))
        for block in range(blocks):
            here = pl.ds(block * _HALF, _HALF)
            weights = [
                decode(
                    helpers.load(pairs.at[:, here].T, layouts.rhs),
                    _over_rows(power(of_matrix[block]), layouts.rhs, (_HALF, tile.features)),
                )
                for pairs, of_matrix in zip(weight_tiles, scales)
            ]
            for r, plane in ((r, plane) for r in tile.row_blocks for plane in range(2)):
                a = helpers.load(x_tiles[2 * r + plane].at[:, here], layouts.lhs)
                sums[r] = [
                    helpers.mma(s, a, w[plane], interpret=interpret)
                    for s, w in zip(sums[r], weights)
                ]
        plgpu.commit_smem()  # its reads are done before the next copy overwrites what they read
        return sums, next_scales

    of_rows = functools.partial(
        plgpu.BlockSpec,
        (ROWS, blocks * _HALF),
        transforms=helpers.swizzled(ROWS, x[0].shape[1], _HALF, x[0].dtype),
    )
    of_weights = plgpu.BlockSpec((tile.features, blocks * _HALF), lambda k: (tile.index, k))
    sums, _ = plgpu.emit_pipeline(
        add_products,
        grid=(steps,),
        in_specs=[of_rows(lambda k, r=r: (r, k)) for r in tile.row_blocks for _ in x]
        + [of_weights] * len(matrices),
        max_concurrent_steps=max(2, _PIPELINE_BYTES // step_bytes),
        init_carry=(tile.zeros(matrices), scales_of(0)),
    )(*x * len(tile.row_blocks), *[m.blocks for m in matrices])
    return sums


def _row(tile, bias):
    """A tile's biases, in each of its rows."""
    row = helpers.load(bias.at[tile.columns], tile.layouts.acc.reduce(0))
    return _over_rows(row.astype(jnp.float32), tile.layouts.acc, (ROWS, tile.features))


def _over_rows(row, layout, shape):
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(row, shape, [1]), layout)


def _features(num_out, largest):
    """Whole tiles if there is a size for it, and no fewer than four warps can divide."""
    sizes = [size for size in (largest, largest // 2) if size >= 32]
    return next((size for size in sizes if num_out % size == 0), 32)


def _in_planes(matrix, planes, features):
    """[C, out, in] -> [C, out / planes, planes, in].

    Copies of numbers and of packed blocks stop at the last feature. Loads of scales do not, so
    those are padded to whole tiles.
    """
    if isinstance(matrix, Mxfp4):
        blocks = matrix.blocks.reshape(*matrix.blocks.shape[:2], -1)
        scales = _in_planes(matrix.scales, planes, features)
        padding = ((0, 0), (0, -scales.shape[1] % features), (0, 0), (0, 0))
        return Mxfp4(_in_planes(blocks, planes, features), jnp.pad(scales, padding))
    slots, num_out, width = matrix.shape
    return matrix.reshape(slots, num_out // planes, planes, width)


def _bias_in_planes(bias, planes, features):
    """[C, out] -> [C, planes, out / planes], padded to whole tiles: none is read beyond."""
    if bias is None:
        return None
    bias = jnp.moveaxis(bias.reshape(bias.shape[0], -1, planes), 2, 1)
    return jnp.pad(bias, ((0, 0), (0, 0), (0, -bias.shape[2] % features)))
