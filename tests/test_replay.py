"""Policies replayed on traces: against the live run, loops in float64, and the residency table."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax import Engine, selection
from acceptmoe_jax.offload import ResidencyTable
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.selection import Commitment, PathCommitment, SelectorConfig
from acceptmoe_jax.traces import Trace, lru, replay as replay_lib
from acceptmoe_jax.traces.recording import record
from acceptmoe_jax.traces.replay import replay, replay_trace
from tests import pocket, selection_oracle, trace_cases
from tests.residency_traces import random_trace
from tests.selection_blocks import members

PHAT = (1.0, 0.8, 0.55, 0.3, 0.1)
COMMITMENT = Commitment(jnp.array(PHAT))
ACCEPTMOE = SelectorConfig(policy="acceptmoe", top_k=3)
MOE_SPEC = SelectorConfig(policy="moe_spec", top_k=3, budget=5)
NATIVE = SelectorConfig(policy="native", top_k=3)


def stacked(seed, count):
    return trace_cases.SETTINGS.stack(trace_cases.requests(seed, (count,))["p0"])


def table_steps(trace, experts, slots, table=None):
    """(hits, misses, waves, resident before) of each verification, by `ResidencyTable`."""
    table = table or ResidencyTable(experts, slots)
    for used in trace:
        before, resident = table.counts, table.resident
        for wave in table.plan(used):
            table.begin(wave)
            table.finish_loads(wave)
            table.end(wave)
        counts = table.counts - before
        yield counts.hits, counts.misses, counts.waves, resident


@jax.jit
def lru_steps(used_NE, slots):
    def step(recency, used):
        after, loads = lru.load(recency, used, slots)
        return after, (loads.hits, loads.misses, loads.waves, lru.resident(recency))

    return jax.lax.scan(step, lru.empty(used_NE.shape[1]), used_NE)[1]


@pytest.mark.parametrize("slots", range(1, 14))
@pytest.mark.parametrize("seed", range(3))
def test_residency_inside_jit_is_the_residency_table(seed, slots):
    trace = random_trace(np.random.default_rng(seed), 13, 50, 13)
    trace[7] = ()
    used = np.array([np.isin(np.arange(13), step) for step in trace])
    assert any(len(step) > slots for step in trace) or slots == 13
    ours = zip(*map(np.asarray, lru_steps(used, slots)))
    for mine, table in zip(ours, table_steps(trace, 13, slots), strict=True):
        assert tuple(map(int, mine[:3])) == table[:3]
        np.testing.assert_array_equal(mine[3], table[3])


def oracle_sets(config, logits, verification, resident):
    """S, S', and the experts of live picks of one layer, as sets."""
    valid = verification.valid
    if config.policy == "acceptmoe":
        theirs = selection_oracle.select(
            logits, verification.depth, valid, PHAT, resident, config.top_k
        )
        return theirs["eligible_before_pruning"], theirs["eligible"], theirs["used"]
    experts = range(logits.shape[1])
    if config.policy == "moe_spec":
        mass = selection_oracle.softmax(logits[valid].astype(np.float64)).sum(axis=0)
        experts = selection_oracle.descending(mass, experts)[: config.budget]
    masked = np.where(np.isin(np.arange(logits.shape[1]), list(experts)), logits, -np.inf)
    picks = selection_oracle.natural_experts(masked, config.top_k)[valid]
    return set(experts), set(experts), set(picks.ravel().tolist())


