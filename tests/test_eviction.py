"""Eviction policies against an oracle of time stamps, and Belady's bound against brute force."""

import itertools

import numpy as np
import pytest

from acceptmoe_jax.offload import EVICTION_POLICIES, ResidencyTable, belady_misses, replay
from tests.residency_traces import random_trace

A, B, C, D, E = range(5)
# Belady's own example: a larger FIFO misses more.
ANOMALY = [{e} for e in (A, B, C, D, A, B, E, A, B, C, D, E)]

every_policy = pytest.mark.parametrize("policy", EVICTION_POLICIES)
# The smallest of an oracle's (loaded, last used, uses) leaves.
LEAVES_FIRST = {
    "lru": lambda loaded, last, uses: last,
    "fifo": lambda loaded, last, uses: loaded,
    "lfu": lambda loaded, last, uses: (uses, last),
}


def oracle_waves(held, used, slots):
    """The waves of a verification, as lists."""
    waves = [[e for e in used if e in held]]
    for expert in sorted(set(used) - set(held)):
        if len(waves[-1]) == slots:
            waves.append([])
        waves[-1].append(expert)
    return [sorted(wave) for wave in waves]


class Oracle:
    """Holds a list of (expert, loaded, last used, uses) and looks for the smallest each time."""

    def __init__(self, slots, policy):
        self.slots, self.key = slots, LEAVES_FIRST[policy]
        self.records, self.clock, self.misses = [], 0, 0

    def verify(self, used):
        for wave in oracle_waves(self.held(), used, self.slots):
            for expert in wave:
                self.use(expert, wave)

    def use(self, expert, wave):
        self.clock += 1
        record = next((r for r in self.records if r[0] == expert), None)
        if record:
            self.records.remove(record)
            self.records.append((expert, record[1], self.clock, record[3] + 1))
            return
        self.misses += 1
        if len(self.records) == self.slots:
            others = [r for r in self.records if r[0] not in wave]
            self.records.remove(min(others, key=lambda r: self.key(*r[1:])))
        self.records.append((expert, self.clock, self.clock, 1))

    def held(self):
        return {r[0] for r in self.records}


def held_after(policy, slots, *experts):
    """Who is resident after verifications of one expert each."""
    table = ResidencyTable(num_experts=7, num_slots=slots, policy=EVICTION_POLICIES[policy])
    for expert in experts:
        verify(table, [expert])
    return set(np.flatnonzero(table.resident))


def verify(table, used):
    for wave in table.plan(used):
        table.begin(wave)
        table.finish_loads(wave)
        table.end(wave)


@every_policy
@pytest.mark.parametrize(("experts", "slots", "most"), [(11, 4, 4), (13, 5, 12), (23, 16, 9)])
def test_a_policy_holds_exactly_what_an_oracle_holds(policy, experts, slots, most):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        table = ResidencyTable(experts, slots, EVICTION_POLICIES[policy])
        oracle = Oracle(slots, policy)
        for used in random_trace(rng, experts, 60, most):
            verify(table, used)
            oracle.verify(used)
            assert set(np.flatnonzero(table.resident)) == oracle.held()
        assert table.counts.misses == oracle.misses


def test_a_hit_counts_for_lru_and_not_for_fifo():
    assert held_after("lru", 3, A, B, C, A, D) == {A, C, D}
    assert held_after("fifo", 3, A, B, C, A, D) == {B, C, D}


def test_lfu_evicts_the_least_used_and_among_equals_the_least_recently_used():
    assert held_after("lfu", 3, A, B, B, C, C, D) == {B, C, D}
    assert held_after("lfu", 3, B, A, A, C, C, B, D) == {C, B, D}


def test_lfu_forgets_the_uses_of_an_expert_that_left():
    # A leaves with 2 uses. Back again it has 1, so D takes its slot and not that of C, with 3.
    assert held_after("lfu", 2, A, A, B, B, B, C, C, C, A, D) == {C, D}


@pytest.mark.parametrize(
    ("slots", "misses"),
    [(3, {"fifo": 9, "lru": 10, "belady": 7}), (4, {"fifo": 10, "lru": 8, "belady": 6})],
)
def test_beladys_example_has_its_published_misses(slots, misses):
    assert belady_misses(ANOMALY, slots) == misses["belady"]
    for policy in ("fifo", "lru"):
        assert replay(ANOMALY, 5, slots, EVICTION_POLICIES[policy]).misses == misses[policy]


@pytest.mark.parametrize(("experts", "slots", "most"), [(11, 4, 4), (13, 5, 12), (128, 48, 60)])
def test_beladys_bound_is_below_every_policy(experts, slots, most):
    for seed in range(12):
        trace = random_trace(np.random.default_rng(seed), experts, 60, most)
        bound = belady_misses(trace, slots)
        assert len(set().union(*trace)) <= bound
        for policy in EVICTION_POLICIES.values():
            assert bound <= replay(trace, experts, slots, policy).misses


def fewest_misses(trace, slots, outcomes):
    """The misses of the best choice of outcomes, found by trying them all."""
    best = {frozenset(): 0}
    for used in trace:
        after = {}
        for held, misses in best.items():
            misses += len(set(used) - held)
            for outcome in outcomes(held, used, slots):
                after[outcome] = min(misses, after.get(outcome, misses))
        best = after
    return min(best.values())


def table_outcomes(held, used, slots):
    """What may be held after a verification, whomever each wave evicts."""
    held_now = {held}
    for wave in oracle_waves(held, used, slots):
        after = set()
        for before in held_now:
            stay = min(slots - len(wave), len(before - set(wave)))
            for others in itertools.combinations(before - set(wave), stay):
                after.add(frozenset(wave).union(others))
        held_now = after
    return held_now


def stated_outcomes(held, used, slots):
    """What the bound's docstring lets a verification leave behind."""
    if len(used) > slots:
        return map(frozenset, itertools.combinations(used, slots))
    return table_outcomes(held, used, slots)


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 2), (3, 2), (3, 3)])
def test_beladys_bound_is_the_best_that_any_eviction_reaches(slots, most):
    gained = 0
    for seed in range(60):
        trace = random_trace(np.random.default_rng(seed), 6, 9, most)
        bound = belady_misses(trace, slots)
        assert bound == fewest_misses(trace, slots, table_outcomes)
        gained += replay(trace, 6, slots).misses > bound
    assert gained or slots == 1  # a single slot leaves no choice


@pytest.mark.parametrize(("slots", "most"), [(1, 4), (2, 5), (3, 6)])
def test_with_several_waves_beladys_bound_is_the_best_of_what_it_states(slots, most):
    attained = 0
    for seed in range(60):
        trace = random_trace(np.random.default_rng(seed), 6, 8, most)
        bound = belady_misses(trace, slots)
        assert bound == fewest_misses(trace, slots, stated_outcomes)
        best = fewest_misses(trace, slots, table_outcomes)
        assert bound <= best
        attained += bound == best
    assert attained


@pytest.mark.parametrize("slots", [0, -1])
def test_a_bound_without_slots_is_refused(slots):
    with pytest.raises(ValueError, match="at least one slot"):
        belady_misses([{A}], slots)
