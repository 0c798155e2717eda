"""What one verification emits, and the greedy accept walk: the drafts the target agrees with."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from acceptmoe_jax.speculation.tree import DraftTree


@flax.struct.dataclass
class Acceptance:
    """The outcome of one verification. Entries from `length` on are padding, all 0.

    Attributes:
      rows: `rows[i]` is the node whose row predicted emitted token i: the accepted path, the root
        first. Its cache rows are the ones to keep, and its captured hidden states are what the
        draft goes on from.
      tokens: the emitted tokens: the accepted drafts, then the bonus.
      length: how many were emitted, the bonus included: 1 to n + 1.
      bonus: the last emitted token, predicted by the last accepted node. It has no cache row yet
        and is the next root.
    """

    rows: Int[Array, "n+1"]
    tokens: Int[Array, "n+1"]
    length: Int[Array, ""]
    bonus: Int[Array, ""]


def outcome(
    path: Int[Array, "n+1"], tokens: Int[Array, "n+1"], on_path: Bool[Array, "n+1"]
) -> Acceptance:
    """Returns the outcome of a walk: node `path[i]` emitted `tokens[i]`, while `on_path[i]`."""
    rows = jnp.where(on_path, path, 0)
    tokens = jnp.where(on_path, tokens, 0).astype(jnp.int32)
    length = jnp.sum(on_path, dtype=jnp.int32)
    return Acceptance(rows=rows, tokens=tokens, length=length, bonus=tokens[length - 1])


def accept_greedy(tree: DraftTree, target_argmax: Int[Array, "T"], max_accepted: int) -> Acceptance:
    """Walks from the root to the child that the target itself would emit, until there is none.

    Children are visited in ascending node number: of two with the same token the first is taken.
    Invalid nodes never match.

    Args:
      tree: the verified tree.
      target_argmax: the target's greedy token after each node, the first maximum of its logits.
      max_accepted: n + 1, the most tokens to emit (`TreeConfig.max_accepted`).
    """
    nodes = tree.tokens.shape[0]
    nowhere = nodes  # nobody's parent, so that a walk that stopped stays stopped

    def step(node, _):
        matches = tree.valid & (tree.parent == node) & (tree.tokens == target_argmax[node])
        child = jnp.where(jnp.any(matches), jnp.argmax(matches), nowhere).astype(jnp.int32)
        return child, child

    root = jnp.int32(0)
    _, path = jax.lax.scan(step, root, length=max_accepted - 1)
    path = jnp.concatenate([root[None], path])
    return outcome(path, jnp.take(target_argmax, path, mode="clip"), path < nowhere)
