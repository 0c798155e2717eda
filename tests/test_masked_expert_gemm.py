"""masked_expert_gemm: every implementation against the reference, in float32, for each family."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.masked_expert_gemm import (
    ExpertBank,
    GatedActivation,
    masked_expert_gemm,
)
from pallas_kernels.mxfp4 import Mxfp4, dequantise, quantise

# Those that run on every version of jax.
OTHERS = ("blocks", "triton")


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family's experts are made of."""

    activation: GatedActivation
    biases: bool
    packed: bool


FAMILIES = {
    "qwen3_moe": Family(GatedActivation(), biases=False, packed=False),
    "gpt_oss": Family(GatedActivation(1.702, 1.0, 7.0), biases=True, packed=False),
    "gpt_oss_mxfp4": Family(GatedActivation(1.702, 1.0, 7.0), biases=True, packed=True),
}
# Clamps matter (gates of a few times 7), and both widths are whole MXFP4 blocks.
WIDTH, EXPERT_WIDTH = 64, 32

every_family = pytest.mark.parametrize("family", FAMILIES)
every_implementation = pytest.mark.parametrize("implementation", ("reference", *OTHERS))
every_other = pytest.mark.parametrize("implementation", OTHERS)


def _case(family, seed, rows=30, experts=8, top_k=3, among=None, slots=None):
    """Random weights in `slots` slots and a routing among the experts `among`."""
    rng = np.random.default_rng(seed)
    among = np.arange(experts) if among is None else np.asarray(among)
    ids = np.stack([rng.permutation(among)[:top_k] for _ in range(rows)])
    return _with_routing(family, rng, ids, experts, slots)


def _with_routing(family, rng, ids, experts, slots=None, weights=None):
    rows, top_k = ids.shape
    weights = rng.dirichlet(np.ones(top_k), rows) if weights is None else weights
    used = np.unique(ids[weights != 0])
    used_ids = np.full(experts, experts)
    used_ids[: used.size] = used
    slot_of = rng.permutation(experts) if slots is None else slots
    count = int(slot_of.max()) + 1

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def matrix(*shape):
        return quantise(normal(*shape)) if FAMILIES[family].packed else normal(*shape)

    bank = ExpertBank(
        gate=matrix(count, EXPERT_WIDTH, WIDTH),
        up=matrix(count, EXPERT_WIDTH, WIDTH),
        down=matrix(count, WIDTH, EXPERT_WIDTH),
        slot_of=jnp.asarray(slot_of, jnp.int32),
    )
    if FAMILIES[family].biases:
        bank = bank.replace(
            gate_bias=normal(count, EXPERT_WIDTH),
            up_bias=normal(count, EXPERT_WIDTH),
            down_bias=normal(count, WIDTH),
        )
    return dict(
        x_TD=normal(rows, WIDTH),
        bank=bank,
        expert_ids_Tk=jnp.asarray(ids, jnp.int32),
        weights_Tk=jnp.asarray(weights, jnp.float32),
        used_ids_E=jnp.asarray(used_ids, jnp.int32),
        used_count=jnp.int32(used.size),
        activation=FAMILIES[family].activation,
    )


_run = jax.jit(
    functools.partial(masked_expert_gemm, interpret=True),
    static_argnames=("activation", "implementation"),
)


def _poisoned(bank, slots):
    """The bank with something that is not a number in `slots`: 0xFF is an MXFP4 scale of NaN."""

    def poison(name):
        leaf = getattr(bank, name)
        if leaf is None or name == "slot_of":
            return leaf
        if isinstance(leaf, Mxfp4):
            return leaf.replace(scales=leaf.scales.at[slots].set(0xFF))
        return leaf.at[slots].set(jnp.nan)

    return bank.replace(**{field.name: poison(field.name) for field in dataclasses.fields(bank)})


def _assert_matches(case, implementation):
    """Equal within 2e-6 of the largest output."""
    expected = _run(**case, implementation="reference")
    actual = _run(**case, implementation=implementation)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * float(jnp.abs(expected).max()))


def _float64(matrix, slot):
    matrix = matrix[slot]
    return np.asarray(dequantise(matrix) if isinstance(matrix, Mxfp4) else matrix, np.float64)


@every_family
def test_reference_is_the_formula_spelled_out(family):
    case = _case(family, 0, rows=3, experts=5, top_k=2)
    bank = case["bank"]
    expected = np.zeros(case["x_TD"].shape)
    for t, x in enumerate(np.asarray(case["x_TD"], np.float64)):
        for e, w in zip(case["expert_ids_Tk"][t], case["weights_Tk"][t]):
            slot = int(bank.slot_of[int(e)])
            gate, up = _float64(bank.gate, slot) @ x, _float64(bank.up, slot) @ x
            if family == "qwen3_moe":
                hidden = gate / (1 + np.exp(-gate)) * up
                y = _float64(bank.down, slot) @ hidden
            else:
                gate = np.minimum(gate + np.asarray(bank.gate_bias[slot]), 7)
                up = np.clip(up + np.asarray(bank.up_bias[slot]), -7, 7)
                hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
                y = _float64(bank.down, slot) @ hidden + np.asarray(bank.down_bias[slot])
            expected[t] += float(w) * y
    actual = masked_expert_gemm(**case, implementation="reference")
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@every_other
@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_any_number_of_rows(implementation, rows):
    """With 100 of them, experts have more rows than any tile."""
    family = list(FAMILIES)[rows % 3]  # in turn: every shape is compiled anew
    _assert_matches(_case(family, rows, rows=rows, among=range(4)), implementation)


