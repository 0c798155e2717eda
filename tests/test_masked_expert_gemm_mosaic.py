"""masked_expert_gemm in Mosaic GPU against the reference, in interpret mode with race detection.

Interpret mode raises on a race. It multiplies exactly what it is given, so that float32 rows and
weights, which no tensor core takes, show the kernels' arithmetic at tight tolerances.
"""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import mosaic_helpers
from pallas_kernels.masked_expert_gemm import GatedActivation, masked_expert_gemm
from pallas_kernels.masked_expert_gemm.cases import ExpertShape, random_arguments, random_bank
from pallas_kernels.mxfp4 import Mxfp4

EXPERTS, SLOTS, ROWS, TOP_K = 8, 9, 10, 3
_SWIGLU, _CLAMPED = GatedActivation(), GatedActivation(slope=1.702, shift=1.0, limit=7.0)
_tiny = functools.partial(ExpertShape, ROWS, TOP_K, EXPERTS, used=5)
FAMILIES = {
    "qwen3_moe": (_tiny(64, 48, activation=_SWIGLU, biases=False, dtypes=()), "float32"),
    "gpt_oss": (_tiny(80, 32, activation=_CLAMPED, biases=True, dtypes=()), "float32"),
    "gpt_oss_mxfp4": (_tiny(96, 64, activation=_CLAMPED, biases=True, dtypes=()), "mxfp4"),
}
PAIRS = [("mosaic", family) for family in FAMILIES]
PAIRS += [("mosaic_wgmma", family) for family in ("qwen3_moe", "gpt_oss")]
every_pair = pytest.mark.parametrize(("implementation", "family"), PAIRS)

_jitted = jax.jit(masked_expert_gemm, static_argnames=("activation", "implementation", "interpret"))


def _run(implementation, family, case):
    shape, _ = FAMILIES[family]
    return np.asarray(
        _jitted(*case, activation=shape.activation, implementation=implementation, interpret=True)
    )


def _expected(family, case):
    shape, _ = FAMILIES[family]
    return np.asarray(_jitted(*case, activation=shape.activation, implementation="reference"))


def _float32(tree):
    """Numbers as float32; packed weights as they are."""
    return jax.tree.map(lambda a: a.astype("float32") if a.dtype == jnp.bfloat16 else a, tree)


@functools.cache
def _bank(family):
    """Experts in permuted slots, one of which is nobody's."""
    shape, dtype = FAMILIES[family]
    bank = _float32(random_bank(jax.random.key(7), shape, dtype, SLOTS))
    slot_of = np.random.default_rng(8).permutation(SLOTS)[:EXPERTS]
    return bank.replace(slot_of=jnp.asarray(slot_of, jnp.int32))


def _case(family, used, seed=0):
    """A routing that uses exactly the experts `used`; picks beyond their number weigh nothing."""
    shape, _ = FAMILIES[family]
    rng = np.random.default_rng(seed)
    used = np.asarray(used, np.int64)
    others = np.setdiff1d(np.arange(EXPERTS), used)
    order = np.concatenate([used, others])
    live = min(TOP_K, used.size)
    ids = np.tile(order[:TOP_K], (ROWS, 1))
    weights = np.zeros((ROWS, TOP_K), np.float32)
    for row in range(ROWS):  # dealt in turn, so that every used expert has a row
        ids[row, :live] = used[(row + np.arange(live)) % used.size] if live else ids[row, :live]
        weights[row, :live] = rng.dirichlet(np.ones(live)) if live else 0
    used_ids = np.full(EXPERTS, EXPERTS)
    used_ids[: used.size] = np.sort(used)
    return (
        jnp.asarray(rng.normal(size=(ROWS, shape.width)), jnp.float32),
        _bank(family),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(weights),
        jnp.asarray(used_ids, jnp.int32),
        jnp.int32(used.size),
    )


def _replaced(case, **leaves):
    x, bank, *routing = case
    return x, bank.replace(**leaves), *routing


