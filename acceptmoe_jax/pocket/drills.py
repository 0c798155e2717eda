"""Arithmetic drills: bare facts in a few styles, trained on the digits of the results only."""

import dataclasses
import random
from collections.abc import Iterator

from acceptmoe_jax.pocket import arithmetic

# Sums and differences are many and need carries; the tables are short.
_OPERATORS = ("+", "-", "*", "/")
_WEIGHTS = (0.36, 0.34, 0.18, 0.12)
_SEPARATORS = (",", "\n", ".", ";")
MOST_FACTS = 3  # short drills of different lengths also fill the gaps of packed rows


@dataclasses.dataclass(frozen=True)
class Drill:
    """A drill as consecutive pieces of text; `graded[i]` says that piece i is a result."""

    pieces: tuple[str, ...]
    graded: tuple[bool, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def draw(rng: random.Random) -> Drill:
    """Draws one drill of one to three facts, such as ` 12 + 5 = 17, 9 * 4 = 36,`."""
    separator = rng.choice(_SEPARATORS)
    pieces, graded = [], []
    for operator in rng.choices(_OPERATORS, _WEIGHTS, k=rng.randint(1, MOST_FACTS)):
        left, _, right = rng.choice(arithmetic.facts(operator))
        result = arithmetic.value(left, operator, right)
        pieces += [f" {left} {operator} {right} =", f" {result}", separator]
        graded += [False, True, False]
    return Drill(tuple(pieces), tuple(graded))


def stream(seed: int) -> Iterator[Drill]:
    """Endless drills, a function of the seed."""
    rng = random.Random(f"drills/{seed}")
    while True:
        yield draw(rng)
