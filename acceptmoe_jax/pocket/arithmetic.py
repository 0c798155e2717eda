"""The arithmetic facts that the task families are allowed to use, and how a step is written.

A model of ten million parameters learns facts, not algorithms, so the families keep to a few
thousand of them and write every step out; `drills` covers exactly the same set.
"""

import functools
import random

LARGEST_SUM = 100
LARGEST_FACTOR = 12
LARGEST_DOUBLED = 50

Fact = tuple[int, str, int]


@functools.cache
def facts(operator: str) -> tuple[Fact, ...]:
    """All facts of one operator as (left, operator, right).

    `+` and `-` stay within 100, `*` within the table of twelve and doubles up to 2 * 50, and `/`
    undoes `*`.
    """
    sums = [(a, b) for a in range(1, LARGEST_SUM) for b in range(1, LARGEST_SUM - a + 1)]
    factors = range(2, LARGEST_FACTOR + 1)
    products = [(a, b) for a in factors for b in factors]
    products += [(2, b) for b in range(LARGEST_FACTOR + 1, LARGEST_DOUBLED + 1)]
    pairs = {
        "+": sums,
        "-": [(a + b, b) for a, b in sums],
        "*": products,
        "/": [(a * b, a) for a, b in products],
    }[operator]
    return tuple((a, operator, b) for a, b in pairs)


def value(left: int, operator: str, right: int) -> int:
    """The result of a step; `/` is exact by the choice of the facts."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    quotient, remainder = divmod(left, right)
    if operator != "/" or remainder:
        raise ValueError(f"{left} {operator} {right} is not a fact")
    return quotient


def step(left: int, operator: str, right: int) -> str:
    """A step written out, such as `12 + 5 = 17`."""
    return f"{left} {operator} {right} = {value(left, operator, right)}"


@functools.cache
def _factor_pairs(largest: int) -> tuple[tuple[int, int], ...]:
    factors = range(2, LARGEST_FACTOR + 1)
    return tuple((a, b) for a in factors for b in factors if a * b <= largest)


def factor_pair(rng: random.Random, largest: int = LARGEST_FACTOR**2) -> tuple[int, int]:
    """Two factors from 2 to 12 whose product is at most `largest`."""
    return rng.choice(_factor_pairs(largest))


def addends(rng: random.Random, largest: int = LARGEST_SUM, smallest: int = 2) -> tuple[int, int]:
    """Two numbers of at least `smallest` whose sum is at most `largest`."""
    total = rng.randint(2 * smallest, largest)
    left = rng.randint(smallest, total - smallest)
    return left, total - left