@pytest.mark.parametrize(
    ("config", "slots"),
    [(NATIVE, None), (ACCEPTMOE, None), (ACCEPTMOE, 5), (MOE_SPEC, 3), (NATIVE, 7)],
    ids=lambda value: getattr(value, "policy", value),
)
def test_replay_agrees_with_loops_and_tables(config, slots):
    verifications = trace_cases.requests(1, (37,))["p0"]
    result = replay(trace_cases.SETTINGS.stack(verifications), COMMITMENT, config, slots, sets=True)
    for layer in range(trace_cases.SETTINGS.num_layers):
        table = None if slots is None else ResidencyTable(12, slots)
        for n, verification in enumerate(verifications):
            logits = verification.logits[layer]
            resident = None if table is None else table.resident
            before, eligible, used = oracle_sets(config, logits, verification, resident)
            natural = selection_oracle.natural_experts(logits, config.top_k)
            picks = [e for t in np.flatnonzero(verification.valid) for e in natural[t]]
            accepted = [e for t in verification.path[: verification.length] for e in natural[t]]
            at = n, layer
            assert members(result.eligible_set[at]) == eligible
            assert members(result.used_set[at]) == used
            assert result.before_pruning[at] == len(before)
            assert result.eligible[at] == len(eligible)
            assert result.used[at] == len(used)
            assert result.natural_union[at] == len(set(picks))
            assert result.rerouting_budget[at] == sum(e not in before for e in picks)
            assert result.displaced[at] == sum(e not in eligible for e in picks)
            assert result.path_picks[at] == len(accepted) == config.top_k * verification.length
            assert result.path_picks_kept[at] == sum(e in eligible for e in accepted)
            assert result.path_experts[at] == len(set(accepted))
            assert result.path_experts_kept[at] == len(set(accepted) & eligible)
            if table is not None:
                [(hits, misses, waves, _)] = table_steps([used], 12, slots, table)
                counted = (result.hits[at], result.misses[at], result.waves[at])
                assert counted == (hits, misses, waves)


def test_shares_are_of_sums():
    result = replay(stacked(2, 9), COMMITMENT, MOE_SPEC, 3, sets=True)
    assert result.recall == result.path_picks_kept.sum() / result.path_picks.sum() < 1
    assert result.set_recall == result.path_experts_kept.sum() / result.path_experts.sum()
    assert result.hit_rate == result.hits.sum() / result.used.sum()
    assert result.traffic(700) == 700 * result.misses.sum()


def test_without_slots_nothing_is_moved():
    result = replay(stacked(2, 9), COMMITMENT, NATIVE, sets=True)
    assert result.hits is result.misses is result.waves is result.recency is None
    assert result.hit_rate is None and result.traffic(700) is None


def test_a_request_without_verifications_has_no_share():
    result = replay(stacked(0, 0), COMMITMENT, MOE_SPEC, 3, sets=True)
    assert result.eligible.shape == result.hits.shape == (0, 2)
    assert result.recall is None and result.hit_rate is None


def test_natural_routing_keeps_everything():
    result = replay(stacked(3, 9), COMMITMENT, NATIVE, sets=True)
    assert result.recall == result.set_recall == 1
    assert not result.displaced.any()
    np.testing.assert_array_equal(result.used, result.natural_union)


def assert_equal_results(ours, theirs):
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name != "recency":
            np.testing.assert_array_equal(a, b, err_msg=field.name)


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """Read in several groups, the first of which takes two chunks."""
    monkeypatch.setattr(replay_lib, "_GROUP", 34)
    trace_cases.write(tmp_path, trace_cases.requests(4, (4, 33, 0, 6, 30)))
    return Trace.open(tmp_path)


def test_each_request_of_a_trace_begins_with_no_expert(trace):
    results = list(replay_trace(trace, COMMITMENT, ACCEPTMOE, 5, sets=True))
    for (_, verifications), result in zip(trace.requests(), results, strict=True):
        alone = replay(verifications, COMMITMENT, ACCEPTMOE, 5, sets=True)
        assert_equal_results(result, alone)
        assert not len(verifications) or not result.hits[0].any()


def test_kept_residency_goes_on_where_the_request_before_ended(trace):
    results = list(replay_trace(trace, COMMITMENT, ACCEPTMOE, 5, keep_residency=True, sets=True))
    recency = None
    for (_, verifications), result in zip(trace.requests(), results, strict=True):
        alone = replay(verifications, COMMITMENT, ACCEPTMOE, 5, recency=recency, sets=True)
        assert_equal_results(result, alone)
        recency = alone.recency
    assert results[1].hits[0].all()


