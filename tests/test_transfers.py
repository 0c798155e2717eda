"""Transfers: right bits in the right slots, in place, counted, consistent after failures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.offload.host_store import HostStore
from acceptmoe_jax.offload.transfers import (
    GROUP,
    Link,
    Traffic,
    Transfers,
    empty_pool,
    is_consumed,
    with_slots,
)
from acceptmoe_jax.weights.safetensors_io import aligned_empty
from tests import device_put_guard, source_tree, tiny_banks

E = tiny_banks.EXPERTS
C = 13  # more slots than experts: a wave may be longer than a group
NO_SLOTS = np.full(E, C, np.int32)


@functools.cache
def store_of(name: str = "float32") -> HostStore:
    return HostStore.from_banks([tiny_banks.bank(name, 7)])


def records(experts, name: str = "float32"):
    return store_of(name).records(0, experts)


def new_pool(name: str = "float32"):
    return empty_pool(store_of(name).layout, C, E)


def table(slots: dict[int, int]) -> np.ndarray:
    """slot_of, from slot -> expert."""
    slot_of = NO_SLOTS.copy()
    for slot, expert in slots.items():
        slot_of[expert] = slot
    return slot_of


def bits(pool) -> list[list[bytes]]:
    """The bytes of every leaf of every slot."""
    return [tiny_banks.expert_bits(pool, slot) for slot in range(C)]


def expected_bits(slots: dict[int, int], name: str) -> list[list[bytes]]:
    """Those of a pool with these experts and zeros in all other slots."""
    bank = tiny_banks.bank(name, 7)
    slot_of = np.asarray(bank.slot_of)
    zeros = [bytes(len(leaf)) for leaf in tiny_banks.expert_bits(bank, 0)]
    return [
        tiny_banks.expert_bits(bank, slot_of[slots[slot]]) if slot in slots else zeros
        for slot in range(C)
    ]


class Clock:
    """Seconds that pass only when somebody sleeps or computes."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    compute = sleep


def modelled(clock: Clock, milliseconds_an_expert: float) -> Transfers:
    layout = store_of().layout
    link = Link(gbps=layout.nbytes / milliseconds_an_expert * 1e-6)
    return Transfers(layout, link, clock=clock, sleep=clock.sleep)


# --- Bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_banks.FORMATS)
def test_records_land_in_their_slots_and_nowhere_else(name):
    """1, 3 and 11 records, by groups of 2, 4 and 8; slots are written again."""
    transfers, pool, held = Transfers(store_of(name).layout), new_pool(name), {}
    rng = np.random.default_rng(8)
    for count in (3, 1, E, 1, 3):
        slots = rng.permutation(C)[:count].tolist()
        experts = rng.permutation(E)[:count].tolist()
        held |= dict(zip(slots, experts))
        staged = transfers.stage(records(experts, name))
        pool = transfers.flush(pool, staged, slots, table(held))
        assert bits(pool) == expected_bits(held, name)
        np.testing.assert_array_equal(pool.slot_of, table(held))


def test_an_empty_pool_is_zeros_in_the_shapes_and_dtypes_of_a_bank():
    for name in tiny_banks.FORMATS:
        pool, bank = new_pool(name), tiny_banks.bank(name, 7)
        assert jax.tree.structure(pool) == jax.tree.structure(bank)
        for leaf, resident in zip(jax.tree.leaves(pool), jax.tree.leaves(bank)):
            assert leaf.dtype == resident.dtype
            assert leaf.shape[1:] == resident.shape[1:]
            assert leaf.sharding.memory_kind == "device"
        assert bits(pool) == expected_bits({}, name)
        np.testing.assert_array_equal(pool.slot_of, NO_SLOTS)


def test_another_table_leaves_the_weights():
    pool = new_pool()
    slot_of = aligned_empty((E,), np.dtype(np.int32))  # that the CPU would adopt
    slot_of[:] = table({4: 2})
    moved = with_slots(pool, slot_of)
    slot_of[2] = 9
    np.testing.assert_array_equal(moved.slot_of, table({4: 2}))
    assert moved.gate is pool.gate


def test_slots_must_be_as_many_as_records():
    transfers, pool = Transfers(store_of().layout), new_pool()
    with pytest.raises(ValueError, match="2 records for 1 slots"):
        transfers.flush(pool, transfers.stage(records([3, 4])), [5], table({5: 3}))
    assert not is_consumed(pool)


# --- Memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "MXFP4 with float32 biases"])
def test_a_flush_writes_in_place(name):
    transfers, pool = Transfers(store_of(name).layout), new_pool(name)

    def pointers(pool):
        leaves = jax.tree.leaves(pool.replace(slot_of=None))
        return [leaf.unsafe_buffer_pointer() for leaf in leaves]

    before = pointers(pool)
    after = transfers.load(pool, records(range(E), name), range(E), np.arange(E))
    assert pointers(after) == before
    assert is_consumed(pool)
    assert not is_consumed(after)


