"""Verification blocks as native decoding meets them, for evaluating policies on them in batches."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from acceptmoe_jax.runtime import programs, stages
from acceptmoe_jax.runtime.state import DecodeState, Setup, Weights, empty_state
from acceptmoe_jax.speculation import DraftTree


@flax.struct.dataclass
class RecordedBlock:
    """A verification block as native decoding met it. A batch has an axis N in front."""

    state: DecodeState  # its caches hold the committed prefix; inactive once the answer has ended
    tree: DraftTree
    rows: Int[Array, "n+1"]  # the accepted path, the root first
    count: Int[Array, ""]  # of `rows` that count; 0 once the answer has ended


def record_blocks(
    setup: Setup,
    rounds: int,
    dtype: jnp.dtype,
    weights: Weights,
    stop_ids: Int[Array, "M"],
    tokens: Int[Array, "N T"],
    count: Int[Array, "N"],
) -> RecordedBlock:
    """The first `rounds` blocks of each prompt, N * rounds in all.

    Args:
      dtype: of the caches.
      stop_ids: tokens that end an answer.
      tokens: prompts, padded.
      count: tokens of each prompt; 0 makes blocks that do not count.
    """
    cache_rows = tokens.shape[1] + rounds * setup.tree.max_accepted + setup.spare_rows

    def round_(state, _):
        state, tree = programs.draft(setup, weights, state)
        after, done = programs.verify(
            setup, weights, state, tree, stages.NO_COMMITMENT, selector=setup.native()
        )
        accepted = done.acceptance
        count = jnp.where(state.active, accepted.length, 0)
        emitted = jnp.arange(len(accepted.tokens)) < count
        ended = jnp.any(emitted & jnp.isin(accepted.tokens, stop_ids))
        after = after.replace(active=state.active & ~ended)
        return after, RecordedBlock(state.replace(draft=None), tree, accepted.rows, count)

    def of_prompt(tokens, count):
        state = empty_state(setup, cache_rows, dtype)
        state = programs.prefill_chunk(setup, weights, state, tokens, count, jnp.int32(-1))
        ended = (count == 0) | jnp.isin(state.last_token, stop_ids)
        return jax.lax.scan(round_, state.replace(active=~ended), length=rounds)[1]

    blocks = jax.vmap(of_prompt)(tokens, count)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), blocks)
