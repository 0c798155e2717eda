"""What masked_expert_gemm computes, written for the eye: one product a row and pick."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def swiglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """`silu(gate) * up`, Qwen3's activation."""
    return jax.nn.silu(gate) * up


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
    gate_CFD: Float[Array, "C F D"],
    up_CFD: Float[Array, "C F D"],
    down_CDF: Float[Array, "C D F"],
    slot_of_E: Int[Array, "E"],
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    used_ids_E: Int[Array, "E"],
    used_count: Int[Array, ""],
) -> Float[Array, "T D"]:
    """See `masked_expert_gemm`. Gathers three matrices a pick: for small shapes only."""
    del used_ids_E, used_count
    slots = slot_of_E[expert_ids_Tk]
    gate = jnp.einsum("td,tkfd->tkf", x_TD, gate_CFD[slots])
    up = jnp.einsum("td,tkfd->tkf", x_TD, up_CFD[slots])
    picks = jnp.einsum("tkf,tkdf->tkd", swiglu(gate, up), down_CDF[slots])
    return combine(picks, weights_Tk)
