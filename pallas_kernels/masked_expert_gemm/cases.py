"""The shapes that masked_expert_gemm is tested, compiled and measured at."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.case import KernelCase
from pallas_kernels.masked_expert_gemm.activation import GatedActivation
from pallas_kernels.masked_expert_gemm.bank import ExpertBank, Matrix
from pallas_kernels.masked_expert_gemm.op import masked_expert_gemm
from pallas_kernels.mxfp4 import BLOCK, Mxfp4

_SWIGLU = GatedActivation()
_CLAMPED = GatedActivation(slope=1.702, shift=1.0, limit=7.0)

PACKED = "mxfp4"
# Rows are bfloat16 where the weights are packed.
_ROWS_DTYPE = {PACKED: jnp.bfloat16, "bfloat16": jnp.bfloat16, "float32": jnp.float32}


# What each kernel takes for weights on a GPU.
_TAKEN = {
    "triton": (PACKED, "bfloat16", "float32"),
    "mosaic": (PACKED, "bfloat16"),
    "mosaic_wgmma": ("bfloat16",),
}


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """The experts of a layer and a block of rows.

    Attributes:
      rows: T.
      top_k: picks of a row.
      experts: E.
      width: D.
      expert_width: F.
      used: experts that a block's picks name, typically.
      activation: of the family.
      biases: whether each product has one.
      dtypes: of the weights; the first is the family's own.
    """

    rows: int
    top_k: int
    experts: int
    width: int
    expert_width: int
    used: int
    activation: GatedActivation
    biases: bool
    dtypes: tuple[str, ...]


SHAPES = {
    "qwen3-30b-a3b": ExpertShape(64, 8, 128, 2048, 768, 28, _SWIGLU, False, ("bfloat16",)),
    "gpt-oss-120b": ExpertShape(64, 4, 128, 2880, 2880, 25, _CLAMPED, True, (PACKED, "bfloat16")),
    "pocket-qwen3-moe": ExpertShape(
        64, 8, 128, 192, 32, 28, _SWIGLU, False, ("bfloat16", "float32")
    ),
    "pocket-gpt-oss": ExpertShape(
        64, 4, 128, 192, 64, 25, _CLAMPED, True, (PACKED, "bfloat16", "float32")
    ),
    # No whole tiles in any direction.
    "awkward": ExpertShape(37, 3, 11, 40, 24, 6, _CLAMPED, True, ("float32", "bfloat16")),
    "awkward-blocks": ExpertShape(21, 2, 7, 96, 352, 5, _SWIGLU, False, (PACKED,)),
}

Arguments = tuple[
    Float[Array, "T D"],
    ExpertBank,
    Int[Array, "T k"],
    Float[Array, "T k"],
    Int[Array, "E"],
    Int[Array, ""],
]


def routing(
    shape: ExpertShape, used: int, seed: int = 0
) -> tuple[Int[Array, "T k"], Float[Array, "T k"], Int[Array, "E"], Int[Array, ""]]:
    """Random routing of the rows that uses exactly `used` experts.

    Returns:
      The ids of each row's picks, their weights, the list of used experts and its count.

    Raises:
      ValueError: if the rows' picks cannot name `used` experts.
    """
    if not shape.top_k <= used <= min(shape.experts, shape.rows * shape.top_k):
        raise ValueError(f"{shape.rows} rows of {shape.top_k} picks cannot use {used} experts")
    rng = np.random.default_rng((seed, used))
    chosen = rng.permutation(shape.experts)[:used]
    picks = np.stack([rng.permutation(used)[: shape.top_k] for _ in range(shape.rows)])
    # Every expert at least once: the first rows' picks are dealt in turn.
    for row, first in enumerate(range(0, used, shape.top_k)):
        picks[row] = np.arange(first, first + shape.top_k) % used
    used_ids = np.full(shape.experts, shape.experts)
    used_ids[:used] = np.sort(chosen)
    return (
        jnp.asarray(chosen[picks], jnp.int32),
        jnp.asarray(rng.dirichlet(np.ones(shape.top_k), shape.rows), jnp.float32),
        jnp.asarray(used_ids, jnp.int32),
        jnp.int32(used),
    )


def random_bank(key: jax.Array, shape: ExpertShape, dtype: str, slots: int) -> ExpertBank:
    """Random experts in `slots` slots, whose outputs are about as large as their inputs.

    Expert e is in slot e, modulo the slots: the caller replaces `slot_of` where that matters.
    """
    abstract = abstract_bank(shape, dtype, slots)
    leaves, structure = jax.tree.flatten(abstract.replace(slot_of=None))
    keys = jax.random.split(key, len(leaves))

    def random(key, leaf):
        if leaf.dtype != jnp.uint8:
            scale = 1 / math.sqrt(leaf.shape[-1]) if leaf.ndim == 3 else 1
            return scale * jax.random.normal(key, leaf.shape, leaf.dtype)
        if leaf.ndim == 4:
            return jax.random.bits(key, leaf.shape, jnp.uint8)
        # The root mean square of FP4's values is 2.9.
        middle = 127 - round(math.log2(2.9 * math.sqrt(BLOCK * leaf.shape[-1])))
        return jax.random.randint(key, leaf.shape, middle - 1, middle + 2).astype(jnp.uint8)

    bank = jax.tree.unflatten(structure, [random(*pair) for pair in zip(keys, leaves)])
    return bank.replace(slot_of=jnp.arange(shape.experts, dtype=jnp.int32) % slots)


def random_arguments(
    key: jax.Array,
    shape: ExpertShape,
    dtype: str,
    *,
    used: int | None = None,
    slots: int | None = None,
) -> Arguments:
    """Arguments of masked_expert_gemm, by position.

    Args:
      used: how many experts the routing uses; the shape's own number by default.
      slots: C, at least `used`; all experts by default. With fewer slots than experts the used
        experts are in distinct ones and the others in none: their slot is C.
    """
    used = shape.used if used is None else used
    slots = shape.experts if slots is None else slots
    if slots < used:
        raise ValueError(f"{slots} slots cannot hold {used} experts")
    of_rows, of_bank, of_routing = jax.random.split(key, 3)
    seed = int(jax.random.randint(of_routing, (), 0, 2**31 - 1))
    ids_Tk, weights_Tk, used_ids_E, used_count = routing(shape, used, seed)
    slot_of = np.full(shape.experts, slots)
    order = np.random.default_rng(seed).permutation(slots)
    if slots >= shape.experts:
        slot_of = order[: shape.experts]
    else:
        slot_of[np.asarray(used_ids_E)[:used]] = order[:used]
    x_TD = jax.random.normal(of_rows, (shape.rows, shape.width), _ROWS_DTYPE[dtype])
    bank = random_bank(of_bank, shape, dtype, slots)
    bank = bank.replace(slot_of=jnp.asarray(slot_of, jnp.int32))
    return x_TD, bank, ids_Tk, weights_Tk, used_ids_E, used_count


def abstract_bank(shape: ExpertShape, dtype: str, slots: int) -> ExpertBank:
    """The bank's leaves as `jax.ShapeDtypeStruct`s."""
    D, F = shape.width, shape.expert_width
    bias_dtype = _ROWS_DTYPE[dtype]

    def matrix(out: int, into: int) -> Matrix:
        if dtype == PACKED:
            blocks = (slots, out, into // BLOCK, BLOCK // 2)
            return Mxfp4(_struct(blocks, jnp.uint8), _struct(blocks[:3], jnp.uint8))
        return _struct((slots, out, into), jnp.dtype(dtype))

    def bias(out: int) -> jax.ShapeDtypeStruct | None:
        return _struct((slots, out), bias_dtype) if shape.biases else None

    return ExpertBank(
        gate=matrix(F, D),
        up=matrix(F, D),
        down=matrix(D, F),
        slot_of=_struct((shape.experts,), jnp.int32),
        gate_bias=bias(F),
        up_bias=bias(F),
        down_bias=bias(D),
    )


def abstract_arguments(shape: ExpertShape, dtype: str, *, slots: int | None = None) -> Arguments:
    """`random_arguments` as `jax.ShapeDtypeStruct`s, with every expert in a slot by default."""
    slots = shape.experts if slots is None else slots
    picks = (shape.rows, shape.top_k)
    return (
        _struct((shape.rows, shape.width), _ROWS_DTYPE[dtype]),
        abstract_bank(shape, dtype, slots),
        _struct(picks, jnp.int32),
        _struct(picks, jnp.float32),
        _struct((shape.experts,), jnp.int32),
        _struct((), jnp.int32),
    )


def moved_bytes(shape: ExpertShape, dtype: str, used: int | None = None) -> int:
    """What has to cross the memory bus once: the used experts, the rows in and out."""
    used = shape.used if used is None else used
    expert = abstract_bank(shape, dtype, 1).replace(slot_of=None)
    rows = 2 * shape.rows * shape.width * jnp.dtype(_ROWS_DTYPE[dtype]).itemsize
    return used * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(expert)) + rows


