"""What `jax.vmap` over an expert product means: all requests' rows share each expert's weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from acceptmoe_jax.selection import used_experts
from pallas_kernels.masked_expert_gemm.bank import ExpertBank

Picks = Callable[..., jax.Array]  # (x_TD, bank, expert_ids_Tk, weights_Tk, used_ids_E, used_count)


def batched(picks: Picks) -> Picks:
    """`picks`, which a vmap calls once with the rows of the whole batch.

    The experts used are then the union over the batch, each read once; a request's own picks are
    computed as they are without the others. The bank must not be batched. It has no derivative.
    """
    run = jax.custom_batching.custom_vmap(picks)

    @run.def_vmap
    def of_batch(axis_size, in_batched, x, bank: ExpertBank, expert_ids, weights, *used):
        if any(jax.tree.leaves(in_batched[1])):
            raise ValueError("a batch of expert banks: vmap over the rows of one bank only")
        x, expert_ids, weights = (
            (leaf if is_batched else jnp.broadcast_to(leaf, (axis_size, *leaf.shape))).reshape(
                -1, leaf.shape[-1]
            )
            for leaf, is_batched in zip(
                (x, expert_ids, weights), (in_batched[0], *in_batched[2:4]), strict=True
            )
        )
        used = used_experts(expert_ids, weights != 0, len(bank.slot_of))
        out = batched(picks)(x, bank, expert_ids, weights, *used)
        return out.reshape(axis_size, -1, *out.shape[1:]), True

    return run
