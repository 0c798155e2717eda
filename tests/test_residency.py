"""The residency table of a layer: its states under random use, failures and misuse."""

import dataclasses

import numpy as np
import pytest

from acceptmoe_jax.offload import (
    EVICTION_POLICIES,
    Counts,
    ResidencyTable,
    Slot,
    SlotState,
    Wave,
    replay,
)
from tests import source_tree
from tests.residency_traces import random_trace

FREE, LOADING, RESIDENT = SlotState


@dataclasses.dataclass(frozen=True)
class Event:
    """One call of a random run, with the slots before and after it.

    `due` maps each hit of the verification that is not computed yet to its slot and generation
    when the verification was planned.
    """

    call: str
    wave: Wave
    before: tuple[Slot, ...]
    after: tuple[Slot, ...]
    due: dict[int, tuple[int, int]]
    returned: tuple[int, ...] | None


def random_events(seed):
    """Verifications of a random table, some of which fail: yields (table, event) after each call.

    A failed wave is tried again, given up, or everything is reset.
    """
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(5, 24))
    slots = int(rng.integers(1, experts + 1))
    policy = list(EVICTION_POLICIES.values())[seed % 3]
    table = ResidencyTable(experts, slots, policy)

    def called(call, wave):
        before = table.slots
        returned = table.reset() if call == "reset" else getattr(table, call)(wave)
        table.check()
        return table, Event(call, wave, before, table.slots, due, returned)

    for used in random_trace(rng, experts, 40, experts):
        at = {slot.expert: (i, slot.generation) for i, slot in enumerate(table.slots)}
        waves = list(table.plan(used))
        due = {expert: at[expert] for wave in waves for expert in wave.hits}
        while waves:
            wave = waves.pop(0)
            yield called("begin", wave)
            if rng.random() < 0.15:
                yield called("abort", wave)
                waves = [wave, *waves]
                continue
            yield called("finish_loads", wave)
            if rng.random() < 0.15:
                yield called(rng.choice(["abort", "reset"]), wave)
                break
            yield called("end", wave)
            for expert in wave.hits:
                del due[expert]


def owners(slots):
    return [slot.expert for slot in slots]


def table_with(experts, slots, *verifications, policy=EVICTION_POLICIES["lru"]):
    table = ResidencyTable(experts, slots, policy)
    for used in verifications:
        for wave in table.plan(used):
            verify_wave(table, wave)
    return table


def verify_wave(table, wave):
    table.begin(wave)
    table.finish_loads(wave)
    table.end(wave)


def state_of(table):
    """All that can be read of a table, and the policy's order, which cannot."""
    return table.slots, table.slot_of.tolist(), table.counts, table._policy.order()


every_seed = pytest.mark.parametrize("seed", range(12))


@every_seed
def test_no_slot_and_no_expert_is_owned_twice(seed):
    for table, event in random_events(seed):
        owned = [expert for expert in owners(event.after) if expert is not None]
        assert len(set(owned)) == len(owned)
        resident = np.flatnonzero(table.resident)
        assert [event.after[slot].expert for slot in table.slot_of[resident]] == resident.tolist()


@every_seed
def test_exactly_the_experts_of_the_wave_in_progress_are_pinned(seed):
    for _, event in random_events(seed):
        pinned = {slot.expert for slot in event.after if slot.pinned}
        in_progress = event.call in ("begin", "finish_loads")
        assert pinned == (set(event.wave.experts) if in_progress else set())


@every_seed
def test_nothing_that_a_wave_needs_leaves_before_its_end(seed):
    for _, event in random_events(seed):
        if event.call in ("begin", "finish_loads", "end"):
            needed = event.wave.hits if event.call == "begin" else event.wave.experts
            for before, after in zip(event.before, event.after):
                if before.expert in needed:
                    assert (after.expert, after.generation) == (before.expert, before.generation)


@every_seed
def test_a_hit_that_is_not_computed_yet_is_never_evicted(seed):
    for _, event in random_events(seed):
        if event.call != "reset":
            for expert, (slot, generation) in event.due.items():
                now = event.after[slot]
                assert (now.expert, now.generation) == (expert, generation)


