"""Where a block of tree rows stands in the sequence: its attention mask and its positions.

A block is written to cache rows `length .. length + T - 1`, behind the `length` committed rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from acceptmoe_jax.speculation.tree import DraftTree


def tree_mask(parent: Int[Array, "T"]) -> Bool[Array, "T T"]:
    """Returns which nodes each node attends to: itself and its ancestors, the root among them.

    Args:
      parent: node number of each node's parent, -1 for the root (`DraftTree.parent`).
    """
    nodes = parent.shape[0]
    node = jnp.arange(nodes)
    reach = (parent[:, None] == node) | (node[:, None] == node)
    # Squaring doubles the distance covered, and no path is longer than T - 1. Products of 0 and 1
    # stay exact at any matmul precision, and small matmuls beat chains of gathers.
    for _ in range((nodes - 1).bit_length()):
        steps = reach.astype(jnp.float32)
        reach = steps @ steps > 0
    return reach


def block_mask(tree: DraftTree, length: Int[Array, ""], cache_rows: int) -> Bool[Array, "T S"]:
    """Returns which cache rows each node attends to during verification.

    Node j sees every committed row (`< length`) and the rows `length + i` of itself and of its
    ancestors i; nothing else, so whatever stands in dead rows is never read.

    Args:
      tree: the draft tree, whose node i is written to row `length + i`.
      length: committed rows. The caller keeps `length + T <= cache_rows`.
      cache_rows: rows of the cache (S).

    Raises:
      ValueError: if the cache cannot hold a single block.
    """
    nodes = tree.parent.shape[0]
    if nodes > cache_rows:
        raise ValueError(f"a block of {nodes} rows does not fit a cache of {cache_rows} rows")
    prefix = jnp.broadcast_to(jnp.arange(cache_rows) < length, (nodes, cache_rows))
    return jax.lax.dynamic_update_slice(prefix, tree_mask(tree.parent), (0, length))


def positions(tree: DraftTree, length: Int[Array, ""]) -> Int[Array, "T"]:
    """Returns the nodes' positions in the target: by depth, whatever their place in the tree."""
    return length + tree.depth