@every_family
@every_other
def test_every_pattern_of_used_experts(family, implementation):
    """All 256 of 8 experts, through one program."""
    experts, rows, top_k = 8, 9, 2
    rng = np.random.default_rng(2)
    cases = []
    for pattern in range(2**experts):
        used = np.array([pattern >> e & 1 for e in range(experts)])
        # Picks of unused experts have no weight; every used one is picked.
        ids = np.stack([np.argsort(rng.random(experts) - used)[:top_k] for _ in range(rows)])
        dealt = np.resize(np.flatnonzero(used), rows * top_k).reshape(rows, top_k)
        if used.sum() >= top_k:
            ids = dealt
        cases.append(_with_routing(family, rng, ids, experts, weights=used[ids] / top_k))
        assert cases[-1]["used_count"] == used.sum()
    case = cases[0]
    routing = ("expert_ids_Tk", "weights_Tk", "used_ids_E", "used_count")
    stacked = {name: jnp.stack([case[name] for case in cases]) for name in routing}

    @functools.partial(jax.jit, static_argnames="implementation")
    def outputs(stacked, implementation):
        return jax.lax.map(lambda one: _run(**case | one, implementation=implementation), stacked)

    expected = outputs(stacked, "reference")
    actual = outputs(stacked, implementation)
    largest = float(jnp.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * largest)
    np.testing.assert_array_equal(actual[0], np.zeros((rows, WIDTH)))


@every_family
@every_other
def test_one_expert_with_more_rows_than_a_block(family, implementation):
    _assert_matches(_case(family, 3, among=[1, 4, 6]), implementation)


@every_family
@every_implementation
def test_an_unused_slot_is_never_read(family, implementation):
    case = _case(family, 4, among=[1, 2, 5, 6])
    expected = _run(**case, implementation=implementation)
    case["bank"] = _poisoned(case["bank"], case["bank"].slot_of[np.array([0, 3, 4, 7])])
    actual = _run(**case, implementation=implementation)
    np.testing.assert_array_equal(actual, expected)


@every_family
@every_implementation
def test_a_pick_of_weight_zero_adds_an_exact_zero(family, implementation):
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(7)[:3] for _ in range(30)])
    weights = rng.dirichlet(np.ones(3), 30)
    ids[:, 2] = 7  # an expert that is used through these picks alone
    weights[:, 2] = 0
    weights[7] = 0  # a padded row
    case = _with_routing(family, rng, ids, 8, weights=weights)
    case["bank"] = _poisoned(case["bank"], case["bank"].slot_of[7])
    actual = _run(**case, implementation=implementation)
    assert np.isfinite(actual).all()
    np.testing.assert_array_equal(actual[7], np.zeros(WIDTH))


@every_family
@every_implementation
def test_permuting_slots_changes_no_bit(family, implementation):
    """Biases and scales move with their matrices."""
    case = _case(family, 6, slots=np.arange(8))
    expected = _run(**case, implementation=implementation)
    order = np.random.default_rng(7).permutation(8)  # slot s now holds what slot order[s] held
    bank = case["bank"]
    moved = jax.tree.map(lambda leaf: leaf[order], bank.replace(slot_of=None))
    case["bank"] = moved.replace(slot_of=jnp.asarray(np.argsort(order), jnp.int32))
    actual = _run(**case, implementation=implementation)
    np.testing.assert_array_equal(actual, expected)


@every_implementation
def test_packed_experts_give_the_outputs_of_their_numbers(implementation):
    """In plain XLA to the bit; a kernel adds up elements by their place in a word."""
    case = _case("gpt_oss_mxfp4", 8)
    packed = _run(**case, implementation=implementation)
    bank = case["bank"]
    numbers = {name: dequantise(getattr(bank, name)) for name in ("gate", "up", "down")}
    case["bank"] = bank.replace(**numbers)
    expected = _run(**case, implementation=implementation)
    tolerance = 1e-6 * float(jnp.abs(expected).max()) if implementation == "triton" else 0
    np.testing.assert_allclose(packed, expected, rtol=0, atol=tolerance)


def test_an_unknown_implementation_is_refused_by_name():
    with pytest.raises(ValueError, match="nonsense"):
        masked_expert_gemm(**_case("qwen3_moe", 8), implementation="nonsense")


@pytest.mark.parametrize("implementation", ["mosaic", "mosaic_wgmma"])
def test_mosaic_is_refused_where_jax_lacks_it(implementation, monkeypatch):
    monkeypatch.setattr(compat, "HAS_MOSAIC", False)
    with pytest.raises(NotImplementedError, match=f"{implementation}.*0.11"):
        masked_expert_gemm(**_case("qwen3_moe", 8), implementation=implementation)
