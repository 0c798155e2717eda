"""masked_expert_gemm in plain XLA: a loop over the used experts, their rows in small blocks.

Its time follows the number of used experts, which that of `jax.lax.ragged_dot` does not: on the
CPU, and in what XLA compiles for CUDA, it multiplies every group and masks.

The assignments (row, pick) are laid out by expert. An expert's results are written to the same
contiguous range of that layout in whole blocks; what a last block writes beyond its range is
overwritten by the next expert, whose range follows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.masked_expert_gemm.activation import GatedActivation
from pallas_kernels.masked_expert_gemm.assignments import assign
from pallas_kernels.masked_expert_gemm.bank import ExpertBank, gathered, gathered_bias

BLOCK_ROWS = 16


def blocks(
    x_TD: Float[Array, "T D"],
    bank: ExpertBank,
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    used_ids_E: Int[Array, "E"],
    used_count: Int[Array, ""],
    activation: GatedActivation,
) -> Float[Array, "T k D"]:
    """See `expert_picks`."""
    rows = expert_ids_Tk.shape[0]
    num_experts = bank.slot_of.shape[0]
    picks = expert_ids_Tk.size
    block = min(BLOCK_ROWS, rows)  # a row picks an expert at most once

    assigned = assign(expert_ids_Tk, weights_Tk, num_experts, room=block)

    def run_expert(i, out_AD):
        expert = used_ids_E[i]
        slot = bank.slot_of[expert]
        gate, up, down = (gathered(m, slot, x_TD.dtype) for m in (bank.gate, bank.up, bank.down))
        gate_bias, up_bias, down_bias = (
            gathered_bias(bias, slot) for bias in (bank.gate_bias, bank.up_bias, bank.down_bias)
        )
        first = assigned.first_E[expert]
        end = first + assigned.count_E[expert]

        def run_block(state):
            at, out_AD = state
            x = x_TD[jax.lax.dynamic_slice_in_dim(assigned.row_of_A, at, block)]
            hidden = activation(
                jnp.einsum("rd,fd->rf", x, gate) + gate_bias,
                jnp.einsum("rd,fd->rf", x, up) + up_bias,
            )
            y = jnp.einsum("rf,df->rd", hidden, down) + down_bias
            return at + block, jax.lax.dynamic_update_slice_in_dim(out_AD, y, at, 0)

        state = (first, out_AD)
        return jax.lax.while_loop(lambda state: state[0] < end, run_block, state)[1]

    out_AD = jnp.zeros((picks + block, x_TD.shape[1]), x_TD.dtype)
    out_AD = jax.lax.fori_loop(0, used_count, run_expert, out_AD)
    return out_AD[assigned.place_Tk]
