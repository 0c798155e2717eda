"""The public function of masked_expert_gemm."""

import functools

from jaxtyping import Array, Float, Int

from pallas_kernels.masked_expert_gemm.activation import GatedActivation
from pallas_kernels.masked_expert_gemm.bank import ExpertBank
from pallas_kernels.masked_expert_gemm.batching import batched
from pallas_kernels.masked_expert_gemm.blocks import blocks
from pallas_kernels.masked_expert_gemm.mosaic import mosaic, mosaic_wgmma
from pallas_kernels.masked_expert_gemm.ref import combine, reference
from pallas_kernels.masked_expert_gemm.triton import triton

# In plain XLA, and as Pallas kernels.
_PLAIN = {"reference": reference, "blocks": blocks}
_KERNELS = {"triton": triton, "mosaic": mosaic, "mosaic_wgmma": mosaic_wgmma}
IMPLEMENTATIONS = (*_PLAIN, *_KERNELS)


def masked_expert_gemm(
    x_TD: Float[Array, "T D"],
    bank: ExpertBank,
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    used_ids_E: Int[Array, "E"],
    used_count: Int[Array, ""],
    *,
    activation: GatedActivation,
    implementation: str = "blocks",
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """`y_t = sum_i w[t,i] * (down_e activation(gate_e x_t, up_e x_t))`, with `e = expert_ids[t,i]`.

    Each of the three products adds the expert's bias where the bank has one. Under `jax.vmap` the
    rows of all requests share each expert's weights (see `batching`).

    Args:
      x_TD: rows of the block.
      bank: weights by slot and the slot of each expert, which is read for used experts only.
      expert_ids_Tk: experts of each row, by rank; distinct within a row.
      weights_Tk: their weights; a pick of weight 0 is not computed and adds an exact zero.
      used_ids_E: the experts of the picks of non-zero weight, ascending, then padding.
      used_count: how many of them count.
      activation: of the family.
      implementation: a name in `IMPLEMENTATIONS`.
      interpret: run a Pallas kernel in interpret mode; plain XLA runs anywhere.

    Returns:
      The combined output, in the dtype of `x_TD`; sums over picks are float32, in rank order.

    Raises:
      NotImplementedError: if this version of jax lacks what the implementation needs.
      ValueError: if there is no such implementation, or it does not take these arguments.
    """
    picks_TkD = expert_picks(
        x_TD,
        bank,
        expert_ids_Tk,
        weights_Tk,
        used_ids_E,
        used_count,
        activation=activation,
        implementation=implementation,
        interpret=interpret,
    )
    return combine(picks_TkD, weights_Tk).astype(x_TD.dtype)


def expert_picks(
    x_TD: Float[Array, "T D"],
    bank: ExpertBank,
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    used_ids_E: Int[Array, "E"],
    used_count: Int[Array, ""],
    *,
    activation: GatedActivation,
    implementation: str = "blocks",
    interpret: bool = False,
) -> Float[Array, "T k D"]:
    """What `masked_expert_gemm` sums: each pick's output, before its weight.

    Where experts come in waves, each wave computes its own picks, and `combine` follows the last:
    the bits of a pick depend neither on the wave it is in nor on the slot of its expert.

    Args, raises: as `masked_expert_gemm`; of the weights only whether they are 0 is read.

    Returns:
      The outputs; where a pick's weight is 0, anything, even NaN.
    """
    if implementation in _PLAIN:
        run = functools.partial(_PLAIN[implementation], activation=activation)
    elif implementation in _KERNELS:
        run = _KERNELS[implementation]
        run = functools.partial(run, activation=activation, interpret=interpret)
    else:
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    return batched(run)(x_TD, bank, expert_ids_Tk, weights_Tk, used_ids_E, used_count)
