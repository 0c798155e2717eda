"""How sure a measured share is."""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

_Z = 1.959963984540054  # the normal distribution's 97.5 % point


class Share(NamedTuple):
    """A share with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def share(right: Sequence[bool], problems: Sequence[Hashable]) -> Share:
    """The share of right answers, with Wilson's interval.

    Answers to one problem are no independent samples: the interval is that of as many independent
    ones as have the same variance (errors clustered by problem), and of at most one a problem
    where all are alike.

    Args:
      right: whether each answer is right; not empty.
      problems: the problem of each answer.
    """
    count = len(right)
    value = sum(right) / count
    sums = {}
    for correct, problem in zip(right, problems, strict=True):
        sums[problem] = sums.get(problem, 0) + correct - value
    clustered = sum(each * each for each in sums.values()) / count**2
    samples = value * (1 - value) / clustered if clustered else len(sums)
    samples = min(samples, count)
    middle = (value + _Z**2 / (2 * samples)) / (1 + _Z**2 / samples)
    spread = _Z / (1 + _Z**2 / samples)
    spread *= math.sqrt(value * (1 - value) / samples + _Z**2 / (4 * samples**2))
    return Share(value, max(middle - spread, 0.0), min(middle + spread, 1.0))
