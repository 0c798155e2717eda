"""Expert selection rule by rule: set sizes, pruning, ablations, and the edges of each."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax import selection
from acceptmoe_jax.selection import SelectorConfig
from tests.selection_blocks import (
    POLICY_CONFIGS,
    assert_same,
    block,
    compiled_select,
    each_norm,
    each_policy,
    members,
    select,
    used,
)

# Effective rank and the other size rules.


def residual_size(q, rule="effective_rank", mass=0.9):
    return int(selection.residual_size(jnp.array(q, jnp.float32), rule, mass))


@pytest.mark.parametrize("rule", ["effective_rank", "participation_ratio"])
@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 100, 128, 512])
def test_a_uniform_demand_over_m_experts_is_worth_m(rule, m):
    q = np.zeros(512)
    q[:m] = 1 / m
    assert residual_size(q, rule) == m


@pytest.mark.parametrize("rule", ["effective_rank", "participation_ratio", "mass"])
def test_a_single_demanded_expert_is_worth_one_and_none_is_worth_none(rule):
    assert residual_size([0, 0, 1, 0], rule) == 1
    assert residual_size([0, 0, 0, 0], rule) == 0


@pytest.mark.parametrize("rule", ["effective_rank", "participation_ratio", "mass"])
def test_experts_without_demand_do_not_change_the_size(rule):
    q = np.array([0.5, 0.2, 0.2, 0.1])
    assert residual_size(q, rule) == residual_size([0, *q[:2], 0, 0, *q[2:], 0], rule)


def test_scaling_the_demand_changes_nothing():
    demand = jnp.array([3.0, 1.0, 0.0, 2.0, 0.5], jnp.float32)
    anchor = jnp.array([True, False, False, False, False])
    q = selection.residual_distribution(demand, anchor)
    for scale in (1e-30, 1e30):
        scaled = selection.residual_distribution(demand * scale, anchor)
        np.testing.assert_allclose(scaled, q, rtol=1e-6)


def test_size_rules_on_a_distribution_worked_by_hand():
    q = [0.5, 0.25, 0.125, 0.125]
    # exp(1.75 ln 2) = 3.364; 1 / (0.25 + 0.0625 + 2 * 0.015625) = 2.909; .5 + .25 + .125 < .9.
    assert residual_size(q, "effective_rank") == 4
    assert residual_size(q, "participation_ratio") == 3
    assert residual_size(q, "mass", 0.9) == 4
    assert residual_size(q, "mass", 0.875) == 3
    assert residual_size(q, "mass", 0.5) == 1


def test_a_mass_met_exactly_needs_no_further_expert():
    assert residual_size([0.1] * 10, "mass", 0.9) == 9


@pytest.mark.parametrize("rule", ["participation_ratio", "mass"])
def test_the_configured_size_rule_sizes_the_set(rule):
    config = SelectorConfig(top_k=3, size_rule=rule, prune=False)
    result = select(*block(6), config=config)
    assert result.eligible.sum() == 3 + result.effective_rank_size
    q = selection.residual_distribution(result.demand, result.anchor)
    assert result.effective_rank_size == residual_size(q, rule)


# Pruning.


@pytest.mark.parametrize("protect_anchor", [True, False])
def test_pruning_keeps_its_promises(protect_anchor):
    config = SelectorConfig(top_k=3, protect_anchor=protect_anchor)
    for seed in range(25):
        arrays = block(seed)
        resident = arrays[-1]
        result = select(*arrays, config=config)
        demand, pruned = np.asarray(result.demand), members(result.pruned)
        assert np.asarray(result.assignments)[list(pruned)].sum() <= result.rerouting_budget
        assert result.eligible.sum() >= config.top_k
        removable = members(result.eligible_before_pruning & ~resident)
        if protect_anchor:
            removable -= members(result.anchor)
            assert members(result.anchor) <= members(result.eligible)
        order = sorted(removable, key=lambda e: (demand[e], e))
        assert pruned == set(order[: len(pruned)]), "a prefix in ascending demand"


def test_an_unprotected_anchor_can_be_pruned_but_top_k_experts_stay():
    # Root on 0, 1; four cheap rows displaced from 2..5 buy a budget that 0 and 1 fit into.
    eligible = jnp.array([True, True, True, False, False])
    demand = jnp.array([0.1, 0.2, 0.9, 0.0, 0.0])
    assignments = jnp.array([1, 1, 3, 2, 2])
    pruned = selection.prune(eligible, eligible, demand, assignments, jnp.int32(4), 2)
    assert members(pruned) == {0}


def test_pruning_ties_go_to_the_lower_expert():
    eligible = jnp.ones(4, bool)
    demand = jnp.array([0.5, 0.2, 0.2, 0.9])
    assignments = jnp.array([1, 1, 1, 1])
    pruned = selection.prune(eligible, eligible, demand, assignments, jnp.int32(1), 1)
    assert members(pruned) == {1}


def test_pruning_stops_at_the_first_expert_that_does_not_fit():
    eligible = jnp.ones(4, bool)
    demand = jnp.array([0.1, 0.2, 0.3, 0.9])
    assignments = jnp.array([1, 5, 1, 1])
    pruned = selection.prune(eligible, eligible, demand, assignments, jnp.int32(3), 1)
    assert members(pruned) == {0}


@pytest.mark.parametrize("policy", ["acceptmoe", "acceptmoe_fix"])
def test_pruning_can_be_switched_off_and_needs_a_residency(policy):
    config = POLICY_CONFIGS[policy]
    logits, depth, valid, phat, _ = block(9)
    none_resident = np.zeros(14, bool)
    pruned = select(logits, depth, valid, phat, none_resident, config=config)
    unpruned = select(
        logits, depth, valid, phat, none_resident, config=dataclasses.replace(config, prune=False)
    )
    unknown = select(logits, depth, valid, phat, config=config)
    everything = select(logits, depth, valid, phat, ~none_resident, config=config)
    assert pruned.pruned.any()
    for result in (unpruned, unknown, everything):
        assert members(result.eligible) == members(pruned.eligible_before_pruning)
        assert result.rerouting_budget == pruned.rerouting_budget


def test_moe_spec_ignores_the_residency():
    logits, depth, valid, phat, _ = block(2)
    nothing = np.zeros(14, bool)
    with_residency = select(logits, depth, valid, phat, nothing, config=POLICY_CONFIGS["moe_spec"])
    without = select(logits, depth, valid, phat, config=POLICY_CONFIGS["moe_spec"])
    assert_same(with_residency, without)


# Ablations.


def test_without_an_anchor_demand_is_ranked_over_all_experts():
    config = SelectorConfig(top_k=3, anchor=False)
    result = select(*block(9), config=config)
    assert not result.anchor.any()
    demand = np.asarray(result.demand)
    q = demand / demand.sum()
    size = max(residual_size(q), 3)
    kept = sorted(range(14), key=lambda e: (-demand[e], e))[:size]
    assert members(result.eligible_before_pruning) == set(kept)


def test_without_an_anchor_the_fixed_policy_fills_its_budget():
    config = SelectorConfig(policy="acceptmoe_fix", top_k=3, budget=5, anchor=False)
    result = select(*block(9), config=config)
    assert result.eligible_before_pruning.sum() == 5


def test_without_an_anchor_at_least_top_k_experts_are_kept():
    # One row that wants expert 4 alone: its effective rank is 1.
    logits = np.zeros((1, 6), np.float32)
    logits[0, 4] = 30.0
    config = SelectorConfig(top_k=3, anchor=False)
    arguments = (logits, np.zeros(1, np.int32), np.ones(1, bool), np.ones(1))
    result = compiled_select(*arguments, config=config)
    assert result.effective_rank_size == 1
    assert members(result.eligible) == {4, 0, 1}


def test_uniform_weighs_every_valid_row_one():
    arrays = block(1)
    result = select(*arrays, config=SelectorConfig(top_k=3, uniform=True))
    np.testing.assert_array_equal(result.alpha, arrays[2].astype(np.float32))


@each_norm
@pytest.mark.parametrize("renormalize", [True, False])
def test_truncation_drops_picks_outside_the_set_and_keeps_the_others(renormalize, norm_topk_prob):
    arrays = block(7)
    valid = arrays[2]
    config = SelectorConfig(
        policy="moe_spec",
        top_k=3,
        budget=4,
        moe_spec_mode="truncate",
        renormalize_truncated=renormalize,
        norm_topk_prob=norm_topk_prob,
    )
    result = select(*arrays, config=config)
    native = SelectorConfig(policy="native", top_k=3, norm_topk_prob=norm_topk_prob)
    natural = select(*arrays, config=native)
    np.testing.assert_array_equal(result.expert_ids, natural.natural_ids)
    kept = np.asarray(result.eligible)[np.asarray(natural.natural_ids)]
    assert 0 < kept.sum() < kept.size
    expect = np.where(kept, natural.weights, 0.0)
    if renormalize:
        sums = expect.sum(axis=1, keepdims=True)
        total = np.asarray(natural.weights).sum(axis=1, keepdims=True)
        expect = np.divide(expect * total, sums, out=np.zeros_like(expect), where=sums > 0)
    np.testing.assert_allclose(result.weights, expect, rtol=1e-6)
    live = kept & valid[:, None]
    assert used(result) == set(np.asarray(natural.natural_ids)[live].tolist())


def test_a_row_that_truncation_empties_is_all_zeros():
    logits = np.array([[5, 4, 0, 0, 0], [5, 4, 0, 0, 0], [0, 0, 0, 0.1, 0.2]], np.float32)
    config = SelectorConfig(
        policy="moe_spec",
        top_k=2,
        budget=2,
        moe_spec_mode="truncate",
        renormalize_truncated=True,
    )
    arguments = (logits, np.array([0, 1, 1]), np.ones(3, bool), np.ones(2))
    result = compiled_select(*arguments, config=config)
    assert members(result.eligible) == {0, 1}
    np.testing.assert_array_equal(result.weights[2], [0.0, 0.0])
    assert used(result) == {0, 1}


# Edges: ties, -inf, NaN, padding, k = 1.


@each_policy
def test_ties_go_to_the_lower_expert(policy):
    logits, *rest = block(0)
    result = select(np.zeros_like(logits), *rest, config=POLICY_CONFIGS[policy])
    np.testing.assert_array_equal(result.natural_ids, [[0, 1, 2]] * 17)
    np.testing.assert_array_equal(result.expert_ids, [[0, 1, 2]] * 17)
    assert used(result) == {0, 1, 2}


def test_tied_demand_is_ranked_by_expert_id():
    values = jnp.array([0.2, 0.5, 0.5, 0.0, 0.2])
    np.testing.assert_array_equal(selection.descending_rank(values), [2, 0, 1, 4, 3])


def test_weights_with_and_without_renormalising_worked_by_hand():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    arguments = (logits, np.zeros(1, np.int32), np.ones(1, bool), np.ones(1))
    for norm_topk_prob, weights in ((True, [0.731, 0.269]), (False, [0.644, 0.237])):
        config = SelectorConfig(policy="native", top_k=2, norm_topk_prob=norm_topk_prob)
        result = compiled_select(*arguments, config=config)
        np.testing.assert_allclose(result.weights[0], weights, atol=5e-4)


@each_norm
@each_policy
def test_a_pick_at_minus_infinity_weighs_nothing_and_is_not_used(policy, norm_topk_prob):
    logits, depth, valid, phat, resident = block(3)
    logits[1], logits[2, 6:], logits[4, 1:] = -np.inf, -np.inf, -np.inf
    logits[1, 5] = 2.0
    config = dataclasses.replace(POLICY_CONFIGS[policy], norm_topk_prob=norm_topk_prob)
    result = select(logits, depth, valid, phat, resident, config=config)
    assert np.isfinite(result.weights).all() and np.isfinite(result.demand).all()
    ids, weights = np.asarray(result.expert_ids), np.asarray(result.weights)
    dead = np.take_along_axis(logits, ids, axis=1) == -np.inf
    assert dead[1].sum() >= 2 and dead[4].sum() >= 2
    assert (weights[dead] == 0).all()
    assert used(result) == set(ids[(weights > 0) & valid[:, None]].tolist())
    reachable = np.isfinite(logits[:, np.asarray(result.eligible)]).any(axis=1)
    np.testing.assert_array_equal(weights.sum(axis=1) > 0, reachable)


@each_norm
@each_policy
def test_a_row_without_any_expert_is_all_zeros(policy, norm_topk_prob):
    logits, depth, valid, phat, resident = block(3)
    logits[4] = -np.inf
    config = dataclasses.replace(POLICY_CONFIGS[policy], norm_topk_prob=norm_topk_prob)
    result = select(logits, depth, valid, phat, resident, config=config)
    np.testing.assert_array_equal(result.weights[4], [0.0, 0.0, 0.0])
    assert np.isfinite(result.demand).all() and np.isfinite(result.weights).all()


@each_norm
@each_policy
def test_what_padded_rows_hold_does_not_matter(policy, norm_topk_prob):
    logits, depth, valid, phat, resident = block(3)
    config = dataclasses.replace(POLICY_CONFIGS[policy], norm_topk_prob=norm_topk_prob)
    clean = select(logits, depth, valid, phat, resident, config=config)
    for junk_logit, junk_depth in ((np.nan, -1), (np.inf, 2), (1e30, 99)):
        dirty_logits = np.where(valid[:, None], logits, np.float32(junk_logit))
        dirty_depth = np.where(valid, depth, junk_depth)
        dirty = select(dirty_logits, dirty_depth, valid, phat, resident, config=config)
        # A padded row's own routing is whatever its logits say; nothing else may differ.
        for name in ("natural_ids", "expert_ids", "weights"):
            repaired = jnp.where(valid[:, None], getattr(dirty, name), getattr(clean, name))
            dirty = dirty.replace(**{name: repaired})
        assert_same(clean, dirty)
    np.testing.assert_array_equal(clean.alpha[~valid], 0.0)


def test_nan_in_a_valid_row_is_not_hidden():
    arrays = block(3)
    arrays[0][1] = np.nan
    for policy in ("native", "acceptmoe"):
        result = select(*arrays, config=POLICY_CONFIGS[policy])
        assert np.isnan(result.weights[1]).any()


def test_a_depth_without_nodes_weighs_nothing():
    alpha = selection.commitment_weights(
        jnp.array([0, 2, 2, 1]),
        jnp.array([True, True, True, False]),
        jnp.array([1.0, 0.81, 0.36]),
        0.5,
        0.5,
    )
    np.testing.assert_allclose(alpha, [1.0, 0.6 / np.sqrt(2), 0.6 / np.sqrt(2), 0.0], rtol=1e-6)


def test_a_depth_beyond_the_table_takes_its_last_entry():
    arguments = (jnp.array([0, 1, 7]), jnp.ones(3, bool), jnp.array([1.0, 0.25]), 0.5, 0.0)
    np.testing.assert_allclose(selection.commitment_weights(*arguments), [1.0, 0.5, 0.5])


@each_norm
def test_one_expert_a_token_keeps_its_dimension(norm_topk_prob):
    logits, depth, valid, phat, resident = block(3)
    config = SelectorConfig(top_k=1, norm_topk_prob=norm_topk_prob)
    result = select(logits, depth, valid, phat, resident, config=config)
    assert result.natural_ids.shape == result.expert_ids.shape == result.weights.shape == (17, 1)
    if norm_topk_prob:
        np.testing.assert_array_equal(result.weights, np.ones((17, 1), np.float32))
    else:
        assert (np.asarray(result.weights)[valid] < 1).all()
    assert members(result.anchor) == {int(np.argmax(logits[0]))}


@each_policy
def test_a_block_without_valid_rows_uses_nothing(policy):
    logits, depth, _, phat, resident = block(3)
    nobody = np.zeros(17, bool)
    result = select(logits, depth, nobody, phat, resident, config=POLICY_CONFIGS[policy])
    assert result.used_count == 0
    assert not result.assignments.any()
    assert np.isfinite(result.entropy)


@each_policy
def test_used_ids_ascend_and_are_padded_with_the_number_of_experts(policy):
    logits, depth, valid, phat, resident = block(11)
    result = select(logits, depth, valid, phat, resident, config=POLICY_CONFIGS[policy])
    ids, count = result.used_ids.tolist(), int(result.used_count)
    live = np.asarray(result.expert_ids)[valid]
    assert ids[:count] == sorted(set(live.ravel().tolist()))
    assert ids[count:] == [14] * (14 - count)