def test_a_load_has_two_groups_on_the_device_at_most(monkeypatch):
    layout = store_of().layout
    put, held = jax.device_put, []

    def counted(arrays, *args):
        placed = put(arrays, *args)
        staged = [a for a in jax.live_arrays("cpu") if a.shape == (layout.items,)]
        held.append(sum(a.sharding.memory_kind == "device" for a in staged))
        return placed

    monkeypatch.setattr(jax, "device_put", counted)
    experts = [*range(E), *range(E), *range(E)]  # slots are written again and again
    Transfers(layout).load(new_pool(), records(experts), experts, NO_SLOTS)
    assert max(held) == 2 * GROUP


def test_loads_leak_nothing():
    transfers, pool = Transfers(store_of().layout), new_pool()
    live = []
    for _ in range(40):
        pool = transfers.load(pool, records(range(5)), range(5), table(dict(enumerate(range(5)))))
        live.append(len(jax.live_arrays("cpu")))
    assert live[0] == live[-1]


def test_few_programs_are_compiled_and_none_twice(monkeypatch):
    compile, compiled = jax.stages.Lowered.compile, []

    def counted(lowered, *args, **options):
        compiled.append(lowered)
        return compile(lowered, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    layout = store_of("bfloat16").layout
    pool = empty_pool(layout, C - 1, E)  # like no other test's
    Transfers(layout).compile(pool)
    assert len(compiled) == 3
    transfers = Transfers(layout)
    for count in range(1, E + 1):
        pool = transfers.load(pool, records(range(count), "bfloat16"), range(count), NO_SLOTS)
    assert len(compiled) == 3


# --- Counting ----------------------------------------------------------------------------------


def test_bytes_counted_are_bytes_moved():
    with device_put_guard.watch() as moved:
        store = HostStore.from_banks([tiny_banks.bank("MXFP4 with float32 biases", 9)])
        assert moved.bytes == 0
        transfers = Transfers(store.layout)
        pool = empty_pool(store.layout, C, E)
        pool = transfers.load(pool, store.records(0, range(E)), range(E), np.arange(E))
        transfers.stage(store.records(0, [1, 2]))  # never flushed: moved all the same
        transfers.rebuild(C, {3: store.layers[0][4]}, table({3: 4}))
    assert moved.bytes == transfers.traffic.bytes == (E + 2 + 1) * store.layout.nbytes
    assert transfers.traffic.loads == E + 2 + 1
    assert transfers.traffic.flushes == 2 + 1


def test_what_a_part_moved_is_a_difference():
    earlier = Traffic(loads=2, bytes=20, flushes=1, wait_seconds=0.5)
    later = Traffic(loads=5, bytes=50, flushes=3, wait_seconds=0.75)
    assert later - earlier == Traffic(loads=3, bytes=30, flushes=2, wait_seconds=0.25)
    assert earlier + (later - earlier) == later


def test_nothing_is_moved_implicitly():
    transfers, pool = Transfers(store_of().layout), new_pool()
    with jax.transfer_guard("disallow"):
        transfers.load(pool, records([1, 2, 3]), [0, 1, 2], table({0: 1, 1: 2, 2: 3}))


def test_no_other_code_moves_arrays():
    assert device_put_guard.mentions() == device_put_guard.ALLOWED


def test_the_guard_fails_on_any_other_caller():
    namespace = {"jax": jax}
    file = str(source_tree.ROOT / "acceptmoe_jax/runtime/other.py")
    code = "def move(x): return jax.tree.map(jax.device_put, x)"
    exec(compile(code, file, "exec"), namespace)
    with pytest.raises(AssertionError, match="other.py', 'move'"):
        with device_put_guard.watch():
            namespace["move"]([jnp.zeros(2)])
    with pytest.raises(AssertionError):  # caught on the way, it fails at the end
        with device_put_guard.watch():
            with pytest.raises(AssertionError):
                namespace["move"]([jnp.zeros(2)])
    with device_put_guard.watch():
        jax.device_put(jnp.zeros(2))


# --- Waiting -----------------------------------------------------------------------------------


def test_staging_does_not_wait_and_a_flush_waits_for_its_own_records(monkeypatch):
    transfers, pool = Transfers(store_of().layout), new_pool()
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: waited.append(arrays))
    first = transfers.stage(records([1, 2]))
    second = transfers.stage(records([3]))
    assert not waited
    pool = transfers.flush(pool, first, [0, 1], NO_SLOTS)
    assert waited == [first.records]
    transfers.flush(pool, second, [2], NO_SLOTS)
    assert waited == [first.records, second.records]


@pytest.mark.parametrize(
    ("milliseconds", "waits"), [(0, 20), (15, 5), (20, 0), (30, 0)], ids="{}".format
)
def test_a_modelled_link_works_while_others_compute(milliseconds, waits):
    """Two experts of 10 ms each."""
    clock = Clock()
    transfers = modelled(clock, 10)
    staged = transfers.stage(records([1, 2]))
    clock.compute(milliseconds / 1e3)
    transfers.flush(new_pool(), staged, [3, 4], NO_SLOTS)
    assert transfers.traffic.wait_seconds == pytest.approx(waits / 1e3)
    assert clock.now == pytest.approx(100 + max(milliseconds, 20) / 1e3)


