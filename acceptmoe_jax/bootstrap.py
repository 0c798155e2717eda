"""Confidence intervals by the bootstrap: requests are drawn again, with replacement.

Not verifications or tokens: those of one request resemble each other. (Efron & Tibshirani 1993,
chapters 8 and 13.)
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

Statistic = Callable[[Float[np.ndarray, "*drawings K"]], Float[np.ndarray, "*drawings"]]


def ratio(sums: Float[np.ndarray, "*drawings 2"]) -> Float[np.ndarray, "*drawings"]:
    """The first sum over the second; NaN where that is 0."""
    return _divided(sums[..., 0], sums[..., 1])


def ratio_of_ratios(sums: Float[np.ndarray, "*drawings 4"]) -> Float[np.ndarray, "*drawings"]:
    """The ratio of the first two sums over that of the others; NaN where one has none."""
    return _divided(ratio(sums[..., :2]), ratio(sums[..., 2:]))


def mean_statistic(
    strata: Sequence[Float[np.ndarray, "N K"]], statistic: Statistic = ratio
) -> float | None:
    """The mean over strata of a statistic of each one's sums; None where one has no value."""
    value = float(np.mean([statistic(numbers.sum(axis=0)) for numbers in strata]))
    return value if np.isfinite(value) else None


def interval(
    strata: Sequence[Float[np.ndarray, "N K"]],
    statistic: Statistic = ratio,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """A percentile interval of `mean_statistic`.

    Numbers of one request stay together, so what two methods made of it is compared in pairs.

    Args:
      strata: K numbers of each of N requests, for every stratum, such as a model and task;
        requests are drawn again within their stratum.
      statistic: of a stratum's sums over its requests.
      level: of the interval.
      resamples: so many drawings.
      seed: of them.

    Returns:
      Its ends; None where no drawing has a value.

    Raises:
      ValueError: if there is no stratum, or one without requests.
    """
    if not strata or not all(len(numbers) for numbers in strata):
        raise ValueError("there must be a stratum, and a request in each")
    rng = np.random.default_rng(seed)
    total = np.zeros(resamples)
    for numbers in strata:
        drawn = rng.integers(0, len(numbers), (resamples, len(numbers)))
        # One column at a time: a table of all drawings and columns would be K times as large.
        sums = [column[drawn].sum(axis=1) for column in np.asarray(numbers, np.float64).T]
        total += statistic(np.stack(sums, axis=-1))
    values = total[np.isfinite(total)] / len(strata)
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _divided(parts: np.ndarray, wholes: np.ndarray) -> np.ndarray:
    wholes = np.where(wholes == 0, np.nan, wholes)
    return parts / wholes
