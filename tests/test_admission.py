"""Residency admission and cache-conditional routing: what each does with a known residency."""

import dataclasses

import numpy as np
import pytest

from acceptmoe_jax import selection
from acceptmoe_jax.selection import SelectorConfig
from tests import selection_oracle
from tests.selection_blocks import (
    POLICY_CONFIGS,
    assert_same,
    block,
    compiled_select,
    each_norm,
    mask_of,
    members,
    select,
    used,
)

ADMITTING = SelectorConfig(top_k=3, admit=2)
FAVOURING = SelectorConfig(policy="cache_conditional", top_k=3, cache_bias=0.4)
each_sized_policy = pytest.mark.parametrize("policy", ["acceptmoe", "acceptmoe_fix"])


def displaced(result):
    return int(np.asarray(result.assignments)[~np.asarray(result.eligible)].sum())


def misses(result, resident):
    return used(result) - members(resident)


# Admission.


@pytest.mark.parametrize("protect_anchor", [True, False])
@each_sized_policy
def test_admitting_blocks_agree_with_the_reference_of_loops(policy, protect_anchor):
    config = dataclasses.replace(POLICY_CONFIGS[policy], admit=2, protect_anchor=protect_anchor)
    admitted = pruned_more = 0
    for seed in range(25):
        arrays = block(seed)
        size = None if policy == "acceptmoe" else config.budget - config.top_k
        settings = dict(top_k=3, protect_anchor=protect_anchor, size=size)
        expect = selection_oracle.select(*arrays, admit=2, **settings)
        result = select(*arrays, config=config)
        for name in ("eligible_before_pruning", "admitted", "pruned", "eligible"):
            assert members(getattr(result, name)) == expect[name], (seed, name)
        assert used(result) == expect["used"]
        np.testing.assert_array_equal(result.expert_ids, expect["expert_ids"])
        admitted += bool(expect["admitted"])
        pruned_more += expect["pruned"] > selection_oracle.select(*arrays, **settings)["pruned"]
    assert admitted > 5 and pruned_more > 2, "the blocks must exercise admission"


@each_sized_policy
def test_admission_keeps_its_promises(policy):
    config = dataclasses.replace(POLICY_CONFIGS[policy], admit=2)
    for seed in range(25):
        arrays = block(seed)
        resident = arrays[-1]
        result = select(*arrays, config=config)
        without = select(*arrays, config=dataclasses.replace(config, admit=0))
        demand, admitted = np.asarray(result.demand), members(result.admitted)
        before = members(result.eligible_before_pruning)
        assert before == members(without.eligible_before_pruning)
        assert result.rerouting_budget == without.rerouting_budget
        candidates = sorted(
            (members(resident) & members(demand > 0)) - before, key=lambda e: (-demand[e], e)
        )
        assert admitted == set(candidates[:2]), "the most demanded of those that cost no transfer"
        assert members(result.pruned) >= members(without.pruned)
        assert displaced(result) <= 2 * int(result.rerouting_budget)
        assert used(result) == members(result.eligible)
        assert misses(result, resident) <= misses(without, resident)
        assert len(members(result.eligible)) >= config.top_k


def test_what_admission_takes_back_is_spent_on_pruning():
    # By demand, S = {0, 1, 2, 3} and 4 lies outside; 3 has two assignments, which a(S) = 1 cannot
    # pay for. Letting the resident 4 back in frees its one.
    logits = np.full((6, 7), -9.0, np.float32)
    for row, (first, second) in enumerate([(0, 1), (0, 2), (0, 2), (0, 3), (1, 3), (0, 4)]):
        logits[row, first], logits[row, second] = 3.0, 1.0
    logits[3, 3] = 0.9
    logits[5, 4] = 0.0
    arrays = (logits, np.array([0, 1, 1, 1, 1, 1]), np.ones(6, bool), np.array([1.0, 0.5]))
    config = SelectorConfig(policy="acceptmoe_fix", top_k=2, budget=4)
    resident = mask_of([0, 1, 2, 4], 7)
    without = compiled_select(*arrays, resident, config=config)
    assert members(without.eligible) == {0, 1, 2, 3} and without.rerouting_budget == 1
    result = compiled_select(*arrays, resident, config=dataclasses.replace(config, admit=1))
    assert members(result.admitted) == {4} and members(result.pruned) == {3}
    assert displaced(result) == 2 == 2 * result.rerouting_budget


def test_with_nothing_resident_or_no_residency_admission_changes_nothing():
    for seed in range(5):
        *arrays, _ = block(seed)
        for resident in (np.zeros(14, bool), None):
            ours = select(*arrays, resident, config=ADMITTING)
            assert not ours.admitted.any()
            assert_same(ours, select(*arrays, resident, config=SelectorConfig(top_k=3)))