def test_nodes_can_be_weighed_by_their_paths():
    path = PathCommitment(
        jnp.array([[0.0, 0.0]] + [[-2.0, -0.2]] * 4), jnp.array([[1.0, 1.0]] + [[0.01, 0.9]] * 4)
    )
    commitment = Commitment(jnp.array(PHAT), path)
    config = dataclasses.replace(ACCEPTMOE, policy="acceptmoe_fix", budget=5, path=True)
    verifications = stacked(5, 12)
    result = replay(verifications, commitment, config, sets=True)

    @functools.partial(jax.jit, static_argnames="path_weights")
    def eligible(logits, depth, score, valid, path_weights=True):
        weights = selection.node_commitment(commitment, depth, score) if path_weights else None
        setting = config if path_weights else dataclasses.replace(config, path=False)
        args = (logits, depth, valid, commitment.phat)
        return selection.select(*args, config=setting, path_phat=weights).eligible

    differing = 0
    for n, layer in np.ndindex(12, 2):
        block = (verifications.depth[n], verifications.score[n], verifications.valid[n])
        logits = verifications.logits[n, layer]
        np.testing.assert_array_equal(result.eligible_set[n, layer], eligible(logits, *block))
        by_depth = eligible(logits, *block, path_weights=False)
        differing += not np.array_equal(result.eligible_set[n, layer], by_depth)
    assert differing


@pytest.mark.parametrize("slots", [0, 13])
def test_slots_that_cannot_be_are_refused(slots):
    with pytest.raises(ValueError, match=f"between 1 and 12 experts, got {slots}"):
        replay(stacked(0, 1), COMMITMENT, NATIVE, slots)


def test_a_budget_beyond_the_layer_is_refused():
    with pytest.raises(ValueError, match="budget = 13 exceeds"):
        replay(stacked(0, 1), COMMITMENT, dataclasses.replace(MOE_SPEC, budget=13))


def assert_replay_is_the_run(trace, slots=None):
    """Sets, bit for bit; returns the results."""
    settings = trace.settings
    results = list(replay_trace(trace, settings.commitment(), settings.selector, slots, sets=True))
    assert trace.verifications > len(trace.shards)
    for (_, verifications), result in zip(trace.requests(), results, strict=True):
        np.testing.assert_array_equal(result.eligible_set, verifications.eligible)
        np.testing.assert_array_equal(result.used_set, verifications.used)
    return results


def prompts(each):
    return {f"p{i}": prompt for i, prompt in enumerate(pocket.prompts(each))}


@pytest.fixture(scope="module")
def live_trace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("live")
    return record(pocket.engine(), directory, prompts(1), selector="acceptmoe", max_new_tokens=40)


def test_replay_of_the_recorded_policy_is_the_live_run(live_trace):
    results = assert_replay_is_the_run(live_trace)
    assert all((result.eligible < result.natural_union).any() for result in results)


def recall(trace, policy, budget):
    config = dataclasses.replace(trace.settings.selector, policy=policy, budget=budget)
    results = list(replay_trace(trace, trace.settings.commitment(), config))
    kept, picks = (
        sum(int(getattr(result, name).sum()) for result in results)
        for name in ("path_picks_kept", "path_picks")
    )
    return kept / picks


def test_at_one_budget_acceptmoe_keeps_more_of_the_accepted_path_than_moe_spec(live_trace):
    ours, theirs = (recall(live_trace, policy, 32) for policy in ("acceptmoe_fix", "moe_spec"))
    assert ours > theirs + 0.05


PAIRS = {
    "qwen3_moe": (pocket.TARGET, pocket.HEAD),
    "gpt_oss": (pocket.GPT_OSS_TARGET, pocket.GPT_OSS_HEAD),
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("slots", [None, 24])
def test_replay_is_the_live_run_of_every_policy(tmp_path, pair, slots):
    target, head = PAIRS[pair]
    engine = Engine.from_pretrained(
        str(target),
        str(head),
        dtype="float32",
        offload=None if slots is None else OffloadConfig(slots),
    )
    for policy in selection.POLICIES:
        selector = SelectorConfig(policy=policy, top_k=4, budget=20)
        before = engine.runner.loads.table
        trace = record(engine, tmp_path / policy, prompts(1), selector=selector, max_new_tokens=40)
        live = engine.runner.loads.table - before
        results = assert_replay_is_the_run(trace, slots)
        if slots is not None:
            replayed = (
                sum(int(getattr(result, name).sum()) for result in results)
                for name in ("hits", "misses", "waves")
            )
            assert tuple(replayed) == (live.hits, live.misses, live.waves)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_on_natural_traces_acceptmoe_keeps_more_than_moe_spec_at_every_budget(tmp_path, pair):
    engine = pocket.engine(*PAIRS[pair])
    trace = record(engine, tmp_path, prompts(2), selector="native", max_new_tokens=64)
    for budget in (16, 32):
        assert recall(trace, "acceptmoe_fix", budget) > recall(trace, "moe_spec", budget)
