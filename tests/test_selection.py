"""Expert selection: the worked cases, the facts it promises, and a second implementation.

Case file: worked cases with every intermediate, from an independent NumPy reference.
Axes: T tree nodes, E experts, k experts a token.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax import selection
from acceptmoe_jax.selection import SelectorConfig
from tests import selection_oracle

CASES = json.loads((pathlib.Path(__file__).parent / "data" / "selection.json").read_text())
BY_NAME = {case["name"]: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=list(BY_NAME))

# Compiling would be most of these tests' time. The worked cases, of many shapes, are compiled
# without optimisation, as are other odd shapes; random blocks share one and run op by op.
select = selection.select
compiled_select = jax.jit(
    select,
    static_argnames="config",
    compiler_options={"xla_backend_optimization_level": 0},
)

POLICY_CONFIGS = {
    "native": SelectorConfig(policy="native", top_k=3),
    "acceptmoe": SelectorConfig(policy="acceptmoe", top_k=3),
    "acceptmoe_fix": SelectorConfig(policy="acceptmoe_fix", top_k=3, budget=6),
    "moe_spec": SelectorConfig(policy="moe_spec", top_k=3, budget=6),
}
each_policy = pytest.mark.parametrize("policy", POLICY_CONFIGS)
each_norm = pytest.mark.parametrize("norm_topk_prob", [True, False])


def members(mask):
    return set(np.flatnonzero(mask).tolist())


def mask_of(ids, size):
    return np.isin(np.arange(size), ids)


def used(result):
    return set(np.asarray(result.used_ids)[: int(result.used_count)].tolist())


def case_arrays(case):
    logits = np.array(case["logits"], np.float32)
    experts = logits.shape[1]
    resident = range(experts) if case["resident"] is None else case["resident"]
    return (
        logits,
        np.array(case["depth"], np.int32),
        np.array(case["valid"]),
        np.array(case["phat"], np.float32),
        mask_of(list(resident), experts),
    )


def case_config(case, **settings):
    return SelectorConfig(top_k=case["k"], beta=case["beta"], gamma=case["gamma"], **settings)


def block(seed, rows=17, experts=14, padded=3, spread=1.5):
    """A random block with a few padded rows at its end, and a random residency."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=spread, size=(rows, experts)).astype(np.float32)
    logits += rng.normal(scale=1.0, size=experts).astype(np.float32)
    depth = np.sort(np.concatenate([[0], rng.integers(1, 5, rows - 1)])).astype(np.int32)
    valid = np.arange(rows) < rows - padded
    phat = np.concatenate([[1.0], np.sort(rng.uniform(0.05, 0.9, 4))[::-1]]).astype(np.float32)
    return logits, depth, valid, phat, rng.random(experts) < 0.4


def assert_same(ours, theirs, exactly=True):
    """Every field of two results: equal, or floats within rounding and the rest equal."""
    for field in dataclasses.fields(ours):
        a = np.asarray(getattr(ours, field.name))
        b = np.asarray(getattr(theirs, field.name))
        assert a.dtype == b.dtype and a.shape == b.shape, field.name
        if exactly or a.dtype != np.float32:
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=field.name)


# The worked cases.


