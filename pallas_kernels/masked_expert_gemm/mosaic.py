"""masked_expert_gemm in Mosaic GPU: two launches and a plain sum.

1. gate and up, and the activation: `hidden[expert, row]`.
2. down: `y[expert, row]`, of which XLA sums each pick's by weight and rank.

A thread block is a used expert and a tile of its output features. It streams that tile of the
weights through shared memory once, for all the rows of the expert; a block of an unused expert
returns at once. Nothing is split or accumulated over experts, so that the down product has
(used experts) x (tiles of D) blocks, and the sum over picks is `combine`'s, in rank order, which
depends on neither slots nor the set in use.

Experts that are numbers run on all rows of the block, at most 64: they are bound by their bytes
all the same, and nothing needs to be gathered. Experts in MXFP4 would be bound by arithmetic, so
each runs on its own rows, gathered beforehand, in the smallest tile of `_ROW_TILES` that holds
them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.compat import require_mosaic
from pallas_kernels.masked_expert_gemm.activation import GatedActivation
from pallas_kernels.masked_expert_gemm.assignments import assign
from pallas_kernels.masked_expert_gemm.bank import ExpertBank
from pallas_kernels.mxfp4 import Mxfp4

# Rows of an mma.
ROWS = 16
# A swizzled tile of shared memory is loaded from a multiple of so many rows.
ALIGN = 8

_ROW_TILES = (16, 32, 64)
# Rows of a pass; more go through in groups, each of which loads its experts.
_GROUP = _ROW_TILES[-1]

Product = Callable[..., Float[Array, "out_planes E R out"]]


def mosaic(
    x_TD: Float[Array, "T D"],
    bank: ExpertBank,
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    used_ids_E: Int[Array, "E"],
    used_count: Int[Array, ""],
    activation: GatedActivation,
    interpret: bool,
) -> Float[Array, "T k D"]:
    """See `expert_picks`; with `mma`, for sm_90 and sm_120.

    Raises:
      NotImplementedError: if jax is older than 0.11.
      ValueError: if the rows have a dtype or the weights a width that the kernels do not take.
    """
    require_mosaic("mosaic")
    from pallas_kernels.masked_expert_gemm.mosaic_product import product

    blocks = (expert_ids_Tk, weights_Tk, used_ids_E, used_count)
    return _in_groups(product, x_TD, bank, *blocks, activation, interpret)


def mosaic_wgmma(
    x_TD: Float[Array, "T D"],
    bank: ExpertBank,
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    used_ids_E: Int[Array, "E"],
    used_count: Int[Array, ""],
    activation: GatedActivation,
    interpret: bool,
) -> Float[Array, "T k D"]:
    """See `expert_picks`; with `wgmma`, for sm_90 and experts that are numbers.

    Raises:
      NotImplementedError: if jax is older than 0.11.
      ValueError: as of `mosaic`, and if the experts are in MXFP4.
    """
    require_mosaic("mosaic_wgmma")
    from pallas_kernels.masked_expert_gemm.mosaic_wgmma import product

    if isinstance(bank.gate, Mxfp4):
        raise ValueError("implementation 'mosaic_wgmma' takes no MXFP4; 'mosaic' does")
    blocks = (expert_ids_Tk, weights_Tk, used_ids_E, used_count)
    return _in_groups(product, x_TD, bank, *blocks, activation, interpret)


def _in_groups(
    product, x, bank, expert_ids, weights, used_ids_E, used_count, activation, interpret
):
    _check(x, bank, interpret)
    num_rows, _ = x.shape
    groups = -(-num_rows // _GROUP)
    padding = -num_rows % (_GROUP if groups > 1 else ROWS)
    padded = [jnp.pad(array, ((0, padding), (0, 0))) for array in (x, expert_ids, weights)]
    run = functools.partial(
        _packed if isinstance(bank.gate, Mxfp4) else _dense,
        bank=bank,
        used=_Used.of(bank, used_ids_E, used_count),
        activation=activation,
        product=functools.partial(product, interpret=interpret),
    )
    if groups == 1:
        return run(*padded)[:num_rows]
    split = [array.reshape(groups, _GROUP, -1) for array in padded]
    picks = jax.lax.map(lambda group: run(*group), split)
    return picks.reshape(-1, *picks.shape[2:])[:num_rows]


def _dense(x, expert_ids, weights, *, bank, used, activation, product):
    num_rows, width = x.shape
    hidden = product(
        used.work(num_rows, first=0),
        x[None],
        (bank.gate, bank.up),
        (bank.gate_bias, bank.up_bias),
        row_tiles=(num_rows,),
        finish=activation,
        name="masked_expert_gemm_gate_up",
    )
    y = _down(used, num_rows, hidden, bank, (num_rows,), product)
    return y[expert_ids, jnp.arange(num_rows)[:, None], :width]


def _packed(x, expert_ids, weights, *, bank, used, activation, product):
    num_rows, width = x.shape
    row_tiles = _ROW_TILES[: sum(tile < num_rows for tile in _ROW_TILES) + 1]
    num_experts = used.experts.shape[0]
    assigned = assign(expert_ids, weights, num_experts, align=ALIGN, room=row_tiles[-1])
    count = assigned.count_E[used.experts]
    planes = jnp.stack([x[:, ::2], x[:, 1::2]])
    hidden = product(
        used.work(count, assigned.first_E[used.experts]),
        planes[:, assigned.row_of_A],
        (bank.gate, bank.up),
        (bank.gate_bias, bank.up_bias),
        out_planes=2,
        row_tiles=row_tiles,
        finish=activation,
        name="masked_expert_gemm_gate_up",
    )
    y = _down(used, count, hidden, bank, row_tiles, product)
    return y[expert_ids, assigned.within_Tk, :width]


def _down(used, count, hidden, bank, row_tiles, product):
    """`y[expert, row]` of `hidden[plane, expert, row]`."""
    planes, num_experts, num_rows, width = hidden.shape
    return product(
        used.work(count, first=used.experts * num_rows),
        hidden.reshape(planes, num_experts * num_rows, width),
        (bank.down,),
        (bank.down_bias,),
        row_tiles=row_tiles,
        finish=_itself,
        name="masked_expert_gemm_down",
    )[0]


def _itself(y):
    return y


@dataclasses.dataclass(frozen=True)
class _Used:
    """The used experts, and padding that is none."""

    is_used: Bool[Array, "E"]
    experts: Int[Array, "E"]
    slots: Int[Array, "E"]

    @classmethod
    def of(cls, bank, used_ids_E, used_count):
        is_used = jnp.arange(used_ids_E.shape[0]) < used_count
        experts = jnp.where(is_used, used_ids_E, 0)
        return cls(is_used, experts, bank.slot_of[experts])

    def work(self, count, first) -> Int[Array, "4 E"]:
        """What `product` is told of each: how many rows, the first of them, its slot, itself."""
        count = jnp.where(self.is_used, count, 0)
        first = jnp.broadcast_to(first, count.shape) // ALIGN
        return jnp.stack([count, first, self.slots, self.experts]).astype(jnp.int32)


def _check(x, bank, interpret):
    """Refuses what tensor cores or the copies to shared memory do not take."""
    dtypes = {x.dtype} if isinstance(bank.gate, Mxfp4) else {x.dtype, bank.gate.dtype}
    if dtypes != {jnp.dtype(jnp.bfloat16)} and not interpret:
        names = " and ".join(sorted(dtype.name for dtype in dtypes))
        raise ValueError(f"Mosaic's tensor cores take bfloat16 here, not {names}")
    for width in (x.shape[1], bank.down.shape[2]):
        if width % ALIGN:
            raise ValueError(f"Mosaic's copies take rows of a multiple of {ALIGN}, not {width}")
