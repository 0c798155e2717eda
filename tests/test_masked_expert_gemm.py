"""masked_expert_gemm: every implementation against the reference, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.masked_expert_gemm import IMPLEMENTATIONS, masked_expert_gemm

OTHERS = sorted(set(IMPLEMENTATIONS) - {"reference"})


def _case(seed, rows=37, experts=8, top_k=3, width=20, expert_width=12, among=None, slots=None):
    """Random weights in `slots` slots and a routing among the experts `among`."""
    rng = np.random.default_rng(seed)
    among = np.arange(experts) if among is None else np.asarray(among)
    ids = np.stack([rng.permutation(among)[:top_k] for _ in range(rows)])
    return _with_routing(rng, ids, experts, width, expert_width, slots)


def _with_routing(rng, ids, experts, width, expert_width, slots=None, weights=None):
    rows, top_k = ids.shape
    weights = rng.dirichlet(np.ones(top_k), rows) if weights is None else weights
    used = np.unique(ids[weights != 0])
    used_ids = np.full(experts, experts)
    used_ids[: used.size] = used
    slot_of = rng.permutation(experts) if slots is None else slots
    count = int(slot_of.max()) + 1

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return dict(
        x_TD=normal(rows, width),
        gate_CFD=normal(count, expert_width, width),
        up_CFD=normal(count, expert_width, width),
        down_CDF=normal(count, width, expert_width),
        slot_of_E=jnp.asarray(slot_of, jnp.int32),
        expert_ids_Tk=jnp.asarray(ids, jnp.int32),
        weights_Tk=jnp.asarray(weights, jnp.float32),
        used_ids_E=jnp.asarray(used_ids, jnp.int32),
        used_count=jnp.int32(used.size),
    )


_run = jax.jit(masked_expert_gemm, static_argnames="implementation")


def _assert_matches(case, implementation):
    """Equal within 2e-6 of the largest output."""
    expected = _run(**case, implementation="reference")
    actual = _run(**case, implementation=implementation)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * float(jnp.abs(expected).max()))


def test_reference_is_the_formula_spelled_out():
    case = _case(0, rows=3, experts=5, top_k=2)
    expected = np.zeros(case["x_TD"].shape)
    for t, x in enumerate(np.asarray(case["x_TD"], np.float64)):
        for e, w in zip(case["expert_ids_Tk"][t], case["weights_Tk"][t]):
            slot = int(case["slot_of_E"][int(e)])
            gate = np.asarray(case["gate_CFD"][slot], np.float64) @ x
            up = np.asarray(case["up_CFD"][slot], np.float64) @ x
            hidden = gate / (1 + np.exp(-gate)) * up
            expected[t] += float(w) * (np.asarray(case["down_CDF"][slot], np.float64) @ hidden)
    actual = masked_expert_gemm(**case, implementation="reference")
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 64])
def test_any_number_of_rows(implementation, rows):
    _assert_matches(_case(rows, rows=rows), implementation)


@pytest.mark.parametrize("implementation", OTHERS)
def test_every_pattern_of_used_experts(implementation):
    for pattern in range(1, 2**6):
        among = [e for e in range(6) if pattern >> e & 1]
        top_k = 2
        if len(among) < top_k:
            continue
        _assert_matches(_case(pattern, rows=9, experts=6, top_k=top_k, among=among), implementation)


@pytest.mark.parametrize("implementation", OTHERS)
def test_one_expert_with_more_rows_than_a_block(implementation):
    _assert_matches(_case(3, rows=50, experts=7, top_k=1, among=[4]), implementation)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_an_unused_slot_is_never_read(implementation):
    case = _case(4, experts=8, among=[1, 2, 5, 6])
    expected = masked_expert_gemm(**case, implementation=implementation)
    unused = np.asarray(case["slot_of_E"])[[0, 3, 4, 7]]
    for name in ("gate_CFD", "up_CFD", "down_CDF"):
        case[name] = case[name].at[unused].set(jnp.nan)
    actual = masked_expert_gemm(**case, implementation=implementation)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_a_pick_of_weight_zero_adds_an_exact_zero(implementation):
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(6)[:3] for _ in range(21)])
    weights = rng.dirichlet(np.ones(3), 21)
    ids[:, 2] = 6  # an expert that is used through these picks alone
    weights[:, 2] = 0
    weights[7] = 0  # a padded row
    case = _with_routing(rng, ids, 7, 20, 12, weights=weights)
    slot = int(case["slot_of_E"][6])
    for name in ("gate_CFD", "up_CFD", "down_CDF"):
        case[name] = case[name].at[slot].set(jnp.nan)
    actual = masked_expert_gemm(**case, implementation=implementation)
    assert np.isfinite(actual).all()
    np.testing.assert_array_equal(actual[7], np.zeros(20))


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_permuting_slots_changes_no_bit(implementation):
    case = _case(6, slots=np.arange(8))
    expected = masked_expert_gemm(**case, implementation=implementation)
    order = np.random.default_rng(7).permutation(8)  # slot s now holds what slot order[s] held
    for name in ("gate_CFD", "up_CFD", "down_CDF"):
        case[name] = case[name][order]
    case["slot_of_E"] = jnp.asarray(np.argsort(order), jnp.int32)
    actual = masked_expert_gemm(**case, implementation=implementation)
    np.testing.assert_array_equal(actual, expected)


def test_an_unknown_implementation_is_refused_by_name():
    with pytest.raises(ValueError, match="nonsense"):
        masked_expert_gemm(**_case(8), implementation="nonsense")
