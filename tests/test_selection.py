"""Expert selection: the worked cases, a second implementation, the facts it promises, refusals.

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
from tests.selection_blocks import (
    POLICY_CONFIGS,
    assert_same,
    block,
    compiled_select,
    each_norm,
    each_policy,
    mask_of,
    members,
    select,
    used,
)

CASES = json.loads((pathlib.Path(__file__).parent / "data" / "selection.json").read_text())
BY_NAME = {case["name"]: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=list(BY_NAME))


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


# The worked cases.


@each_case
def test_every_intermediate_of_the_worked_cases(case):
    expect = case["expect"]
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
    np.testing.assert_allclose(result.weights, expect["weights"], rtol=1e-5, atol=1e-6)


@each_case
def test_weights_of_the_worked_cases_without_renormalising(case):
    result = compiled_select(*case_arrays(case), config=case_config(case, norm_topk_prob=False))
    np.testing.assert_array_equal(result.expert_ids, case["expect"]["expert_ids"])
    np.testing.assert_allclose(
        result.weights, case["expect"]["weights_not_renormalised"], rtol=1e-5, atol=1e-6
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
        expect = selection_oracle.select(*arrays, top_k=3, protect_anchor=protect_anchor, size=size)
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
def test_weights_of_a_row_sum_to_one(policy):
    result = select(*block(8), config=POLICY_CONFIGS[policy])
    np.testing.assert_allclose(result.weights.sum(axis=-1), 1, atol=1e-6)


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
    config = dataclasses.replace(POLICY_CONFIGS[policy], top_k=8, budget=29)
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
        "admitted": ((128,), boolean),
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
