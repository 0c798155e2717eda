"""The shapes that tree_attention is tested, compiled and measured at."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.case import KernelCase
from pallas_kernels.tree_attention.op import tree_attention


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """A draft tree behind a committed prefix, in one layer.

    Attributes:
      rows: T.
      heads: N.
      kv_heads: K.
      width: H.
      cached: committed columns; the rows' own follow.
      columns: S, the cache's capacity.
      window: positions that a row sees, itself included; None: all before it.
      sinks: whether the softmax has them.
      dtypes: of everything; the first is the family's own.
    """

    rows: int
    heads: int
    kv_heads: int
    width: int
    cached: int
    columns: int
    window: int | None = None
    sinks: bool = False
    dtypes: tuple[str, ...] = ("bfloat16",)

    @property
    def begin(self) -> int:
        """The first column that a row may see: row positions begin at `cached`."""
        return 0 if self.window is None else max(0, self.cached - self.window + 1)

    @property
    def end(self) -> int:
        """The column after the last that a row may see."""
        return self.cached + self.rows


_BOTH = ("bfloat16", "float32")
_QWEN3 = AttentionShape(64, 32, 4, 128, cached=4096, columns=4160, dtypes=_BOTH)
_GPT_OSS = AttentionShape(64, 64, 8, 64, cached=4096, columns=4160, sinks=True, dtypes=_BOTH)
_POCKET_QWEN3 = AttentionShape(64, 6, 2, 40, cached=400, columns=512, dtypes=_BOTH)
_POCKET_GPT_OSS = AttentionShape(64, 10, 2, 24, cached=400, columns=512, sinks=True, dtypes=_BOTH)
_AWKWARD = AttentionShape(37, 6, 2, 26, cached=75, columns=139, dtypes=_BOTH)

SHAPES = {
    "qwen3-30b-a3b": _QWEN3,
    "qwen3-30b-a3b-one-row": dataclasses.replace(_QWEN3, rows=1),
    "qwen3-30b-a3b-long": dataclasses.replace(_QWEN3, cached=32704, columns=32768),
    "gpt-oss-120b": _GPT_OSS,
    "gpt-oss-120b-sliding": dataclasses.replace(_GPT_OSS, window=128),
    "gpt-oss-120b-long": dataclasses.replace(_GPT_OSS, cached=32704, columns=32768),
    "pocket-qwen3-moe": _POCKET_QWEN3,
    "pocket-gpt-oss": _POCKET_GPT_OSS,
    "pocket-gpt-oss-sliding": dataclasses.replace(_POCKET_GPT_OSS, window=16),
    "awkward": _AWKWARD,  # no whole tiles in any direction
    "awkward-sliding": dataclasses.replace(_AWKWARD, window=21, sinks=True),
}

# By implementation; one that this op does not have takes none.
_TAKEN = {"triton": ("bfloat16", "float32"), "mosaic": ("bfloat16",)}

Arguments = tuple[
    Float[Array, "T N H"],
    Float[Array, "S K H"],
    Float[Array, "S K H"],
    Bool[Array, "T S"],
    Float[Array, "N"] | None,
    Int[Array, ""],
    Int[Array, ""],
]


def random_mask(rng: np.random.Generator, shape: AttentionShape) -> Bool[np.ndarray, "T S"]:
    """What the nodes of a random tree see: the prefix, their ancestors and themselves."""
    reach = np.eye(shape.rows, dtype=bool)
    for node in range(1, shape.rows):
        reach[node] |= reach[rng.integers(node)]
    mask = np.zeros((shape.rows, shape.columns), bool)
    mask[:, : shape.cached] = True
    mask[:, shape.cached : shape.end] = reach
    if shape.window is not None:
        at = shape.cached + reach.sum(axis=1) - 1
        columns = np.arange(shape.columns)
        columns[shape.cached : shape.end] = at
        mask &= at[:, None] - columns < shape.window
    return mask


def random_arguments(key: jax.Array, shape: AttentionShape, dtype: str) -> Arguments:
    """Arguments of `by_position`. Columns that no row may see hold numbers as well."""
    abstract = abstract_arguments(shape, dtype)
    keys = jax.random.split(key, 5)
    q_TNH, k_SKH, v_SKH, sinks_N = (
        None if leaf is None else jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, (*abstract[:3], abstract[4]))
    )
    rng = np.random.default_rng(int(jax.random.randint(keys[4], (), 0, 2**31 - 1)))
    mask_TS = jnp.asarray(random_mask(rng, shape))
    return q_TNH, k_SKH, v_SKH, mask_TS, sinks_N, jnp.int32(shape.begin), jnp.int32(shape.end)


def abstract_arguments(shape: AttentionShape, dtype: str) -> Arguments:
    """`random_arguments` as `jax.ShapeDtypeStruct`s."""
    dtype = jnp.dtype(dtype)
    cache = jax.ShapeDtypeStruct((shape.columns, shape.kv_heads, shape.width), dtype)
    return (
        jax.ShapeDtypeStruct((shape.rows, shape.heads, shape.width), dtype),
        cache,
        cache,
        jax.ShapeDtypeStruct((shape.rows, shape.columns), jnp.bool_),
        jax.ShapeDtypeStruct((shape.heads,), dtype) if shape.sinks else None,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def by_position(
    q_TNH: Float[Array, "T N H"],
    k_SKH: Float[Array, "S K H"],
    v_SKH: Float[Array, "S K H"],
    mask_TS: Bool[Array, "T S"],
    sinks_N: Float[Array, "N"] | None,
    begin: Int[Array, ""],
    end: Int[Array, ""],
    *,
    implementation: str,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """tree_attention with all its arrays by position."""
    options = {"implementation": implementation, "interpret": interpret}
    return tree_attention(q_TNH, k_SKH, v_SKH, mask_TS, sinks_N, begin=begin, end=end, **options)


def moved_bytes(shape: AttentionShape, dtype: str) -> int:
    """What has to cross the memory bus once: the columns that rows see, the rows in and out."""
    seen = shape.end - shape.begin
    numbers = 2 * seen * shape.kv_heads * shape.width + 2 * shape.rows * shape.heads * shape.width
    return numbers * jnp.dtype(dtype).itemsize + shape.rows * seen


def product_flops(shape: AttentionShape) -> int:
    """Of the two products."""
    return 2 * 2 * shape.rows * shape.heads * shape.width * (shape.end - shape.begin)


def kernel_cases(implementation: str) -> list[KernelCase]:
    """Every shape and dtype that it takes; full sizes are compiled every day in bfloat16.

    A window is data: a sliding layer's launches are those of a full one.
    """
    return [
        KernelCase(
            op="tree_attention",
            implementation=implementation,
            shape=name,
            dtype=dtype,
            function=functools.partial(by_position, implementation=implementation),
            arguments=abstract_arguments(shape, dtype),
            bytes=moved_bytes(shape, dtype),
            flops=product_flops(shape),
            tensor_cores=dtype != "float32",
            everyday=name in ("qwen3-30b-a3b", "gpt-oss-120b") and dtype == shape.dtypes[0],
        )
        for name, shape in SHAPES.items()
        for dtype in shape.dtypes
        if dtype in _TAKEN.get(implementation, ())
    ]
