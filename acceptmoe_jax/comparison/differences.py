"""How far two models' numbers for the same rows are apart. NumPy, on the host."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class LogitDifference:
    """Absolute differences of logits, over the whole vocabulary.

    Attributes:
      by_position: the greatest at each position.
      mean: over positions and vocabulary.
      same_top: positions whose argmax is the same.
    """

    by_position: Float[np.ndarray, "T"]
    mean: float
    same_top: Bool[np.ndarray, "T"]


def compare_logits(
    ours: Float[np.ndarray, "T V"], theirs: Float[np.ndarray, "T V"]
) -> LogitDifference:
    """See `LogitDifference`."""
    apart = np.abs(np.subtract(ours, theirs, dtype=np.float64))
    same_top = np.argmax(ours, axis=-1) == np.argmax(theirs, axis=-1)
    return LogitDifference(apart.max(axis=-1), float(apart.mean()), same_top)


def same_experts(
    ours: Int[np.ndarray, "T k"], theirs: Int[np.ndarray, "T k"]
) -> Bool[np.ndarray, "T"]:
    """Whether a row went to the same experts, in whatever order."""
    return (np.sort(ours, axis=-1) == np.sort(theirs, axis=-1)).all(axis=-1)


def best_experts(
    logits: Float[np.ndarray, "T E"], top_k: int, eligible: Bool[np.ndarray, "E"] | None = None
) -> Int[np.ndarray, "T k"]:
    """Each row's top-k inside the eligible set, best first; ties go to the lower expert."""
    if eligible is not None:
        logits = np.where(eligible, logits, -np.inf)
    return np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]


def first_divergence(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two token sequences differ; None if one begins with the other."""
    pairs = zip(ours, theirs)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), None)


def top2_margin(logits: Float[np.ndarray, "V"]) -> float:
    """How far the best token is ahead of the second."""
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)
