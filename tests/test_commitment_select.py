"""commitment_select: the Triton kernel against `select`, at every policy, edge and shape.

The Mosaic kernel keeps the same promises in `test_commitment_select_mosaic`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.selection import SelectorConfig
from pallas_kernels import compat
from pallas_kernels.commitment_select import IMPLEMENTATIONS, SHAPES, commitment_select, supports
from tests import commitment_select_parity as parity
from tests.commitment_select_parity import CONFIGS
from tests.selection_blocks import block, members


@pytest.mark.parametrize("name", CONFIGS)
def test_every_policy_decides_and_weighs_as_select_does(name):
    parity.check_against_select("triton", CONFIGS[name], parity.blocks())


def test_the_blocks_tell_an_unwritten_entry_from_a_written_one():
    # Where nothing is written the interpreter leaves NaN, the lowest integer, or False.
    result = parity.run("reference", CONFIGS["admission"])(*parity.blocks())
    for field in dataclasses.fields(result):
        values = np.asarray(getattr(result, field.name))
        written = values if values.dtype == bool else np.isfinite(values) & (values > -(2**31))
        assert written.any(axis=0).all(), field.name


@pytest.mark.parametrize("shape", parity.worked_cases())
def test_every_intermediate_of_the_worked_cases(shape):
    parity.check_worked_cases("triton", parity.worked_cases()[shape])


@pytest.mark.parametrize("shape", parity.worked_cases())
def test_budgeted_sets_of_the_worked_cases(shape):
    cases = parity.worked_cases()[shape]
    fixed, spec = (
        parity.run(
            "triton", parity.case_config(cases[0], policy=policy, budget=cases[0]["budget"])
        )(*parity.case_arrays(cases))
        for policy in ("acceptmoe_fix", "moe_spec")
    )
    for at, case in enumerate(cases):
        expect = case["expect_moe_spec"]
        assert members(fixed.eligible_before_pruning[at]) == set(case["expect_fixed"]["eligible"])
        assert members(spec.eligible[at]) == set(expect["eligible"])
        np.testing.assert_array_equal(spec.expert_ids[at], expect["expert_ids"])


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_agrees_with_select(name):
    parity.check_shape("triton", name)


@pytest.mark.parametrize("policy", ["native", "acceptmoe", "truncate", "cache_conditional"])
def test_a_forced_set_replaces_the_eligible_one_and_nothing_before_it(policy):
    batch = parity.blocks()
    override = np.random.default_rng(1).random((len(batch[0]), 14)) < 0.6
    ours = parity.check_against_select("triton", CONFIGS[policy], batch, override)
    np.testing.assert_array_equal(ours.eligible, override)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_root_keeps_its_experts_and_weights_exactly(norm_topk_prob):
    parity.check_root_is_exact("triton", norm_topk_prob)


def test_without_a_residency_nothing_is_pruned():
    ours = parity.check_against_select("triton", CONFIGS["acceptmoe"], block(17)[:4], batched=False)
    assert not ours.pruned.any()


def test_bfloat16_logits_are_computed_with_in_float32():
    logits, *rest = block(4)
    arrays = (jnp.asarray(logits, jnp.bfloat16), *rest)
    parity.check_against_select("triton", CONFIGS["acceptmoe"], arrays, batched=False)


def test_the_whole_selection_is_one_launch():
    function = functools.partial(
        commitment_select, config=CONFIGS["acceptmoe"], implementation="triton"
    )
    jaxpr = jax.make_jaxpr(function)(*block(0)).jaxpr
    while [equation.primitive.name for equation in jaxpr.eqns] in (["jit"], ["pjit"]):
        jaxpr = jaxpr.eqns[0].params["jaxpr"].jaxpr
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["pallas_call"]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_what_select_refuses_is_refused(implementation):
    logits, depth, *rest = block(3)
    for arrays, config in (
        ((logits, depth[:-1], *rest), CONFIGS["acceptmoe"]),
        ((logits, depth, *rest), SelectorConfig(top_k=15)),
        ((logits, depth, *rest), SelectorConfig(policy="moe_spec", top_k=3, budget=15)),
    ):
        with pytest.raises(ValueError):
            commitment_select(*arrays, config=config, implementation=implementation)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        commitment_select(*block(3), config=CONFIGS["native"], implementation="cuda")


def test_an_implementation_refuses_a_policy_exactly_where_it_says_so():
    for config in CONFIGS.values():
        unsupported = [name for name in IMPLEMENTATIONS if not supports(config, name)]
        assert unsupported == (["mosaic"] if config.policy == "cache_conditional" else [])
    with pytest.raises(NotImplementedError, match="'mosaic' has no policy 'cache_conditional'"):
        commitment_select(*block(3), config=CONFIGS["cache_conditional"], implementation="mosaic")


def test_the_mosaic_kernel_is_refused_where_jax_cannot_compile_it(monkeypatch):
    monkeypatch.setattr(compat, "HAS_MOSAIC", False)
    with pytest.raises(NotImplementedError, match="'mosaic' needs jax 0.11"):
        commitment_select(*block(3), config=CONFIGS["native"], implementation="mosaic")
