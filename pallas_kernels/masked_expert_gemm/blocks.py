"""masked_expert_gemm in plain XLA: a loop over the used experts, their rows in small blocks.

Its time follows the number of used experts, which that of `jax.lax.ragged_dot` does not: on the
CPU, and in what XLA compiles for CUDA, it multiplies every group and masks.

The assignments (row, pick) are sorted by expert. An expert's results are written to the same
contiguous range of the sorted order in whole blocks; what a last block writes beyond its range
is overwritten by the next expert, which comes later in that order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.masked_expert_gemm.ref import combine, swiglu

BLOCK_ROWS = 16


def blocks(
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
    """See `masked_expert_gemm`."""
    rows, width = x_TD.shape
    num_experts = slot_of_E.shape[0]
    picks = expert_ids_Tk.size
    block = min(BLOCK_ROWS, rows)  # a row picks an expert at most once

    expert_A = jnp.where(weights_Tk != 0, expert_ids_Tk, num_experts).reshape(-1)
    order_A = jnp.argsort(expert_A)
    count_E = jnp.zeros(num_experts + 1, jnp.int32).at[expert_A].add(1)[:num_experts]
    first_E = jnp.cumsum(count_E) - count_E
    row_of_A = jnp.pad(order_A // expert_ids_Tk.shape[1], (0, block))

    def run_expert(i, out_AD):
        expert = used_ids_E[i]
        slot = slot_of_E[expert]
        gate, up, down = gate_CFD[slot], up_CFD[slot], down_CDF[slot]
        end = first_E[expert] + count_E[expert]

        def run_block(state):
            at, out_AD = state
            x = x_TD[jax.lax.dynamic_slice_in_dim(row_of_A, at, block)]
            hidden = swiglu(jnp.einsum("rd,fd->rf", x, gate), jnp.einsum("rd,fd->rf", x, up))
            y = jnp.einsum("rf,df->rd", hidden, down)
            return at + block, jax.lax.dynamic_update_slice_in_dim(out_AD, y, at, 0)

        state = (first_E[expert], out_AD)
        return jax.lax.while_loop(lambda state: state[0] < end, run_block, state)[1]

    out_AD = jnp.zeros((picks + block, width), x_TD.dtype)
    out_AD = jax.lax.fori_loop(0, used_count, run_expert, out_AD)
    place_A = jnp.zeros(picks, jnp.int32).at[order_A].set(jnp.arange(picks, dtype=jnp.int32))
    return combine(out_AD[place_A].reshape(*expert_ids_Tk.shape, width), weights_Tk)
