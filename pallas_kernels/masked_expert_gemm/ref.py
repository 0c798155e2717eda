"""What masked_expert_gemm computes, written for the eye: one product a row and pick."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.masked_expert_gemm.activation import GatedActivation
from pallas_kernels.masked_expert_gemm.bank import ExpertBank, gathered, gathered_bias


def combine(
    picks_TkD: Float[Array, "T k D"], weights_Tk: Float[Array, "T k"]
) -> Float[Array, "T D"]:
    """Weighted sum over a row's picks, in rank order, accumulated in float32.

    The order is fixed so that the bits depend on neither slots nor waves. A pick of weight 0
    adds an exact zero, whatever (even NaN) stands in its place.
    """
    total = jnp.zeros(picks_TkD.shape[::2], jnp.float32)
    for rank in range(weights_Tk.shape[1]):
        weight = weights_Tk[:, rank, None].astype(jnp.float32)
        total += jnp.where(weight != 0, weight * picks_TkD[:, rank].astype(jnp.float32), 0)
    return total.astype(picks_TkD.dtype)


def reference(
    x_TD: Float[Array, "T D"],
    bank: ExpertBank,
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    used_ids_E: Int[Array, "E"],
    used_count: Int[Array, ""],
    activation: GatedActivation,
) -> Float[Array, "T k D"]:
    """See `expert_picks`. Gathers three matrices a pick: for small shapes only."""
    del weights_Tk, used_ids_E, used_count
    slots = bank.slot_of[expert_ids_Tk]
    gate, up, down = (gathered(m, slots, x_TD.dtype) for m in (bank.gate, bank.up, bank.down))
    gate = jnp.einsum("td,tkfd->tkf", x_TD, gate) + gathered_bias(bank.gate_bias, slots)
    up = jnp.einsum("td,tkfd->tkf", x_TD, up) + gathered_bias(bank.up_bias, slots)
    picks = jnp.einsum("tkf,tkdf->tkd", activation(gate, up), down)
    return picks + gathered_bias(bank.down_bias, slots)
