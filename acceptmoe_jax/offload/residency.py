"""Which expert is in which slot: the residency table of one layer, bookkeeping without weights.

A slot is free, loading or resident. It changes in waves of at most C experts, one at a time:

    for wave in table.plan(used):
        slots = table.begin(wave)    # victims leave, wave.loads own `slots` and are loading
        ...                          # move the weights of wave.loads into `slots`
        table.finish_loads(wave)     # they are resident
        ...                          # compute wave.experts, addressed by table.slot_of
        table.end(wave)              # nothing is pinned any more

From `begin` to `end` every expert of the wave is pinned. `abort` instead of `end` gives the
wave's loads back. All waves are planned at once, so later loads can be staged early.

Not thread-safe: a layer's verifications run one after the other.
"""

import dataclasses
import enum
import itertools
import operator
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Bool, Int32

from acceptmoe_jax.offload.eviction import EvictionPolicy, Lru


class SlotState(enum.Enum):
    FREE = "free"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclasses.dataclass(frozen=True)
class Slot:
    """A slot at one moment.

    Attributes:
      state: what its weights are.
      expert: its owner, None if it is free.
      pinned: whether the wave in progress needs it.
      generation: how often its owner has changed; loading, being given back and `reset` count.
    """

    state: SlotState
    expert: int | None
    pinned: bool
    generation: int


