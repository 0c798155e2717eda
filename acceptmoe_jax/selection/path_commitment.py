"""Path commitment: how likely a node is to be committed, judged by its own path through the draft.

The paper gives every node of a depth one weight. The drafter knows more: a node's path
log-probability says which of them the accepted path probably runs through. A calibrated map from
it, per depth, to the observed rate of commitment is what `select` weighs nodes by where
`SelectorConfig.path` is set. An idea of this project, not of arXiv 2608.02989.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class PathCommitment:
    """The map of each depth, piecewise linear and constant beyond its first and last knot.

    Attributes:
      knots: path log-probabilities (nats), ascending along a row. A row with fewer than M knots
        repeats its last.
      rates: observed rate of commitment at each knot, in (0, 1], never falling along a row.
    """

    knots: Float[Array, "P M"]
    rates: Float[Array, "P M"]


@struct.dataclass
class Commitment:
    """The calibrated probabilities as a compiled step takes them.

    Attributes:
      phat: commitment probability by depth, the root's 1 first.
      path: by depth and path score; None where it was not calibrated.
    """

    phat: Float[Array, "P"]
    path: PathCommitment | None = None


def node_commitment(
    commitment: Commitment, depth: Int[Array, "T"], score: Float[Array, "T"]
) -> Float[Array, "T"]:
    """The probability of each node to end on the accepted path: `path_phat` of `select`.

    The root's is 1; a depth beyond the table takes its last row. A padded row's value means
    nothing.

    Args:
      commitment: with a path calibration.
      depth: of each node, 0 for the root.
      score: path log-probability of each node, as `DraftTree.score`; nats.

    Raises:
      ValueError: if there is no path calibration.
    """
    if commitment.path is None:
        raise ValueError("commitment.path is None: this table holds no path calibration")
    row = jnp.clip(depth, 0, commitment.path.knots.shape[0] - 1)
    knots, rates = commitment.path.knots[row], commitment.path.rates[row]
    # A sum over the segments, each filled as far as the score reaches: jnp.interp would search
    # in a loop, which a GPU pays for by the iteration.
    width = jnp.diff(knots)
    filled = (score[:, None] - knots[:, :-1]) / jnp.where(width > 0, width, 1.0)
    risen = (jnp.diff(rates) * jnp.clip(filled, 0.0, 1.0)).sum(axis=1)
    return jnp.where(depth == 0, 1.0, rates[:, 0] + risen)
