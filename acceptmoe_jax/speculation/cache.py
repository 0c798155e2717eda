"""Cache compaction: the accepted nodes' rows are made contiguous behind the committed ones."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Caches = TypeVar("Caches")


def compact(
    caches: Caches, rows: Int[Array, "n+1"], count: Int[Array, ""], start: Int[Array, ""]
) -> Caches:
    """Moves the rows of the accepted path to the front of their block.

    Row `start + rows[i]` goes to `start + i` for `i < count`; after it the first `start + count`
    rows are the committed sequence. Only n + 1 rows are read and written, so that a donated cache
    is updated in place at a cost that does not depend on its size. The rows from `start + count`
    on are dead: they keep what the block left there, no mask shows them, and the next block
    overwrites them.

    Args:
      caches: any pytree of arrays `[S, ...]`, such as keys and values of every layer.
      rows: the accepted path as node numbers, the root first (`Acceptance.rows`).
      count: how many entries of `rows` count (`Acceptance.length`).
      start: cache row of node 0. The caller keeps `start + n + 1 <= S`.

    Returns:
      The caches, of the same shapes.
    """
    place = jnp.arange(rows.shape[0])
    source = start + jnp.where(place < count, rows, place)

    def move(leaf):
        kept = jnp.take(leaf, source, axis=0, mode="clip")
        return jax.lax.dynamic_update_slice_in_dim(leaf, kept, start, axis=0)

    return jax.tree.map(move, caches)
