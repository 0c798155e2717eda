"""Calibration of path commitment: recorded nodes to a monotone map for every depth.

Offline and in float64 NumPy; `path_commitment` evaluates the result inside a step.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from acceptmoe_jax.selection.path_commitment import PathCommitment

RATE_FLOOR = 1e-3
# A bin of fewer nodes says little about a rate of a few per cent.
NODES_A_BIN = 64


@dataclasses.dataclass(frozen=True)
class PathTable:
    """The knots of each depth as a commitment table keeps them; rows may differ in length.

    Attributes:
      knots: path log-probabilities (nats) of each depth, the root first, strictly ascending.
      rates: rate of commitment at each knot, in (0, 1], never falling; the root's are all 1.

    Raises:
      ValueError: naming what is wrong, if they are not that.
    """

    knots: tuple[tuple[float, ...], ...]
    rates: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        if [len(row) for row in self.knots] != [len(row) for row in self.rates]:
            raise ValueError("path: knots and rates must have the same shape")
        if not self.knots or not all(self.knots):
            raise ValueError("path: every depth needs at least one knot")
        for knots, rates in zip(self.knots, self.rates):
            if not np.isfinite(knots).all() or (np.diff(knots) <= 0).any():
                raise ValueError("path: the knots of a depth must be finite and ascend")
            if not all(0 < rate <= 1 for rate in rates) or (np.diff(rates) < 0).any():
                raise ValueError("path: the rates of a depth must lie in (0, 1] and never fall")
        if set(self.rates[0]) != {1.0}:
            raise ValueError("path: the root is always committed, so its rate is 1")

    def arrays(self) -> PathCommitment:
        """As `node_commitment` takes them, float32 `[P, M]`."""
        most = max(map(len, self.knots))

        def padded(rows):
            full = [[*row, *[row[-1]] * (most - len(row))] for row in rows]
            return jnp.array(full, jnp.float32)

        return PathCommitment(padded(self.knots), padded(self.rates))


def fit_path_commitment(
    depth: Int[np.ndarray, "N"],
    score: Float[np.ndarray, "N"],
    committed: Bool[np.ndarray, "N"],
    *,
    depths: int | None = None,
    most_knots: int = 16,
    nodes_a_bin: int = NODES_A_BIN,
) -> PathTable:
    """Fits the rate of commitment to the score, depth by depth, by isotonic regression.

    The nodes of a depth are sorted by score and cut into bins; the rates of the bins are pooled
    until they never fall, and each stands at its bin's mean score. Bins hold equal shares of
    nodes and of the drafter's probability, counted half and half: most nodes have a low score,
    but most that are committed lie among the few of a high one. A depth with fewer nodes than
    fill two bins has its average rate throughout.

    Args:
      depth, score, committed: of all valid nodes of all recorded verifications: place in the
        tree, path log-probability in nats, and whether the accepted path held it.
      depths: rows of the table, as many as its `phat` has; by default up to the deepest node.
      most_knots: bins at one depth, at most.
      nodes_a_bin: a depth gets one bin for every so many nodes.

    Raises:
      ValueError: if the arrays disagree in shape, a score is not finite, or a depth lies outside
        the table.
    """
    depth, committed = np.asarray(depth), np.asarray(committed, bool)
    score = np.asarray(score, np.float64)
    if not depth.shape == score.shape == committed.shape or depth.ndim != 1:
        raise ValueError(
            "depth, score and committed must be [N] alike, got "
            f"{depth.shape}, {score.shape} and {committed.shape}"
        )
    if not np.isfinite(score).all():
        raise ValueError("score must be finite; leave padded rows out")
    deepest = int(depth.max(initial=0))
    depths = deepest + 1 if depths is None else depths
    if deepest >= depths or depth.min(initial=0) < 0:
        raise ValueError(f"depth must lie between 0 and {depths - 1}, got up to {deepest}")
    rows = [((0.0,), (1.0,))]
    for at in range(1, depths):
        here = depth == at
        bins = min(most_knots, int(here.sum()) // nodes_a_bin)
        rows.append(_fit(score[here], committed[here].astype(np.float64), max(bins, 1)))
    knots, rates = zip(*rows)
    return PathTable(knots, rates)


def _fit(score, committed, bins):
    """Knots and rates of one depth."""
    if not len(score):
        return (0.0,), (RATE_FLOOR,)
    order = np.argsort(score, kind="stable")
    score, committed = score[order], committed[order]
    probability = np.exp(score - score[-1])
    ahead = np.cumsum(1 / len(score) + probability / probability.sum())
    bin_of = np.minimum((bins * ahead / ahead[-1]).astype(int), bins - 1)
    # Nodes of one score belong together, wherever a cut would fall.
    bin_of = bin_of[np.searchsorted(score, score)]
    _, bin_of, count = np.unique(bin_of, return_inverse=True, return_counts=True)
    knots = np.bincount(bin_of, score) / count
    rates = isotonic(np.bincount(bin_of, committed) / count, count)
    return tuple(knots.tolist()), tuple(np.clip(rates, RATE_FLOOR, 1.0).tolist())


def isotonic(
    values: Float[np.ndarray, "N"], weights: Float[np.ndarray, "N"]
) -> Float[np.ndarray, "N"]:
    """The non-decreasing sequence that is closest in weighted squares: pool adjacent violators."""
    means, sizes, lengths = [], [], []
    for value, weight in zip(values, weights):
        mean, size, length = float(value), float(weight), 1
        while means and means[-1] > mean:
            before, other = sizes.pop(), means.pop()
            mean = (other * before + mean * size) / (before + size)
            size, length = before + size, length + lengths.pop()
        means.append(mean)
        sizes.append(size)
        lengths.append(length)
    return np.repeat(means, lengths)