@dataclasses.dataclass(frozen=True)
class Wave:
    """Experts that are on the device and computed together.

    Attributes:
      hits: resident when planned, ascending.
      loads: to be loaded, ascending.
    """

    hits: tuple[int, ...]
    loads: tuple[int, ...]

    @property
    def experts(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(sorted(self.hits + self.loads))


@dataclasses.dataclass(frozen=True)
class Counts:
    """What waves did, on the unique experts of each verification.

    Attributes:
      hits, misses: experts of begun waves that were, or were not, resident.
      waves: begun waves.
      loads: experts whose load finished. They equal the misses unless a load failed.
    """

    hits: int = 0
    misses: int = 0
    waves: int = 0
    loads: int = 0

    @property
    def hit_rate(self) -> float | None:
        """`hits / (hits + misses)`; None if nothing was used."""
        used = self.hits + self.misses
        return self.hits / used if used else None

    def __add__(self, other: "Counts") -> "Counts":
        """Both together, such as two layers."""
        return Counts(*map(operator.add, self._totals(), other._totals()))

    def __sub__(self, earlier: "Counts") -> "Counts":
        """What happened since an earlier reading of the same table."""
        return Counts(*map(operator.sub, self._totals(), earlier._totals()))

    def _totals(self) -> tuple[int, ...]:
        return self.hits, self.misses, self.waves, self.loads


class ResidencyTable:
    """Expert -> slot and slot -> expert of one layer, and who leaves for whom.

    Args:
      num_experts: E.
      num_slots: C.
      policy: makes the eviction policy; a class of `eviction.EVICTION_POLICIES`.

    Raises:
      ValueError: if there is no slot.
    """

    def __init__(
        self,
        num_experts: int,
        num_slots: int,
        policy: Callable[[], EvictionPolicy] = Lru,
    ):
        if num_slots < 1:
            raise ValueError(f"a table needs at least one slot, not {num_slots}")
        self.num_experts = num_experts
        self.num_slots = num_slots
        self._absent = num_slots
        self._new_policy = policy
        self._owner: list[int | None] = [None] * num_slots  # from `begin` on
        self._generation = [0] * num_slots
        self._hits = self._misses = self._waves = self._loads = 0
        self._forget_all()

    def plan(self, used: Iterable[int]) -> tuple[Wave, ...]:
        """The waves that compute `used` from the residency as it is; changes nothing.

        All hits come in the first wave, with as many misses (ascending) as there are slots left;
        then groups of at most C misses. So a hit is computed before anything of its verification
        can evict it, and there are `ceil(len(used) / C)` waves.

        Args:
          used: distinct experts, in any order.

        Raises:
          ValueError: if an id occurs twice or is not an expert's.
        """
        experts = sorted(map(operator.index, used))
        if not experts:
            return ()
        if len(set(experts)) < len(experts):
            raise ValueError(f"used experts must be distinct: {experts}")
        if experts[0] < 0 or experts[-1] >= self.num_experts:
            raise ValueError(f"used experts must lie in 0 ... {self.num_experts - 1}: {experts}")
        slot_of, absent, size = self._slot_of, self._absent, self.num_slots
        hits = tuple(e for e in experts if slot_of[e] != absent)
        misses = tuple(e for e in experts if slot_of[e] == absent)
        room = size - len(hits)
        rest = range(room, len(misses), size)
        self._planned = Wave(hits, misses[:room])
        return (self._planned, *(Wave((), misses[i : i + size]) for i in rest))

    def begin(self, wave: Wave) -> tuple[int, ...]:
        """Claims slots for the wave's loads, free ones first, and pins all its experts.

        Touches the wave's experts in ascending id. A load owns its slot from here on; the expert
        that it evicted is gone even if the load fails.

        Returns:
          The slot of each of `wave.loads`.

        Raises:
          RuntimeError: if a wave is in progress, or this one does not fit the residency as it is.
        """
        if self._wave is not None:
            raise RuntimeError("a wave is in progress: end or abort it first")
        experts = wave.experts
        if wave is not self._planned and self.plan(experts) != (wave,):
            raise RuntimeError("the wave was planned for another residency: plan again")
        self._planned = None
        slots = self._free_slots(len(wave.loads))
        if len(slots) < len(wave.loads):
            needed = set(experts)
            evictable = (e for e in self._policy.order() if e not in needed)
            for victim in itertools.islice(evictable, len(wave.loads) - len(slots)):
                slots.append(self._slot_of[victim])
                self._slot_of[victim] = self._absent
                self._policy.forget(victim)
        for expert, slot in zip(wave.loads, slots):
            self._own(slot, expert)
        for expert in experts:
            self._policy.use(expert)
        self._wave, self._load_slots, self._loaded = wave, tuple(slots), False
        self._hits += len(wave.hits)
        self._misses += len(wave.loads)
        self._waves += 1
        return self._load_slots

    def finish_loads(self, wave: Wave) -> None:
        """The weights of the wave's loads are in their slots, or will be before they are read.

        Called for every wave, also for one without loads.

        Raises:
          RuntimeError: if this wave is not in progress or its loads have finished.
        """
        self._require_in_progress(wave)
        if self._loaded:
            raise RuntimeError("the loads of this wave have finished already")
        for expert, slot in zip(wave.loads, self._load_slots):
            self._slot_of[expert] = slot
        self._loaded = True
        self._loads += len(wave.loads)

    def end(self, wave: Wave) -> None:
        """The wave is computed, or will be before its slots are written again: unpins it.

        Raises:
          RuntimeError: if this wave is not in progress or its loads have not finished.
        """
        self._require_in_progress(wave)
        if not self._loaded:
            raise RuntimeError("the loads of this wave have not finished")
        self._wave = None

    def abort(self, wave: Wave) -> None:
        """The wave failed: its loads' slots become free, its hits stay, nothing is pinned.

        Also after `finish_loads`: transfers are asynchronous, and a failed one may show only when
        the wave is computed. The wave can begin again. What was evicted for it stays evicted.

        Raises:
          RuntimeError: if this wave is not in progress.
        """
        self._require_in_progress(wave)
        for expert, slot in zip(wave.loads, self._load_slots):
            self._own(slot, None)
            self._slot_of[expert] = self._absent
            self._policy.forget(expert)
        self._wave = None

    def reset(self) -> None:
        """Empties the table, a wave in progress included. Counts and generations go on."""
        for slot, owner in enumerate(self._owner):
            if owner is not None:
                self._own(slot, None)
        self._forget_all()

    @property
    def resident(self) -> Bool[np.ndarray, "E"]:
        """Experts whose weights are on the device; a copy. Selection reads it before `begin`."""
        return self.slot_of != self._absent

    @property
    def slot_of(self) -> Int32[np.ndarray, "E"]:
        """The slot of each resident expert, for an ExpertBank; a copy.

        Absent experts, and loading ones, have C. That is no slot, and no code may use it: a
        gather would clamp it and read another expert's weights.
        """
        return np.array(self._slot_of, np.int32)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Every slot as it is now."""
        pinned = set(self._wave.experts) if self._wave else set()
        return tuple(
            Slot(self._state(slot), owner, owner in pinned, self._generation[slot])
            for slot, owner in enumerate(self._owner)
        )

    @property
    def counts(self) -> Counts:
        """Totals since the table was made; those of a part are a difference of two readings."""
        return Counts(self._hits, self._misses, self._waves, self._loads)

    def check(self) -> None:
        """Asserts what must hold at any time between two calls; for tests."""
        owned = {slot: owner for slot, owner in enumerate(self._owner) if owner is not None}
        by_state = {state: set() for state in SlotState}
        for slot in range(self.num_slots):
            by_state[self._state(slot)].add(slot)
        loading = {owned[slot] for slot in by_state[SlotState.LOADING]}
        due = set(self._wave.loads) if self._wave and not self._loaded else set()
        assert len(self._owner) == len(self._generation) == self.num_slots
        assert len(self._slot_of) == self.num_experts
        assert len(set(owned.values())) == len(owned), "an expert owns two slots"
        for expert, slot in enumerate(self._slot_of):
            assert slot == self._absent or owned.get(slot) == expert, "a slot has two owners"
        assert loading == due, "loading slots are not those of the wave in progress"
        order = self._policy.order()
        assert len(set(order)) == len(order), "the policy holds an expert twice"
        assert set(order) == set(owned.values()), "the policy does not hold what the slots hold"
        if self._wave:
            assert set(self._wave.experts) <= set(owned.values()), "a pinned expert has no slot"
        assert 0 <= self._loads <= self._misses, "more loads than misses"

    def _state(self, slot: int) -> SlotState:
        owner = self._owner[slot]
        if owner is None:
            return SlotState.FREE
        return SlotState.RESIDENT if self._slot_of[owner] == slot else SlotState.LOADING

    def _free_slots(self, most: int) -> list[int]:
        if not most or None not in self._owner:
            return []
        free = [slot for slot, owner in enumerate(self._owner) if owner is None]
        return free[:most]

    def _own(self, slot: int, expert: int | None) -> None:
        self._owner[slot] = expert
        self._generation[slot] += 1

    def _forget_all(self) -> None:
        self._slot_of = [self._absent] * self.num_experts  # a slot from `finish_loads` on
        self._policy = self._new_policy()
        self._wave: Wave | None = None
        self._planned: Wave | None = None  # the first of the last plan, while that holds
        self._load_slots: tuple[int, ...] = ()
        self._loaded = False

    def _require_in_progress(self, wave: Wave) -> None:
        if wave is not self._wave and wave != self._wave:
            raise RuntimeError("this wave is not in progress: begin it first")


def replay(
    trace: Iterable[Iterable[int]],
    num_experts: int,
    num_slots: int,
    policy: Callable[[], EvictionPolicy] = Lru,
) -> Counts:
    """What a recorded trace costs from an empty table, for reports beside `belady_misses`.

    Args:
      trace: the distinct experts of each verification of one layer.
      num_experts: E.
      num_slots: C.
      policy: as the table takes it.
    """
    table = ResidencyTable(num_experts, num_slots, policy)
    for used in trace:
        for wave in table.plan(used):
            table.begin(wave)
            table.finish_loads(wave)
            table.end(wave)
    return table.counts