def test_admission_without_pruning_only_adds():
    config = dataclasses.replace(ADMITTING, prune=False)
    added = 0
    for seed in range(10):
        arrays = block(seed)
        result = select(*arrays, config=config)
        assert not result.pruned.any()
        before = members(result.eligible_before_pruning)
        assert members(result.eligible) == before | members(result.admitted)
        assert displaced(result) <= int(result.rerouting_budget)
        added += bool(result.admitted.any())
    assert added


@pytest.mark.parametrize("policy", ["native", "moe_spec", "cache_conditional"])
def test_policies_without_a_sized_set_admit_nobody(policy):
    config = SelectorConfig(policy=policy, top_k=3, budget=6)
    arrays = block(7)
    ours = select(*arrays, config=dataclasses.replace(config, admit=5))
    assert_same(ours, select(*arrays, config=config))


def test_admission_ties_go_to_the_lower_expert():
    demand = np.array([0.9, 0.2, 0.3, 0.2, 0.0, 0.3], np.float32)
    eligible, resident = mask_of([0], 6), mask_of([0, 1, 3, 4, 5], 6)
    for most, admitted in ((0, set()), (1, {5}), (2, {5, 1}), (9, {5, 1, 3})):
        assert members(selection.admit(eligible, resident, demand, most)) == admitted


# Cache-conditional routing.


@each_norm
@pytest.mark.parametrize("keep", [0, 2])
def test_favouring_blocks_agree_with_the_reference_of_loops(keep, norm_topk_prob):
    config = dataclasses.replace(FAVOURING, cache_keep=keep, norm_topk_prob=norm_topk_prob)
    changed = 0
    for seed in range(10):
        logits, depth, valid, phat, resident = block(seed)
        expect = selection_oracle.cache_conditional(
            logits, valid, resident, top_k=3, bias=0.4, keep=keep, norm_topk_prob=norm_topk_prob
        )
        result = select(logits, depth, valid, phat, resident, config=config)
        np.testing.assert_array_equal(result.expert_ids[valid], expect["expert_ids"][valid])
        np.testing.assert_allclose(result.weights[valid], expect["weights"][valid], rtol=1e-5)
        assert used(result) == expect["used"]
        changed += used(result) != members(np.asarray(result.assignments) > 0)
    assert changed > 5, "the bonus must matter"


def test_the_bonus_is_a_share_of_the_mean_range_worked_by_hand():
    logits = np.array([[0, 4, 1], [2, -4, 0], [5, 5, 5], [9, -9, 0]], np.float32)
    logits = np.concatenate([logits, [[1, -np.inf, 3]], np.full((1, 3), -np.inf)])
    valid = np.array([True, True, True, False, True, True])
    # Ranges 4, 6, 0 and 2; a padded row and one without a finite logit count for nothing.
    assert float(selection.cache_bonus(logits, valid, 0.5)) == pytest.approx(0.5 * 12 / 4)
    assert float(selection.cache_bonus(logits, np.zeros(6, bool), 0.5)) == 0.0


def test_a_rows_best_experts_stay_chosen_and_all_eligible():
    config = dataclasses.replace(FAVOURING, cache_bias=50.0, cache_keep=2)
    for seed in range(5):
        arrays = block(seed)
        result = select(*arrays, config=config)
        np.testing.assert_array_equal(result.expert_ids[:, :2], result.natural_ids[:, :2])
        third = np.asarray(result.expert_ids)[:, 2]
        kept = np.asarray(result.natural_ids)[:, :2]
        others = [members(arrays[-1]) - set(row) for row in kept.tolist()]
        assert all(expert in rest for expert, rest in zip(third, others) if rest)
        assert result.eligible.all() and result.rerouting_budget == 0


@each_norm
def test_without_a_bias_or_a_residency_or_under_a_forced_set_routing_is_native(norm_topk_prob):
    config = dataclasses.replace(FAVOURING, norm_topk_prob=norm_topk_prob)
    *arrays, resident = block(6)
    everything = np.ones(14, bool)
    native = dataclasses.replace(config, policy="native")
    expect = select(*arrays, resident, config=native)
    for ours in (
        select(*arrays, None, config=config),
        select(*arrays, everything, config=config),
        select(*arrays, resident, config=dataclasses.replace(config, cache_bias=0.0)),
        select(*arrays, resident, config=config, eligible_override=everything),
    ):
        assert_same(ours, expect)
    assert used(select(*arrays, resident, config=config)) != used(expect)


def test_more_bias_means_no_more_misses():
    arrays = block(11)
    counts = [
        len(misses(select(*arrays, config=config), arrays[-1]))
        for config in (dataclasses.replace(FAVOURING, cache_bias=b) for b in (0, 0.2, 0.5, 1.0))
    ]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"admit": -1}, "admit"),
        ({"cache_bias": -0.1}, "cache_bias"),
        ({"cache_bias": float("inf")}, "cache_bias"),
        ({"cache_keep": -1}, "cache_keep"),
        ({"cache_keep": 4, "top_k": 3}, "cache_keep"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=named):
        SelectorConfig(**settings)
