"""EVICT (arXiv 2605.00342): a draft tree is cut to the length that pays before it is verified.

A node's score is the draft's probability of its path, hence of its being accepted; verifying it
costs time, the more the more experts it adds. `choose_length` weighs the two with measured times
on the host, and `keep_best` cuts the tree to one of a few static lengths on the device. What is
kept is verified as ever, so that the output does not change.

Lengths are rows of a verification block: n drafts make n + 1 rows, since the root is one.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float64

from acceptmoe_jax.speculation.tree import DraftTree


def keep_best(tree: DraftTree, nodes: int) -> DraftTree:
    """Returns the tree of the root and the `nodes - 1` best other nodes, in their old order.

    The kept nodes are closed under ancestors. In a tree that `grow` made a parent stands before
    its children and scores no lower, `lax.top_k` keeps the lower place where scores tie, and
    invalid nodes, from which no valid one descends, rank last. They fill up what is missing.

    Args:
      tree: the tree, of T nodes.
      nodes: rows of the block to verify, the root counted; static. T keeps the tree as it is.

    Raises:
      ValueError: if `nodes` is below 1 or above T.
    """
    available = tree.parent.shape[0]
    if not 1 <= nodes <= available:
        raise ValueError(f"nodes must lie between 1 and the tree's {available}, not {nodes}")
    score = jnp.where(tree.valid, tree.score, -jnp.inf)
    best = 1 + jax.lax.top_k(score[1:], nodes - 1)[1]
    kept = jnp.concatenate([jnp.zeros(1, best.dtype), jnp.sort(best)])
    cut = jax.tree.map(lambda leaf: jnp.take(leaf, kept, axis=0), tree)
    # A parent's new number is its rank among the kept; -1 for the root's.
    parent = jnp.sum(kept <= cut.parent[:, None], axis=1, dtype=jnp.int32) - 1
    return cut.replace(parent=parent)


@dataclasses.dataclass(frozen=True)
class CostTable:
    """The measured price of each verification length that a step is compiled for: C of the paper.

    Attributes:
      lengths: rows of the block, the root counted (n + 1 for n drafts); ascending, distinct.
      seconds: mean time of one whole iteration with a block of that length.

    Raises:
      ValueError: naming the field, when a value is out of its range.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self):
        if not self.lengths or self.lengths[0] < 1:
            raise ValueError(f"lengths must be one or more, each at least 1, not {self.lengths}")
        if any(longer <= length for length, longer in zip(self.lengths, self.lengths[1:])):
            raise ValueError(f"lengths must be ascending and distinct, not {self.lengths}")
        if len(self.seconds) != len(self.lengths):
            raise ValueError(
                f"seconds must be one for each of {len(self.lengths)} lengths, "
                f"not {len(self.seconds)}"
            )
        if not all(math.isfinite(value) and value > 0 for value in self.seconds):
            raise ValueError(f"seconds must be finite and above 0, not {self.seconds}")


def expected_tokens(
    score: Float[np.ndarray, "T"], valid: Bool[np.ndarray, "T"], root_bonus: bool = True
) -> Float64[np.ndarray, "T"]:
    """Returns the tokens that a verification is expected to emit: entry r for r + 1 rows.

    That is the sum of the r best drafts' path probabilities, and 1 for the token that the root's
    own row always gives.

    Args:
      score: log-probability of each node's path (`DraftTree.score`), the root first.
      valid: nodes that can be accepted (`DraftTree.valid`).
      root_bonus: count that 1. The paper's formula leaves open whether it does.
    """
    drafts = np.where(valid, np.exp(np.asarray(score, np.float64)), 0.0)[1:]
    best_first = np.sort(drafts)[::-1]
    return float(root_bonus) + np.concatenate([[0.0], np.cumsum(best_first)])


def choose_length(
    score: Float[np.ndarray, "T"],
    valid: Bool[np.ndarray, "T"],
    costs: CostTable,
    root_bonus: bool = True,
) -> int:
    """Returns the length of most expected tokens a second; the shorter one where two tie.

    Args:
      score, valid, root_bonus: as for `expected_tokens`.
      costs: the lengths to choose from; those above T are left out.

    Raises:
      ValueError: if every length is above T.
    """
    expected = expected_tokens(score, valid, root_bonus)
    fitting = [length for length in costs.lengths if length <= len(expected)]
    if not fitting:
        raise ValueError(f"no length of {costs.lengths} fits a tree of {len(expected)} nodes")
    rates = expected[np.array(fitting) - 1] / np.array(costs.seconds[: len(fitting)])
    return fitting[int(np.argmax(rates))]
