"""EVICT on a device: measures what each verification length costs there, as a `CostTable`."""

import dataclasses
import statistics
import time
from collections.abc import Callable

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.speculation import CostTable


@dataclasses.dataclass(frozen=True)
class EvictConfig:
    """Cutting draft trees before they are verified (EVICT, arXiv 2605.00342).

    Attributes:
      lengths: rows of a block that programs are compiled for, ascending, the root counted; the
        tree's own size joins them, and longer ones are left out.
      root_bonus: the token that the root always gives counts as expected.
      repeats: rounds timed for each length.

    Raises:
      UserError: naming the field.
    """

    lengths: tuple[int, ...] = (8, 16, 32)
    root_bonus: bool = True
    repeats: int = 5

    def __post_init__(self):
        if any(length < 2 for length in self.lengths) or self.lengths != tuple(
            sorted(set(self.lengths))
        ):
            raise UserError(
                f"evict lengths must be ascending, distinct and at least 2, not {self.lengths}"
            )
        if self.repeats < 1:
            raise UserError(f"evict repeats must be at least 1, not {self.repeats}")

    def lengths_of(self, nodes: int) -> tuple[int, ...]:
        """The lengths for trees of so many nodes."""
        return (*(length for length in self.lengths if length < nodes), nodes)


def profile(
    run_round: Callable[[int], None],
    nodes: int,
    config: EvictConfig,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Times whole rounds of each length; the median of the repeats, since devices are shared.

    Args:
      run_round: runs one round that verifies so many rows, until its tokens are on the host.
      nodes: of the trees, T.
      config: lengths and repeats.
      clock: seconds.
    """
    lengths = config.lengths_of(nodes)
    for length in lengths:
        run_round(length)  # compiles
    taken = {length: [] for length in lengths}
    for _ in range(config.repeats):
        # Each length in turn, so that a busy moment strikes all of them.
        for length in lengths:
            begin = clock()
            run_round(length)
            taken[length].append(clock() - begin)
    return CostTable(lengths, tuple(statistics.median(taken[length]) for length in lengths))