@each_case
def test_every_intermediate_of_the_worked_cases(case):
    expect, valid = case["expect"], np.array(case["valid"])
    result = compiled_select(*case_arrays(case), config=case_config(case))
    np.testing.assert_array_equal(result.natural_ids, expect["natural_topk"])
    np.testing.assert_allclose(result.alpha, expect["alpha"], atol=1e-6)
    np.testing.assert_allclose(result.demand, expect["demand"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result.assignments, expect["assignments"])
    assert members(result.anchor) == set(expect["anchor"])
    np.testing.assert_allclose(result.entropy, expect["entropy"], rtol=1e-5, atol=1e-6)
    assert result.effective_rank_size == expect["effective_rank_size"]
    assert members(result.eligible_before_pruning) == set(expect["eligible_before_pruning"])
    assert result.rerouting_budget == expect["rerouting_budget"]
    assert members(result.pruned) == set(expect["pruned"])
    assert members(result.eligible) == set(expect["eligible"])
    assert result.used_ids[: result.used_count].tolist() == expect["used"]
    np.testing.assert_array_equal(result.expert_ids, expect["expert_ids"])
    np.testing.assert_allclose(
        result.weights[valid], np.array(expect["weights"])[valid], rtol=1e-5, atol=1e-6
    )


@each_case
def test_weights_of_the_worked_cases_without_renormalising(case):
    valid = np.array(case["valid"])
    result = compiled_select(*case_arrays(case), config=case_config(case, norm_topk_prob=False))
    np.testing.assert_array_equal(result.expert_ids, case["expect"]["expert_ids"])
    np.testing.assert_allclose(
        result.weights[valid],
        np.array(case["expect"]["weights_not_renormalised"])[valid],
        rtol=1e-5,
        atol=1e-6,
    )


@each_case
def test_eligible_sets_of_the_worked_cases_without_anchor_protection(case):
    result = compiled_select(*case_arrays(case), config=case_config(case, protect_anchor=False))
    assert members(result.eligible) == set(case["expect_unprotected"]["eligible"])


@each_case
def test_fixed_size_sets_of_the_worked_cases(case):
    config = case_config(case, policy="acceptmoe_fix", budget=case["budget"])
    result = compiled_select(*case_arrays(case), config=config)
    assert members(result.eligible_before_pruning) == set(case["expect_fixed"]["eligible"])


@each_case
def test_moe_spec_on_the_worked_cases(case):
    expect = case["expect_moe_spec"]
    logits, depth, valid, phat, resident = case_arrays(case)
    config = case_config(case, policy="moe_spec", budget=case["budget"])
    result = compiled_select(logits, depth, valid, phat, resident, config=config)
    scores = selection.router_mass(jnp.asarray(logits), jnp.asarray(valid))
    np.testing.assert_allclose(scores, expect["scores"], rtol=1e-5, atol=1e-6)
    assert members(result.eligible) == set(expect["eligible"])
    np.testing.assert_array_equal(result.expert_ids, expect["expert_ids"])


def test_the_case_that_can_be_followed_on_paper():
    case = BY_NAME["worked_by_hand"]
    result = compiled_select(*case_arrays(case), config=case_config(case))
    assert members(result.eligible_before_pruning) == {0, 3, 4, 6, 8}
    assert result.rerouting_budget == 2
    assert members(result.pruned) == {8}


# A second implementation.


@pytest.mark.parametrize("protect_anchor", [True, False])
@pytest.mark.parametrize("policy", ["acceptmoe", "acceptmoe_fix"])
def test_random_blocks_agree_with_a_reference_of_sorts_and_loops(policy, protect_anchor):
    config = dataclasses.replace(POLICY_CONFIGS[policy], protect_anchor=protect_anchor)
    some_pruned = 0
    for seed in range(25):
        arrays = block(seed)
        size = None if policy == "acceptmoe" else config.budget - config.top_k
        expect = selection_oracle.select(
            *arrays, top_k=3, protect_anchor=protect_anchor, size=size
        )
        result = select(*arrays, config=config)
        for name in ("anchor", "eligible_before_pruning", "pruned", "eligible"):
            assert members(getattr(result, name)) == expect[name], (seed, name)
        for name in ("natural_ids", "assignments", "effective_rank_size", "rerouting_budget"):
            np.testing.assert_array_equal(getattr(result, name), expect[name], err_msg=name)
        for name in ("alpha", "demand", "entropy", "weights"):
            np.testing.assert_allclose(
                getattr(result, name), expect[name], rtol=1e-5, atol=1e-6, err_msg=name
            )
        np.testing.assert_array_equal(result.expert_ids, expect["expert_ids"])
        assert used(result) == expect["used"]
        some_pruned += bool(expect["pruned"])
    assert some_pruned > 5, "the blocks must exercise pruning"


# Facts about sets and weights.


@each_norm
def test_restricting_to_all_experts_is_native_bit_for_bit(norm_topk_prob):
    config = SelectorConfig(top_k=3, norm_topk_prob=norm_topk_prob)
    native = dataclasses.replace(config, policy="native")

    @jax.jit
    def both(arrays, override):
        forced = select(*arrays, config=config, eligible_override=override)
        return forced, select(*arrays, config=native)

    for seed in range(5):
        forced, natural = both(block(seed), np.ones(14, bool))
        for name in ("expert_ids", "weights", "used_ids", "used_count", "eligible"):
            np.testing.assert_array_equal(
                getattr(forced, name), getattr(natural, name), err_msg=name
            )


def test_a_forced_set_changes_routing_and_nothing_before_it():
    arrays = block(3)
    config = SelectorConfig(top_k=3)
    free = select(*arrays, config=config)
    forced_set = mask_of([0, 2, 5, 7, 11], 14)
    forced = select(*arrays, config=config, eligible_override=forced_set)
    np.testing.assert_array_equal(forced.eligible, forced_set)
    assert used(forced) <= {0, 2, 5, 7, 11}
    for name in ("demand", "eligible_before_pruning", "rerouting_budget", "pruned"):
        np.testing.assert_array_equal(getattr(forced, name), getattr(free, name))


@each_norm
@pytest.mark.parametrize("policy", ["acceptmoe", "acceptmoe_fix"])
def test_the_root_keeps_its_experts_and_weights_exactly(policy, norm_topk_prob):
    config = dataclasses.replace(POLICY_CONFIGS[policy], norm_topk_prob=norm_topk_prob)
    compiled = jax.jit(functools.partial(select, config=config))
    for seed in range(20):
        # The set is data in both calls, so the program is one and the bits must agree.
        arrays = block(seed)
        natural = compiled(*arrays, eligible_override=np.ones(14, bool))
        own_set = natural.eligible_before_pruning & ~natural.pruned
        restricted = compiled(*arrays, eligible_override=own_set)
        np.testing.assert_array_equal(restricted.expert_ids[0], natural.natural_ids[0])
        np.testing.assert_array_equal(restricted.weights[0], natural.weights[0])


@each_policy
def test_no_row_goes_outside_the_eligible_set(policy):
    for seed in range(10):
        arrays = block(seed)
        result = select(*arrays, config=POLICY_CONFIGS[policy])
        assert used(result) <= members(result.eligible)
        assert members(result.eligible) <= members(result.eligible_before_pruning)


@pytest.mark.parametrize("policy", ["acceptmoe", "acceptmoe_fix"])
def test_every_eligible_expert_is_used(policy):
    for seed in range(20):
        result = select(*block(seed), config=POLICY_CONFIGS[policy])
        assert used(result) == members(result.eligible)


def test_native_uses_the_natural_union_and_prunes_nothing():
    logits, depth, valid, phat, _ = block(5)
    nothing = np.zeros(14, bool)
    result = select(logits, depth, valid, phat, nothing, config=POLICY_CONFIGS["native"])
    assert members(result.eligible) == set(range(14))
    assert used(result) == members(np.asarray(result.assignments) > 0)
    assert result.rerouting_budget == 0
    assert not result.pruned.any()
    np.testing.assert_array_equal(result.expert_ids, result.natural_ids)


@each_policy
def test_weights_of_valid_rows_sum_to_one(policy):
    logits, depth, valid, phat, resident = block(8)
    result = select(logits, depth, valid, phat, resident, config=POLICY_CONFIGS[policy])
    np.testing.assert_allclose(result.weights.sum(axis=-1), valid, atol=1e-6)


@pytest.mark.parametrize("budget", [3, 9, 14])
def test_budgeted_policies_keep_at_most_their_budget(budget):
    arrays = block(4)
    for policy in ("acceptmoe_fix", "moe_spec"):
        config = SelectorConfig(policy=policy, top_k=3, budget=budget)
        result = select(*arrays, config=config)
        assert 3 <= result.eligible_before_pruning.sum() <= budget
    assert result.eligible.sum() == budget, "moe_spec fills its budget"


def test_a_budget_of_top_k_leaves_the_anchor_alone():
    arrays = block(4)
    config = SelectorConfig(policy="acceptmoe_fix", top_k=3, budget=3)
    result = select(*arrays, config=config)
    assert members(result.eligible) == members(result.anchor)


def test_commitment_weights_change_which_experts_are_kept():
    with_weights, without = SelectorConfig(top_k=3), SelectorConfig(top_k=3, uniform=True)
    differ = sum(
        members(select(*block(seed), config=with_weights).eligible_before_pruning)
        != members(select(*block(seed), config=without).eligible_before_pruning)
        for seed in range(10)
    )
    assert differ > 0


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
    kept = selection_oracle.descending(demand, range(14))[:size]
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
    kept = np.asarray(result.eligible)[np.asarray(natural.natural_ids)] & valid[:, None]
    assert 0 < kept.sum() < valid.sum() * 3
    expect = np.where(kept, natural.weights, 0.0)
    if renormalize:
        sums = expect.sum(axis=1, keepdims=True)
        total = np.asarray(natural.weights).sum(axis=1, keepdims=True)
        expect = np.divide(expect * total, sums, out=np.zeros_like(expect), where=sums > 0)
    np.testing.assert_allclose(result.weights, expect, rtol=1e-6)
    assert used(result) == set(np.asarray(natural.natural_ids)[kept].tolist())


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
    assert used(result) == set(ids[weights > 0].tolist())
    reachable = np.isfinite(logits[:, np.asarray(result.eligible)]).any(axis=1)
    np.testing.assert_array_equal(weights.sum(axis=1) > 0, reachable & valid)


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
        # A padded row's own ids are whatever its logits say; nothing else may differ.
        for name in ("natural_ids", "expert_ids"):
            repaired = jnp.where(valid[:, None], getattr(dirty, name), getattr(clean, name))
            dirty = dirty.replace(**{name: repaired})
        assert_same(clean, dirty)
    np.testing.assert_array_equal(clean.weights[~valid], 0.0)
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
        np.testing.assert_array_equal(result.weights[:, 0], valid.astype(np.float32))
    else:
        assert (np.asarray(result.weights)[valid] < 1).all()
    assert members(result.anchor) == {int(np.argmax(logits[0]))}


@each_policy
def test_a_block_without_valid_rows_uses_nothing(policy):
    logits, depth, _, phat, resident = block(3)
    nobody = np.zeros(17, bool)
    result = select(logits, depth, nobody, phat, resident, config=POLICY_CONFIGS[policy])
    assert result.used_count == 0
    assert not result.weights.any() and not result.assignments.any()
    assert np.isfinite(result.entropy)


@each_policy
def test_used_ids_ascend_and_are_padded_with_the_number_of_experts(policy):
    logits, depth, valid, phat, resident = block(11)
    result = select(logits, depth, valid, phat, resident, config=POLICY_CONFIGS[policy])
    ids, count = result.used_ids.tolist(), int(result.used_count)
    live = np.asarray(result.expert_ids)[valid]
    assert ids[:count] == sorted(set(live.ravel().tolist()))
    assert ids[count:] == [14] * (14 - count)


# Programs.


@pytest.mark.parametrize("policy", ["acceptmoe", "moe_spec"])
def test_a_batch_under_vmap_is_each_request_by_itself(policy):
    config = POLICY_CONFIGS[policy]
    blocks = [block(seed, padded=seed) for seed in range(3)]
    batch = [np.stack(arrays) for arrays in zip(*blocks)]
    together = jax.jit(jax.vmap(functools.partial(select, config=config)))(*batch)
    for row, arrays in enumerate(blocks):
        mine = jax.tree.map(lambda leaf: leaf[row], together)
        assert_same(mine, select(*arrays, config=config), exactly=False)


@each_policy
def test_compiled_and_uncompiled_decide_alike(policy):
    for seed in range(3):
        compiled = compiled_select(*block(seed), config=POLICY_CONFIGS[policy])
        plain = select(*block(seed), config=POLICY_CONFIGS[policy])
        assert_same(compiled, plain, exactly=False)


@each_policy
def test_fields_have_their_documented_shapes_and_types_at_full_size(policy):
    config = dataclasses.replace(
        POLICY_CONFIGS[policy], top_k=8, budget=29
    )
    specs = (
        jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((64,), jnp.int32),
        jax.ShapeDtypeStruct((64,), jnp.bool_),
        jax.ShapeDtypeStruct((6,), jnp.float32),
        jax.ShapeDtypeStruct((128,), jnp.bool_),
    )
    result = jax.eval_shape(functools.partial(select, config=config), *specs)
    f32, i32, boolean = jnp.float32, jnp.int32, jnp.bool_
    expect = {
        "natural_ids": ((64, 8), i32),
        "alpha": ((64,), f32),
        "demand": ((128,), f32),
        "assignments": ((128,), i32),
        "anchor": ((128,), boolean),
        "entropy": ((), f32),
        "effective_rank_size": ((), i32),
        "eligible_before_pruning": ((128,), boolean),
        "rerouting_budget": ((), i32),
        "pruned": ((128,), boolean),
        "eligible": ((128,), boolean),
        "expert_ids": ((64, 8), i32),
        "weights": ((64, 8), f32),
        "used_ids": ((128,), i32),
        "used_count": ((), i32),
    }
    found = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in found.items()} == expect