def _poisoned(bank, slots):
    """What is not a number in `slots`: 0xFF is an MXFP4 scale of NaN."""

    def poison(leaf):
        if isinstance(leaf, Mxfp4):
            return leaf.replace(scales=leaf.scales.at[slots].set(0xFF))
        return leaf.at[slots].set(jnp.nan)

    names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    return {name: poison(getattr(bank, name)) for name in names if getattr(bank, name) is not None}


def _assert_close(actual, expected, most, all_):
    """99.9 % within `most` of the largest expected value, and all within `all_` of it."""
    error = np.abs(actual.astype(np.float32) - expected) / max(np.abs(expected).max(), 1e-30)
    assert np.quantile(error, 0.999) <= most, np.quantile(error, 0.999)
    assert error.max() <= all_, error.max()


def _patterns(numbers):
    return [[e for e in range(EXPERTS) if number >> e & 1] for number in numbers]


def _check_patterns(implementation, family, numbers):
    for used in _patterns(numbers):
        case = _case(family, used, seed=len(used))
        actual, expected = _run(implementation, family, case), _expected(family, case)
        if used:
            _assert_close(actual, expected, 2e-6, 1e-5)
        else:
            np.testing.assert_array_equal(actual, np.zeros_like(expected))


@every_pair
def test_patterns_of_used_experts(implementation, family):
    """None, all, one, and some between."""
    _check_patterns(implementation, family, [0, 255, 1 << 7, 0b01010101, 0b00101100])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss_mxfp4"])
@pytest.mark.parametrize("implementation", ["mosaic"])
def test_every_pattern_of_used_experts(implementation, family):
    _check_patterns(implementation, family, range(2**EXPERTS))


@every_pair
def test_an_unused_slot_is_never_read(implementation, family):
    case = _case(family, [1, 2, 6])
    expected = _run(implementation, family, case)
    unused = np.setdiff1d(np.arange(SLOTS), case[1].slot_of[np.array([1, 2, 6])])
    poisoned = _replaced(case, **_poisoned(case[1], unused))
    np.testing.assert_array_equal(_run(implementation, family, poisoned), expected)


@every_pair
def test_a_pick_of_weight_zero_adds_an_exact_zero(implementation, family):
    x, bank, ids, weights, used_ids, used_count = _case(family, [0, 2, 3, 5])
    weights = weights.at[4].set(0)  # a padded row
    rest = np.array([0, 1, 2, 3, 5, 6, 7, 8, 9])
    # Expert 4 is named by picks of weight 0 alone.
    ids, weights = ids.at[rest[:4], 2].set(4), weights.at[rest[:4], 2].set(0)
    bank = bank.replace(**_poisoned(bank, bank.slot_of[4][None]))
    case = (x, bank, ids, weights, used_ids, used_count)
    actual = _run(implementation, family, case)
    assert np.isfinite(actual).all()
    np.testing.assert_array_equal(actual[4], np.zeros_like(actual[4]))
    np.testing.assert_array_equal(actual[rest] != 0, np.ones_like(actual[rest], bool))


@every_pair
def test_permuting_slots_changes_no_bit(implementation, family):
    case = _case(family, [0, 3, 4, 7])
    expected = _run(implementation, family, case)
    order = np.random.default_rng(7).permutation(SLOTS)  # slot s now holds what order[s] held
    moved = jax.tree.map(lambda leaf: leaf[order], case[1].replace(slot_of=None))
    slot_of = jnp.asarray(np.argsort(order)[case[1].slot_of], jnp.int32)
    case = (case[0], moved.replace(slot_of=slot_of), *case[2:])
    np.testing.assert_array_equal(_run(implementation, family, case), expected)


