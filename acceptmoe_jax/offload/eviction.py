"""Who leaves when a slot is needed: policies behind one small interface, and Belady's bound.

A policy orders the experts that a table holds. It does not know about slots, waves or pins: the
table takes its victims from the front of the order and passes over what the wave needs.
"""

import abc
import heapq
import math
from collections.abc import Collection, Sequence


class EvictionPolicy(abc.ABC):
    """The order in which the experts held by one table leave it.

    The table calls `use` for every expert of a wave, in ascending id, whether it was held already
    or is about to be loaded, and `forget` for every expert that goes.
    """

    def __init__(self):
        self._uses: dict[int, int] = {}  # uses since the load; the order of the keys is the policy

    @abc.abstractmethod
    def use(self, expert: int) -> None:
        """A wave uses the expert, which is held from now on."""

    def forget(self, expert: int) -> None:
        """The expert is no longer held.

        Raises:
          KeyError: if it was not.
        """
        del self._uses[expert]

    def order(self) -> list[int]:
        """The experts held, the first to leave first."""
        return list(self._uses)


class Lru(EvictionPolicy):
    """The least recently used leaves first."""

    def use(self, expert: int) -> None:
        self._uses[expert] = self._uses.pop(expert, 0) + 1


class Fifo(EvictionPolicy):
    """The first loaded leaves first, however often it was used since."""

    def use(self, expert: int) -> None:
        self._uses[expert] = self._uses.get(expert, 0) + 1


class Lfu(Lru):
    """The least often used since its load leaves first; among equals the least recently used.

    Uses are counted by wave and forgotten when the expert leaves.
    """

    def order(self) -> list[int]:
        return sorted(self._uses, key=self._uses.__getitem__)  # stable: ties stay in LRU's order


EVICTION_POLICIES = {"lru": Lru, "fifo": Fifo, "lfu": Lfu}


def belady_misses(trace: Sequence[Collection[int]], num_slots: int) -> int:
    """The fewest misses that any policy could have on a trace, for reports (Belady 1966).

    With the future known, the expert whose next use is furthest away leaves. Waves as the table
    composes them: hits run before any of them can leave, so a verification misses what was not
    resident at its start. If its experts fit, they are all resident after it, with whatever else
    stayed. If they do not, its first wave fills every slot, and only experts of this verification
    are resident after it. The table keeps the whole last wave among them; here any of them may
    stay, so on such traces the number is a lower bound that no policy need reach. Where all
    verifications fit it is attained.

    Args:
      trace: the distinct experts of each verification of one layer, from an empty table.
      num_slots: C.

    Raises:
      ValueError: if there is no slot.
    """
    if num_slots < 1:
        raise ValueError(f"a table needs at least one slot, not {num_slots}")
    misses = 0
    next_use_of: dict[int, float] = {}  # of each expert held
    for next_uses in _next_uses(trace):
        misses += sum(expert not in next_use_of for expert in next_uses)
        if len(next_uses) > num_slots:
            next_use_of = _soonest(next_uses, num_slots)
        else:
            others = {e: at for e, at in next_use_of.items() if e not in next_uses}
            next_use_of = next_uses | _soonest(others, num_slots - len(next_uses))
    return misses


def _next_uses(trace: Sequence[Collection[int]]) -> list[dict[int, float]]:
    """For each verification, its experts and the index of the next one that uses them."""
    following: dict[int, float] = {}
    by_step = []
    for step in reversed(range(len(trace))):
        by_step.append({expert: following.get(expert, math.inf) for expert in trace[step]})
        following.update(dict.fromkeys(trace[step], step))
    return by_step[::-1]


def _soonest(next_use_of: dict[int, float], count: int) -> dict[int, float]:
    """The `count` experts that are used again first."""
    return {e: next_use_of[e] for e in heapq.nsmallest(count, next_use_of, next_use_of.get)}
