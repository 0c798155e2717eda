"""Decoding with experts in host memory, against the same with all of them on the device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.offload import ResidencyTable
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.offload.host_store import HostStore
from acceptmoe_jax.offload.transfers import GROUP
from acceptmoe_jax.runtime.compiled import CompiledPrograms
from acceptmoe_jax.runtime.offloaded import OffloadedRunner
from acceptmoe_jax.runtime.resident import ResidentRunner
from acceptmoe_jax.runtime.state import empty_state
from acceptmoe_jax.selection import Commitment, SelectorConfig
from tests import device_put_guard, tiny_models

QWEN3_MOE, GPT_OSS = tiny_models.TARGET, tiny_models.GPT_OSS
both_families = pytest.mark.parametrize(
    "target", [QWEN3_MOE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"]
)
CACHE_ROWS = 64
COMMITMENT = Commitment(jnp.asarray([1.0, 0.7, 0.5, 0.3], jnp.float32))
# Prompts after which drafts are accepted.
PROMPTS = {
    target: np.random.default_rng(seed).integers(0, target.vocab_size, 19)
    for target, seed in ((QWEN3_MOE, 3), (GPT_OSS, 0))
}
TOP_K = QWEN3_MOE.top_k
NATIVE = SelectorConfig(policy="native", top_k=TOP_K)
ACCEPTMOE = SelectorConfig(policy="acceptmoe", top_k=TOP_K)

_weights = functools.cache(tiny_models.weights)
# Programs know neither slots nor policies of eviction but by their keys.
_compiled = functools.cache(lambda target: CompiledPrograms())
_store = functools.cache(lambda target: HostStore.from_banks(_weights(target).banks))


def offloaded(target=QWEN3_MOE, slots=7, **config):
    weights = _weights(target).replace(banks=())
    setup = tiny_models.setup(target)
    runner = OffloadedRunner(setup, weights, _store(target), OffloadConfig(slots, **config))
    runner.compiled = _compiled(target)
    return runner


@functools.cache
def resident(target):
    return ResidentRunner(tiny_models.setup(target), _weights(target))


def prefill(runner):
    state = empty_state(runner.setup, CACHE_ROWS, jnp.float32)
    prompt = PROMPTS[runner.setup.target]
    tokens = jnp.zeros(32, jnp.int32).at[: len(prompt)].set(prompt)
    return runner.prefill(state, tokens, jnp.int32(len(prompt)), jnp.int32(-1))


def decode(runner, selector=NATIVE, rounds=3):
    """(committed tokens, logits of their rows, used experts a layer and round)."""
    runner.begin_request()
    state = prefill(runner)
    committed, logits, used = [int(state.last_token)], [], []
    for _ in range(rounds):
        state, done = runner.round(state, COMMITMENT, selector)
        length = int(done.acceptance.length)
        committed += np.asarray(done.acceptance.tokens)[:length].tolist()
        logits.append(np.asarray(done.logits)[:length])
        used.append(np.asarray(done.counts.used))
    return committed, np.concatenate(logits), np.stack(used)


@both_families
@pytest.mark.parametrize(
    "every",
    [
        pytest.param([4, 7], id="some"),
        pytest.param(range(TOP_K, QWEN3_MOE.num_experts + 1), id="all", marks=pytest.mark.slow),
    ],
)
def test_native_is_bit_identical_with_resident_at_every_number_of_slots(target, every):
    expected, expected_logits, used = decode(resident(target))
    assert len(expected) > 4, "no draft was accepted: the test shows little"
    for slots in every:
        runner = offloaded(target, slots)
        committed, logits, _ = decode(runner)
        assert committed == expected
        np.testing.assert_array_equal(logits, expected_logits, err_msg=f"{slots} slots")
        assert runner.loads.table.waves == np.sum(-(-used // slots)), f"{slots} slots"


@both_families
@pytest.mark.parametrize("slots", [7])
@pytest.mark.parametrize(
    "selector",
    [
        dataclasses.replace(ACCEPTMOE, prune=False),
        SelectorConfig(policy="moe_spec", top_k=TOP_K, budget=7),
        SelectorConfig(policy="acceptmoe_fix", top_k=TOP_K, budget=7, prune=False),
    ],
    ids=["acceptmoe", "moe_spec", "acceptmoe_fix"],
)
def test_a_policy_that_does_not_prune_answers_as_with_all_experts_resident(target, slots, selector):
    committed, logits, used = decode(offloaded(target, slots), selector)
    expected, expected_logits, expected_used = decode(resident(target), selector)
    assert committed == expected
    np.testing.assert_array_equal(used, expected_used)
    np.testing.assert_array_equal(logits, expected_logits)


def test_pruning_uses_fewer_experts_and_moves_less_than_the_same_without():
    pruned, full = offloaded(slots=7), offloaded(slots=7)
    _, _, used = decode(pruned, ACCEPTMOE, rounds=8)
    _, _, more = decode(full, dataclasses.replace(ACCEPTMOE, prune=False), rounds=8)
    assert used.sum() < more.sum()
    assert pruned.loads.table.misses < full.loads.table.misses
    assert pruned.loads.traffic.bytes < full.loads.traffic.bytes


@both_families
def test_plain_decoding_is_that_of_resident(target):
    runners = [offloaded(target, slots=7), resident(target)]
    tokens = []
    for runner in runners:
        state = prefill(runner)
        emitted = [int(state.last_token)]
        for _ in range(6):
            state, _ = runner.step(state)
            emitted.append(int(state.last_token))
        tokens.append(emitted)
    assert tokens[0] == tokens[1]


def test_prefill_and_audits_stream_and_leave_the_tables_alone():
    runner = offloaded(slots=7)
    runner.begin_request()
    state = prefill(runner)
    assert runner.loads.table.waves == 0 and runner.loads.streamed.loads > 0
    state, done = runner.round(state, COMMITMENT, ACCEPTMOE)
    tables = {layer: table.slots for layer, table in runner.tables.items()}
    before = runner.loads
    state, audit = runner.audit(state, done)
    assert {layer: table.slots for layer, table in runner.tables.items()} == tables
    after = runner.loads - before
    assert after.table.waves == 0 and after.traffic.loads == 0
    assert 0 <= int(audit.agreeing) <= int(done.acceptance.length)


def test_an_audit_is_that_of_resident():
    results = []
    for runner in (offloaded(slots=7), resident(QWEN3_MOE)):
        runner.begin_request()
        state = prefill(runner)
        selector = dataclasses.replace(ACCEPTMOE, prune=False)
        state, done = runner.round(state, COMMITMENT, selector)
        state, audit = runner.audit(state, done)
        _, after = runner.round(state, COMMITMENT, selector)
        results.append((int(audit.agreeing), float(audit.kl), np.asarray(after.logits)))
    assert results[0][0] == results[1][0]
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(results[0][2], results[1][2], atol=1e-4)


def test_a_request_does_not_depend_on_the_one_before_unless_it_is_to():
    runner = offloaded(slots=7)
    first, logits, _ = decode(runner, ACCEPTMOE)
    again, same_logits, _ = decode(runner, ACCEPTMOE)
    assert again == first
    np.testing.assert_array_equal(same_logits, logits)
    kept = offloaded(slots=7, keep_residency=True)
    decode(kept, NATIVE, rounds=1)
    before = kept.loads
    decode(kept, NATIVE, rounds=1)
    warm = kept.loads - before
    assert warm.table.hit_rate > (before.table.hit_rate or 0)


@pytest.mark.parametrize("way", ["load", "stream"])
def test_a_layer_whose_picks_were_all_dropped_is_computed_once_without_experts(way):
    runner, calls = offloaded(slots=7), []
    layer = QWEN3_MOE.moe_layers[0]
    getattr(runner, way)(layer, [], lambda part, bank, *, last: calls.append((len(part), last)))
    assert calls == [(0, True)]


# --- Failures ----------------------------------------------------------------------------------


class LinkDown(Exception):
    pass


@pytest.mark.parametrize("fails", ["stage", "flush"])
@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_transfer_that_fails_loses_its_request_and_no_other(monkeypatch, fails, at):
    runner = offloaded(slots=7)
    expected, expected_logits, _ = decode(runner)
    real, calls = getattr(runner.transfers, fails), 0

    def failing(*args):
        nonlocal calls
        calls += 1
        if calls == streamed + at + 1:
            raise LinkDown
        return real(*args)

    monkeypatch.setattr(runner.transfers, fails, failing)
    runner.begin_request()
    streamed = 10**9
    state = prefill(runner)
    streamed = calls
    with pytest.raises(LinkDown):
        for _ in range(3):
            state, _ = runner.round(state, COMMITMENT, NATIVE)
    for table in runner.tables.values():
        table.check()
    committed, logits, _ = decode(runner)
    assert committed == expected
    np.testing.assert_array_equal(logits, expected_logits)


def test_a_host_array_that_is_gone_loses_its_request_and_no_other():
    weights = _weights(QWEN3_MOE)
    store = HostStore.from_banks(weights.banks)
    layer = max(store.layers)
    runner = OffloadedRunner(
        tiny_models.setup(), weights.replace(banks=()), store, OffloadConfig(7)
    )
    runner.compiled = _compiled(QWEN3_MOE)
    expected, _, _ = decode(runner)
    whole = store.layers[layer]
    lost = [jnp.array(record) for record in whole]
    for record in lost:
        record.delete()
    store.layers[layer] = tuple(lost)
    with pytest.raises(RuntimeError, match="deleted"):
        decode(runner)
    for table in runner.tables.values():
        table.check()
    store.layers[layer] = whole
    assert decode(runner)[0] == expected


def test_a_pool_that_a_failure_consumed_is_made_anew(monkeypatch):
    runner = offloaded(slots=7)
    expected, _, _ = decode(runner)
    state = prefill(runner)
    flush = runner.transfers.flush

    def consuming(pool, *args):
        flush(pool, *args)
        raise LinkDown

    monkeypatch.setattr(runner.transfers, "flush", consuming)
    with pytest.raises(LinkDown):
        runner.round(state, COMMITMENT, NATIVE)
    monkeypatch.undo()
    for table in runner.tables.values():
        table.check()
    assert decode(runner)[0] == expected


# --- Accounts ----------------------------------------------------------------------------------


def test_only_the_transfers_move_experts_and_they_count_every_byte():
    runner = offloaded(slots=7)
    with device_put_guard.watch() as moved:
        decode(runner, ACCEPTMOE, rounds=2)
    assert moved.bytes == runner.transfers.traffic.bytes > 0
    loads = runner.loads
    assert loads.traffic.bytes + loads.streamed.bytes == moved.bytes
    assert loads.traffic.loads == loads.table.misses == loads.table.loads


def test_no_more_is_staged_than_two_groups(monkeypatch):
    runner = offloaded(slots=7)
    runner.begin_request()
    state = prefill(runner)
    staged, flush, most = [0], runner.transfers.flush, 0
    stage = runner.transfers.stage

    def counting_stage(records):
        staged[0] += len(records)
        nonlocal most
        most = max(most, staged[0])
        return stage(records)

    def counting_flush(pool, group, *args):
        staged[0] -= len(group.records)
        return flush(pool, group, *args)

    monkeypatch.setattr(runner.transfers, "stage", counting_stage)
    monkeypatch.setattr(runner.transfers, "flush", counting_flush)
    for _ in range(3):
        state, _ = runner.round(state, COMMITMENT, NATIVE)
    assert 0 < most <= 2 * GROUP
    assert staged == [0]


def test_a_slot_pool_holds_its_slots_and_no_more():
    runner = offloaded(slots=7)
    layout = _store(QWEN3_MOE).layout
    for pool in runner.pools.values():
        sizes = [leaf.nbytes for leaf in (pool.gate, pool.up, pool.down)]
        assert sum(sizes) == 7 * layout.nbytes


def test_device_memory_stays_within_slots_caches_and_two_staged_groups(monkeypatch):
    """Live arrays, at every stage and flush and after every round; weights were there before."""
    store = _store(QWEN3_MOE)
    there = jax.live_arrays()  # held, so that no other array gets one of their ids
    known = set(map(id, there))
    runner = offloaded(slots=7)
    layout, layers = store.layout, len(store.layers)
    experts = (7 * layers + GROUP) * layout.nbytes  # slots, and the stream's buffer

    def on_device() -> int:
        return sum(
            array.nbytes
            for array in jax.live_arrays()
            if id(array) not in known and array.sharding.memory_kind == "device"
        )

    assert experts <= on_device() < experts + 1000  # each pool knows its slots
    during = []
    for name in ("stage", "flush"):
        real = getattr(runner.transfers, name)

        def measured(*args, real=real):
            result = real(*args)
            during.append(on_device())
            return result

        monkeypatch.setattr(runner.transfers, name, measured)
    runner.begin_request()
    state = prefill(runner)
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    after = []
    for _ in range(3):
        state, done = runner.round(state, COMMITMENT, NATIVE)
        after.append(on_device())
    kept = experts + caches + sum(leaf.nbytes for leaf in jax.tree.leaves(done))
    activations = 16_000  # picks of a prompt's 32 rows, and some rows
    assert activations < len(store.layers[0]) * layout.nbytes / 4
    assert max(during) <= kept + 2 * GROUP * layout.nbytes + activations
    assert max(after) <= kept + 2000


@pytest.mark.slow
def test_a_thousand_rounds_leak_nothing():
    runner = offloaded(slots=7)
    decode(runner, ACCEPTMOE)
    before, programs = len(jax.live_arrays()), len(runner.compiled)
    for _ in range(50):
        decode(runner, ACCEPTMOE, rounds=20)
    assert len(jax.live_arrays()) <= before
    assert len(runner.compiled) == programs


def test_slots_that_cannot_hold_a_token_are_refused():
    with pytest.raises(ValueError, match="slots must lie between top_k = 4"):
        OffloadConfig(3).check_experts(13, 4)
    with pytest.raises(ValueError, match="13 experts, got 14"):
        OffloadConfig(14).check_experts(13, 4)
    with pytest.raises(ValueError, match="eviction must be one of"):
        OffloadConfig(6, eviction="random")
    with pytest.raises(ValueError, match="at least one slot"):
        ResidencyTable(13, 0)