@every_pair
def test_each_weight_tile_of_each_used_expert_is_copied_once(implementation, family, monkeypatch):
    used = [1, 4, 6]
    tiles = collections.Counter()  # (operand, slot, tile) -> copies
    copied = collections.Counter()  # (operand, slot) -> elements

    def pre_read(task, *arguments):
        source = task.src_allocation_key
        buffer = gpu_callbacks._get_shared_memory().buffer_shape_and_dtype(source)
        if buffer.shape[0] == SLOTS:  # weights, by slot, feature, perhaps plane, and element
            slot, features, *plane, elements = task.src_access.range
            operand = source, buffer.shape
            tiles[operand, slot, features.start, *plane, elements.start] += 1
            copied[operand, slot] += math.prod(
                min(axis.stop, size) - axis.start
                for axis, size in zip((features, elements), (buffer.shape[1], buffer.shape[-1]))
            )
        return before(task, *arguments)

    before = gpu_callbacks.AsyncCopyGmemToSmemTask.pre_read
    monkeypatch.setattr(gpu_callbacks.AsyncCopyGmemToSmemTask, "pre_read", pre_read)
    case = _case(family, used)
    _run(implementation, family, case)
    slots = np.asarray(case[1].slot_of)[used]
    assert set(tiles.values()) == {1}
    assert {slot for _, slot in copied} == set(slots)
    assert len(copied) == 3 * len(used)  # gate, up and down
    for ((_, shape), _), elements in copied.items():
        assert elements == math.prod(shape[1:])


def _bfloat16_case(family, rows, top_k, used, experts):
    shape, dtype = FAMILIES[family]
    shape = dataclasses.replace(shape, rows=rows, top_k=top_k, experts=experts, used=used)
    dtype = dtype if dtype == "mxfp4" else "bfloat16"
    return random_arguments(jax.random.key(rows), shape, dtype, slots=used)


def _check_bfloat16(implementation, family, *routing):
    case = _bfloat16_case(family, *routing)
    actual = _run(implementation, family, case)
    assert actual.dtype == jnp.bfloat16
    _assert_close(actual, _expected(family, _float32(case)), 5e-3, 1e-2)


@pytest.mark.parametrize(
    ("implementation", "family", "rows", "top_k", "used"),
    [
        ("mosaic", "qwen3_moe", 40, 2, 3),
        ("mosaic", "gpt_oss", 1, 4, 4),
        ("mosaic", "gpt_oss_mxfp4", 20, 1, 1),  # more rows an expert than an mma has
        ("mosaic_wgmma", "gpt_oss", 40, 2, 3),
    ],
)
def test_bfloat16_rows(implementation, family, rows, top_k, used):
    """Each product and the activation round once, to 8 bits."""
    _check_bfloat16(implementation, family, rows, top_k, used, 5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [17, 64, 130])
@pytest.mark.parametrize(
    ("implementation", "family"),
    [("mosaic", "qwen3_moe"), ("mosaic", "gpt_oss_mxfp4"), ("mosaic_wgmma", "qwen3_moe")],
)
def test_any_number_of_rows(implementation, family, rows):
    """Beyond 64 in groups; one expert has all of them, which is every row tile."""
    _check_bfloat16(implementation, family, rows, 1, 1, 3)


def test_interpret_mode_raises_on_a_race():
    parameters = mosaic_helpers.interpreter(True)
    assert parameters.detect_races and parameters.on_race == "raise"


def test_float32_rows_are_refused_by_name():
    with pytest.raises(ValueError, match="bfloat16 here, not float32"):
        masked_expert_gemm(*_case("qwen3_moe", [0]), activation=_SWIGLU, implementation="mosaic")


def test_wgmma_refuses_mxfp4_by_name():
    with pytest.raises(ValueError, match="takes no MXFP4"):
        _run("mosaic_wgmma", "gpt_oss_mxfp4", _case("gpt_oss_mxfp4", [0]))


def test_a_width_that_copies_do_not_take_is_refused_by_number():
    x, *others = _case("qwen3_moe", [0])
    with pytest.raises(ValueError, match="multiple of 8, not 60"):
        _run("mosaic", "qwen3_moe", (x[:, :60], *others))