@every_seed
def test_the_generation_of_a_slot_changes_exactly_with_its_owner(seed):
    for _, event in random_events(seed):
        for before, after in zip(event.before, event.after):
            changed = before.expert != after.expert
            assert after.generation - before.generation == changed


@every_seed
def test_slots_change_state_as_their_calls_say(seed):
    allowed = {
        "begin": {(FREE, LOADING), (RESIDENT, LOADING)},
        "finish_loads": {(LOADING, RESIDENT)},
        "end": set(),
        "abort": {(LOADING, FREE), (RESIDENT, FREE)},
        "reset": {(RESIDENT, FREE)},
    }
    seen = {call: set() for call in allowed}
    for table, event in random_events(seed):
        moves = {
            (before.state, after.state)
            for before, after in zip(event.before, event.after)
            if before.state != after.state
        }
        assert moves <= allowed[event.call]
        seen[event.call] |= moves
        assert {slot.expert for slot in event.after if slot.state is RESIDENT} == set(
            np.flatnonzero(table.resident)
        )
        if event.call in ("begin", "finish_loads"):
            expected = LOADING if event.call == "begin" else RESIDENT
            states = {slot.expert: slot.state for slot in event.after}
            assert all(states[expert] is expected for expert in event.wave.loads)
    assert seen["begin"] and seen["finish_loads"]


@every_seed
def test_begin_returns_the_slots_of_the_loads_and_evicts_only_when_none_is_free(seed):
    for _, event in random_events(seed):
        if event.call == "begin":
            loads = event.wave.loads
            assert [event.after[slot].expert for slot in event.returned] == list(loads)
            free = owners(event.before).count(None)
            evicted = set(owners(event.before)) - set(owners(event.after)) - {None}
            assert len(evicted) == max(0, len(loads) - free)


@every_seed
def test_a_failed_wave_gives_back_its_loads_and_nothing_else(seed):
    for _, event in random_events(seed):
        if event.call == "abort":
            for before, after in zip(event.before, event.after):
                lost = before.expert in event.wave.loads
                assert after.expert == (None if lost else before.expert)