def product_flops(shape: ExpertShape) -> int:
    """Of the three products, for the picks alone."""
    return 3 * 2 * shape.rows * shape.top_k * shape.width * shape.expert_width


def kernel_cases(implementation: str) -> list[KernelCase]:
    """Every shape and dtype that it takes; full sizes are compiled every day in their own dtype."""
    return [
        KernelCase(
            op="masked_expert_gemm",
            implementation=implementation,
            shape=name,
            dtype=dtype,
            function=functools.partial(
                masked_expert_gemm, activation=shape.activation, implementation=implementation
            ),
            arguments=abstract_arguments(shape, dtype),
            bytes=moved_bytes(shape, dtype),
            flops=product_flops(shape),
            tensor_cores=dtype != "float32",
            archs=("sm_90",) if implementation == "mosaic_wgmma" else ("sm_90", "sm_120"),
            everyday=name in ("qwen3-30b-a3b", "gpt-oss-120b") and dtype == shape.dtypes[0],
        )
        for name, shape in SHAPES.items()
        for dtype in shape.dtypes
        if dtype in _TAKEN[implementation]
        # Its tiles of shared memory are whole rows of swizzled groups.
        if implementation != "mosaic_wgmma" or not (shape.width % 16 or shape.expert_width % 16)
    ]


def _struct(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