def test_a_modelled_link_serves_stages_one_after_the_other():
    clock = Clock()
    transfers, pool = modelled(clock, 10), new_pool()
    first = transfers.stage(records([1, 2]))
    clock.compute(0.005)
    second = transfers.stage(records([3]))
    pool = transfers.flush(pool, first, [0, 1], NO_SLOTS)
    assert clock.now == pytest.approx(100.020)
    clock.compute(0.004)
    transfers.flush(pool, second, [2], NO_SLOTS)
    assert clock.now == pytest.approx(100.030)
    assert transfers.traffic.wait_seconds == pytest.approx(0.015 + 0.006)


def test_a_modelled_link_that_was_idle_begins_anew():
    clock = Clock()
    transfers = modelled(clock, 10)
    pool = transfers.load(new_pool(), records([1]), [0], NO_SLOTS)
    clock.compute(1)
    transfers.load(pool, records([2]), [1], NO_SLOTS)
    assert transfers.traffic.wait_seconds == pytest.approx(0.020)


def test_the_link_is_never_idle_while_a_wave_of_several_groups_is_written(monkeypatch):
    """Writing a group takes 5 ms: that of the first is hidden."""
    clock = Clock()
    transfers = modelled(clock, 10)
    write = transfers._write

    def write_slowly(*args):
        clock.compute(0.005)
        return write(*args)

    monkeypatch.setattr(transfers, "_write", write_slowly)
    transfers.load(new_pool(), records(range(E)), range(E), NO_SLOTS)
    assert GROUP < E < 2 * GROUP
    assert clock.now == pytest.approx(100 + E * 0.010 + 0.005)
    assert transfers.traffic.wait_seconds == pytest.approx(E * 0.010 - 0.005)


def test_the_real_transfer_is_waited_for_on_a_modelled_link_too(monkeypatch):
    clock = Clock()
    transfers = modelled(clock, 10)
    monkeypatch.setattr(jax, "block_until_ready", lambda _: clock.sleep(0.025))
    transfers.load(new_pool(), records([1]), [0], NO_SLOTS)
    assert transfers.traffic.wait_seconds == pytest.approx(0.025)


def test_a_link_says_whether_it_is_simulated():
    assert str(Link()) == "real"
    assert str(Link(gbps=56)) == "56 GB/s (simulated)"
    assert Link(gbps=56).seconds(56 * 10**9) == 1
    with pytest.raises(ValueError, match="moves more than 0 GB/s"):
        Link(gbps=0)


# --- Failures ----------------------------------------------------------------------------------


def test_a_stage_that_fails_counts_nothing_and_the_next_one_works(monkeypatch):
    clock = Clock()
    transfers, pool = modelled(clock, 10), new_pool()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            transfers.stage(records([1, 2]))
    assert transfers.traffic == Traffic()
    pool = transfers.load(pool, records([2]), [6], table({6: 2}))
    assert transfers.traffic.wait_seconds == pytest.approx(0.010)  # the link was not taken
    assert bits(pool) == expected_bits({6: 2}, "float32")


def test_a_host_array_that_is_gone_counts_nothing():
    transfers = Transfers(store_of().layout)
    store = HostStore.from_banks([tiny_banks.bank("float32", 7)])
    store.layers[0][3].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        transfers.stage(store.records(0, [2, 3]))
    assert transfers.traffic == Traffic()
    pool = transfers.load(new_pool(), store.records(0, [2, 4]), [0, 1], table({0: 2, 1: 4}))
    assert bits(pool) == expected_bits({0: 2, 1: 4}, "float32")


def test_a_wait_that_fails_leaves_the_pool(monkeypatch):
    transfers, pool = Transfers(store_of().layout), new_pool()
    staged = transfers.stage(records([1]))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            transfers.flush(pool, staged, [0], NO_SLOTS)
    assert not is_consumed(pool)
    assert transfers.traffic == Traffic(loads=1, bytes=store_of().layout.nbytes)


def test_a_pool_that_a_failed_flush_consumed_is_rebuilt(monkeypatch):
    transfers, held = Transfers(store_of().layout), {0: 9, 4: 1, 12: 5}
    pool = transfers.load(new_pool(), records(held.values()), list(held), table(held))
    write = transfers._write

    def write_and_fail(*args):
        write(*args)
        raise RuntimeError("the device is out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(transfers, "_write", write_and_fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            transfers.load(pool, records([7]), [4], table(held | {4: 7}))
    assert is_consumed(pool)
    del held[4]  # evicted for the load that failed
    residents = {slot: store_of().layers[0][expert] for slot, expert in held.items()}
    pool = transfers.rebuild(C, residents, table(held))
    assert bits(pool) == expected_bits(held, "float32")
    np.testing.assert_array_equal(pool.slot_of, table(held))


def test_a_pool_without_residents_is_rebuilt_empty():
    pool = Transfers(store_of().layout).rebuild(C, {}, NO_SLOTS)
    assert bits(pool) == expected_bits({}, "float32")