@every_seed
def test_counts_are_conserved(seed):
    used = loaded = waves = 0
    for table, event in random_events(seed):
        if event.call == "begin":
            waves += 1
            used += len(event.wave.experts)
        if event.call == "finish_loads":
            loaded += len(event.wave.loads)
        counts = table.counts
        assert (counts.hits + counts.misses, counts.loads, counts.waves) == (used, loaded, waves)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_without_failures_every_used_expert_is_one_hit_or_one_load(policy):
    trace = random_trace(np.random.default_rng(1), 19, 50, 12)
    counts = replay(trace, 19, 7, EVICTION_POLICIES[policy])
    assert counts.hits + counts.misses == sum(map(len, trace))
    assert counts.loads == counts.misses
    assert counts.waves == sum(-(-len(used) // 7) for used in trace)
    assert counts.hit_rate == counts.hits / sum(map(len, trace))


def test_counts_add_up_over_layers_and_subtract_over_time():
    table = table_with(6, 3, [0, 1])
    earlier = table.counts
    verify_wave(table, *table.plan([1, 2, 3]))
    assert earlier == Counts(hits=0, misses=2, waves=1, loads=2)
    assert table.counts - earlier == Counts(hits=1, misses=2, waves=1, loads=2)
    assert earlier + (table.counts - earlier) == table.counts
    assert Counts().hit_rate is None


@every_seed
def test_waves_compute_every_used_expert_once_hits_first(seed):
    rng = np.random.default_rng(seed)
    for table, event in random_events(seed):
        if event.call not in ("end", "reset"):
            continue
        (used,) = random_trace(rng, table.num_experts, 1, table.num_experts)
        waves = table.plan(rng.permutation(used))
        resident = set(np.flatnonzero(table.resident))
        misses = [expert for expert in used if expert not in resident]
        assert set(waves[0].hits) == resident & set(used)
        assert [expert for wave in waves for expert in wave.loads] == misses
        assert not any(wave.hits for wave in waves[1:])
        assert all(len(wave.experts) == table.num_slots for wave in waves[:-1])
        assert 0 < len(waves[-1].experts) <= table.num_slots
        assert all(wave.experts == tuple(sorted(wave.experts)) for wave in waves)


def test_four_slots_for_six_experts_run_in_two_waves():
    table = table_with(9, 4, [5, 8])
    assert table.plan([1, 2, 3, 5, 7, 8]) == (Wave((5, 8), (1, 2)), Wave((), (3, 7)))
    first, second = table.plan([1, 2, 3, 5, 7, 8])
    verify_wave(table, first)
    verify_wave(table, second)
    # The least recently used of the first wave, touched in ascending id, are 1 and 2.
    assert set(np.flatnonzero(table.resident)) == {3, 5, 7, 8}


def test_a_table_full_of_hits_loads_from_the_second_wave_on():
    table = table_with(9, 2, [4, 6])
    assert table.plan([0, 4, 6]) == (Wave((4, 6), ()), Wave((), (0,)))


def test_nothing_used_needs_no_wave():
    assert ResidencyTable(9, 4).plan([]) == ()


@every_seed
def test_planning_changes_nothing(seed):
    for table, event in random_events(seed):
        before = state_of(table)
        plans = [table.plan(event.wave.experts) for _ in range(2)]
        assert state_of(table) == before
        assert plans[0] == plans[1]


@every_seed
def test_for_a_given_residency_pruning_never_raises_misses_or_waves(seed):
    rng = np.random.default_rng(seed)
    fewer = 0
    for table, event in random_events(seed):
        if event.call != "end":
            continue
        (used,) = random_trace(rng, table.num_experts, 1, table.num_experts)
        resident = table.resident
        kept = [expert for expert in used if resident[expert] or rng.random() < 0.6]
        whole, pruned = table.plan(used), table.plan(kept)
        misses = [sum(len(wave.loads) for wave in waves) for waves in (whole, pruned)]
        assert misses[1] <= misses[0]
        assert len(pruned) <= len(whole)
        fewer += misses[1] < misses[0]
    assert fewer or table.num_slots == table.num_experts


def test_with_a_slot_an_expert_the_table_becomes_the_identity_and_never_misses_again():
    table = table_with(7, 7, range(7))
    np.testing.assert_array_equal(table.slot_of, np.arange(7))
    assert table.plan([6, 1, 3]) == (Wave((1, 3, 6), ()),)


def test_absent_and_loading_experts_have_a_slot_that_does_not_exist():
    table = table_with(5, 3, [0, 4])
    (wave,) = table.plan([2, 4])
    np.testing.assert_array_equal(table.slot_of, [0, 3, 3, 3, 1])
    assert table.begin(wave) == (2,)
    np.testing.assert_array_equal(table.slot_of, [0, 3, 3, 3, 1])
    table.finish_loads(wave)
    np.testing.assert_array_equal(table.slot_of, [0, 3, 2, 3, 1])
    np.testing.assert_array_equal(table.resident, [True, False, True, False, True])
    assert table.slot_of.dtype == np.int32 and table.resident.dtype == bool


def test_an_array_that_was_read_does_not_follow_the_table():
    table = table_with(5, 2, [0, 1])
    slot_of, resident = table.slot_of, table.resident
    verify_wave(table, *table.plan([2, 3]))
    np.testing.assert_array_equal(slot_of, [0, 1, 2, 2, 2])
    np.testing.assert_array_equal(resident, [True, True, False, False, False])


@pytest.mark.parametrize("loaded", [False, True])
def test_after_a_failed_load_the_same_wave_can_begin_again(loaded):
    table = table_with(8, 3, [0, 1, 2])
    (wave,) = table.plan([2, 5, 6])
    table.begin(wave)
    if loaded:
        table.finish_loads(wave)
    table.abort(wave)
    table.check()
    # Who was evicted for the wave stays evicted.
    assert set(np.flatnonzero(table.resident)) == {2}
    assert sorted(slot.state.value for slot in table.slots) == ["free", "free", "resident"]
    verify_wave(table, wave)
    table.check()
    assert set(np.flatnonzero(table.resident)) == {2, 5, 6}
    assert table.plan([2, 5, 6]) == (Wave((2, 5, 6), ()),)


@pytest.mark.parametrize("seed", range(3))
def test_a_failed_wave_does_not_change_what_an_emptied_table_does_next(seed):
    policy = list(EVICTION_POLICIES.values())[seed]
    trace = random_trace(np.random.default_rng(seed), 11, 40, 9)
    fresh, used_before = (table_with(11, 4, policy=policy) for _ in range(2))
    for used in trace[:20]:
        wave, *_ = used_before.plan(used)
        used_before.begin(wave)
        used_before.abort(wave)
    (wave, *_) = used_before.plan(trace[20])
    used_before.begin(wave)
    used_before.reset()
    used_before.check()
    assert not used_before.resident.any()
    for used in trace:
        plan = fresh.plan(used)
        assert used_before.plan(used) == plan
        for wave in plan:
            verify_wave(fresh, wave)
            verify_wave(used_before, wave)
        np.testing.assert_array_equal(used_before.slot_of, fresh.slot_of)


def test_emptying_a_table_keeps_its_counts_and_generations():
    table = table_with(5, 3, [0, 1])
    counts = table.counts
    table.reset()
    assert table.counts == counts
    assert [slot.generation for slot in table.slots] == [2, 2, 0]


@pytest.mark.parametrize(
    ("used", "message"),
    [([-1, 2], "lie in"), ([2, 9], "lie in"), ([3, 1, 3], "distinct")],
)
def test_used_experts_that_cannot_be_are_refused(used, message):
    table = table_with(9, 4, [0])
    with pytest.raises(ValueError, match=message):
        table.plan(used)


def test_a_number_that_is_no_expert_id_is_refused():
    with pytest.raises(TypeError):
        ResidencyTable(9, 4).plan([1.5])


@pytest.mark.parametrize("slots", [0, -3])
def test_a_table_without_slots_is_refused(slots):
    with pytest.raises(ValueError, match="at least one slot"):
        ResidencyTable(9, slots)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["begin", "begin"], "end or abort it first"),
        (["begin", "end"], "have not finished"),
        (["begin", "finish_loads", "finish_loads"], "finished already"),
        (["begin", "finish_loads", "end", "end"], "not in progress"),
        (["begin", "abort", "end"], "not in progress"),
        (["begin", "abort", "abort"], "not in progress"),
        (["begin", "finish_loads", "end", "begin"], "plan again"),
        (["end"], "not in progress"),
        (["finish_loads"], "not in progress"),
        (["abort"], "not in progress"),
    ],
)
def test_calls_out_of_order_are_refused_and_change_nothing(calls, message):
    table = table_with(6, 3, [0, 1])
    (wave,) = table.plan([1, 4, 5])
    for call in calls[:-1]:
        getattr(table, call)(wave)
    before = state_of(table)
    with pytest.raises(RuntimeError, match=message):
        getattr(table, calls[-1])(wave)
    assert state_of(table) == before


