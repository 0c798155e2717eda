"""The four families of tasks, each an endless seeded stream for training and one for the test.

The splits are disjoint by construction: whether a task belongs to the test split follows from its
prompt alone (the numbers in it, or the function it describes), never from the seed.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Literal

from acceptmoe_jax.pocket import functions, mathematics, word_problems
from acceptmoe_jax.pocket.records import Record

_DRAW = {
    word_problems.NAME: word_problems.draw,
    mathematics.NAME: mathematics.draw,
    functions.FROM_DOCSTRING: functions.draw_from_docstring,
    functions.FROM_TEXT: functions.draw_from_text,
}
FAMILIES = tuple(_DRAW)

Split = Literal["train", "test"]


def stream(family: str, split: Split, seed: int) -> Iterator[Record]:
    """Endless records of one family and split, a function of the arguments on every machine.

    Prompts of the test split never repeat; those of the training split rarely do.

    Raises:
      ValueError: for an unknown family or split.
    """
    if family not in _DRAW or split not in ("train", "test"):
        raise ValueError(f"no family {family!r} with a split {split!r}")
    rng = random.Random(f"{family}/{split}/{seed}")
    seen = set()
    while True:
        drawn = _DRAW[family](rng)
        if drawn.in_test != (split == "test") or drawn.record.prompt in seen:
            continue
        if split == "test":
            seen.add(drawn.record.prompt)
        yield drawn.record


def generate(family: str, split: Split, seed: int, count: int) -> list[Record]:
    """The first `count` records of `stream`."""
    return list(itertools.islice(stream(family, split, seed), count))