def test_the_only_sort_is_the_top_k():
    arrays = block(0)
    for config in POLICY_CONFIGS.values():
        program = str(jax.make_jaxpr(functools.partial(select, config=config))(*arrays))
        assert "top_k" in program
        assert " sort[" not in program


# Refusals.


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy": "acceptmoe_v2"}, "policy"),
        ({"size_rule": "median"}, "size_rule"),
        ({"moe_spec_mode": "drop"}, "moe_spec_mode"),
        ({"top_k": 0}, "top_k"),
        ({"policy": "moe_spec"}, "budget"),
        ({"policy": "acceptmoe_fix"}, "budget"),
        ({"policy": "moe_spec", "top_k": 4, "budget": 3}, "budget"),
        ({"policy": "acceptmoe_fix", "top_k": 4, "budget": 3}, "budget"),
        ({"beta": -0.5}, "beta"),
        ({"gamma": float("nan")}, "gamma"),
        ({"mass": 0.0}, "mass"),
        ({"mass": 1.5}, "mass"),
        ({"renormalize_truncated": True}, "renormalize_truncated"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=named):
        SelectorConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy": "moe_spec", "top_k": 3, "budget": 15}, "budget"),
        ({"policy": "acceptmoe_fix", "top_k": 3, "budget": 15}, "budget"),
        ({"policy": "native", "top_k": 15}, "top_k"),
    ],
)
def test_more_experts_than_the_layer_has_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        select(*block(0), config=SelectorConfig(**settings))


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_arrays_that_do_not_fit_together_are_refused(position):
    arrays = list(block(0))
    arrays[position] = arrays[position][None]
    names = ("logits", "depth", "valid", "phat", "resident")
    with pytest.raises(ValueError, match=names[position]):
        select(*arrays, config=POLICY_CONFIGS["acceptmoe"])


def test_a_batch_without_vmap_is_refused():
    logits, *rest = block(0)
    with pytest.raises(ValueError, match="vmap"):
        select(logits[None], *rest, config=POLICY_CONFIGS["acceptmoe"])