@pytest.mark.parametrize(
    "wave", [Wave((0,), ()), Wave((), (1,)), Wave((1,), (0, 2, 3)), Wave((), ())]
)
def test_a_wave_that_does_not_fit_the_residency_is_refused(wave):
    table = table_with(6, 3, [1])
    with pytest.raises(RuntimeError, match="plan again"):
        table.begin(wave)


def test_another_wave_than_the_one_in_progress_is_refused():
    table = ResidencyTable(6, 2)
    first, second = table.plan([0, 1, 2])
    table.begin(first)
    for call in (table.finish_loads, table.end, table.abort):
        with pytest.raises(RuntimeError, match="not in progress"):
            call(second)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda table: table._owner.__setitem__(0, 1), "two slots"),
        (lambda table: table._slot_of.__setitem__(5, 0), "two owners"),
        (lambda table: table._slot_of.__setitem__(0, 2), "two owners"),
        (lambda table: table._slot_of.__setitem__(0, 4), "loading slots"),
        (lambda table: table._policy.forget(0), "policy does not hold"),
        (lambda table: table._policy.use(5), "policy does not hold"),
    ],
)
def test_the_check_notices_damage(damage, message):
    table = table_with(6, 4, [0, 1])
    table.check()
    damage(table)
    with pytest.raises(AssertionError, match=message):
        table.check()


def test_the_table_and_its_policies_are_bookkeeping_without_jax():
    for name in ("residency", "eviction"):
        _, others = source_tree.imported(f"acceptmoe_jax/offload/{name}.py")
        assert others <= {"numpy", "jaxtyping"}
