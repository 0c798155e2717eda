"""The draft tree and its growth.

A draft model proposes a tree of continuations of the last committed token (the root, node 0); the
target verifies all of it in one block of T rows. The growth follows EAGLE-2 and EAGLE-3
(arXiv 2406.16858, 2503.01840): a beam search whose every candidate, taken as a beam or not,
competes in one pool for a place in the tree.

The draft model is a function given by the caller, so nothing here knows a model or its cache.
Everything is for one sequence, pure, of static shapes, and may be vmapped. Axes: K beams and
children a beam (`TreeConfig.top_k`), T nodes, D width of the draft's hidden state, R rows of the
draft's scratch (`TreeConfig.draft_rows`).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.speculation.config import TreeConfig

DraftStep: TypeAlias = Callable[
    [Any, int, Int[Array, "K"], Float[Array, "K D"], Bool[Array, "K R"]],
    tuple[Any, Float[Array, "K K"], Int[Array, "K K"], Float[Array, "K D"]],
]


@flax.struct.dataclass
class DraftTree:
    """A tree of T nodes whose parents precede their children; siblings stand best first.

    Attributes:
      tokens: target vocabulary ids; `tokens[0]` is the root, the last committed token.
      parent: node number of the parent; -1 for the root, so that it is nobody's child.
      depth: edges from the root; 0 for the root.
      score: log-probability of the path under the draft; 0 for the root.
      valid: False for a node of probability 0, which only fills the static shape. It can never be
        accepted, and no valid node descends from it.
    """

    tokens: Int[Array, "T"]
    parent: Int[Array, "T"]
    depth: Int[Array, "T"]
    score: Float[Array, "T"]
    valid: Bool[Array, "T"]


@flax.struct.dataclass
class _Candidates:
    """Children of one level's beams, flat: child c of beam b stands at `b * K + c`."""

    score: Float[Array, "C"]
    tokens: Int[Array, "C"]
    parent: Int[Array, "C"]  # place of the parent in the pool; -1 for the root


def _children(beam_score, beam_place, topk_logp, topk_ids) -> _Candidates:
    logp = topk_logp.astype(jnp.float32)
    # No child may outrank its parent: this drops rounding above 0, and -0.0, which top_k ranks
    # below 0.0 (`minimum` would keep it).
    logp = jnp.where(logp >= 0, 0.0, logp)
    return _Candidates(
        score=(beam_score[:, None] + logp).ravel(),
        tokens=topk_ids.astype(jnp.int32).ravel(),
        parent=jnp.repeat(beam_place, topk_ids.shape[1]),
    )


def grow(
    step_fn: DraftStep,
    carry: Any,
    first_topk_logp: Float[Array, "K"],
    first_topk_ids: Int[Array, "K"],
    first_hidden: Float[Array, "D"],
    root_token: Int[Array, ""],
    config: TreeConfig,
) -> tuple[DraftTree, Any]:
    """Grows the tree with `steps - 1` forwards of the draft model.

    Level 1 is the top-k given. Each step expands K beams by K children, and the best K of those
    K * K are the next beams; all of them join the pool. The tree is the root and the best T - 1 of
    the pool, in the order of their places in it, so that parents precede children.

    The selected set is closed under ancestors. A node's parent was a beam, hence a candidate of
    the level before: it stands earlier in the pool, and its score is no lower, since a float32 sum
    with a number <= 0 never rounds upwards. `lax.top_k` keeps the lower place where scores tie.

    Args:
      step_fn: one forward of the draft model,
        `step_fn(carry, step, tokens [K], hidden [K, D], ancestors bool[K, R])
        -> (carry, topk_logp [K, K], topk_ids [K, K], hidden [K, D])`.
        `step` is a Python int from 0; the beams are the nodes of depth `step + 1`. `hidden[b]` is
        the draft's output at the row that proposed beam b, as EAGLE feeds it back. The forward
        writes its keys and values to rows `step * K + b` of the draft's scratch, where they stay:
        rows are not permuted when beams are chosen again. `ancestors[b]` marks the rows of beam b
        and of its true ancestors; beam b attends to the prefix and to those.
      carry: state of `step_fn` (the draft's cache), any pytree.
      first_topk_logp: log-probabilities of the level-1 candidates, best first.
      first_topk_ids: their target vocabulary ids.
      first_hidden: the draft's output at the row that proposed them.
      root_token: the last committed token.
      config: the shape of the tree.

    Returns:
      The tree, and the carry as the last step left it.
    """
    width = config.top_k
    # The root stands as the single beam of level 0.
    level = _children(jnp.zeros(1), jnp.full(1, -1), first_topk_logp[None], first_topk_ids[None])
    hidden = first_hidden[None]
    ancestors = jnp.zeros((1, config.draft_rows), bool)
    levels = [level]
    level_start = 0
    for step in range(config.steps - 1):
        beam_score, beam = jax.lax.top_k(level.score, width)
        source = beam // width  # the beam of the level before that proposed this one
        own_rows = slice(step * width, (step + 1) * width)
        ancestors = ancestors[source].at[:, own_rows].set(jnp.eye(width, dtype=bool))
        carry, topk_logp, topk_ids, hidden = step_fn(
            carry, step, level.tokens[beam], hidden[source], ancestors
        )
        beam_place = level_start + beam
        level_start += level.score.size
        level = _children(beam_score, beam_place, topk_logp, topk_ids)
        levels.append(level)

    pool = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *levels)
    pool_depth = np.repeat(np.arange(1, config.steps + 1), [one.score.size for one in levels])
    kept = jnp.sort(jax.lax.top_k(pool.score, config.nodes - 1)[1])
    # Node numbers of the parents: 1 + the rank of their place among the kept, 0 for place -1.
    parent = jnp.sum(kept[None, :] <= pool.parent[kept][:, None], axis=1, dtype=jnp.int32)
    score = pool.score[kept]

    def with_root(root, rest):
        return jnp.concatenate([jnp.asarray(root, rest.dtype)[None], rest])

    tree = DraftTree(
        tokens=with_root(root_token, pool.tokens[kept]),
        parent=with_root(-1, parent),
        depth=with_root(0, jnp.asarray(pool_depth, jnp.int32)[kept]),
        score=with_root(0.0, score),
        valid=with_root(True, score > -jnp.inf),
    )
    return tree, carry
