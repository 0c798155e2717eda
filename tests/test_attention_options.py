"""What tells one attention from another: sinks, windows and YaRN, by their numbers."""

import jax
import numpy as np
import pytest

from acceptmoe_jax.models.attention import attend, rope_frequencies, rotary, window_mask
from acceptmoe_jax.models.config import ConfigReader, RopeConfig
from tests.reference_cases import ROPE_CASE, ROPES, read_case

GPT_OSS_ROPE = RopeConfig(150000.0, 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)


def rope_of(name: str) -> tuple[RopeConfig, int]:
    """(rotary positions, head width) of one of `ROPES`, as a config.json would give them."""
    raw = ROPES[name]
    return ConfigReader(raw, "config.json").rope(), raw["head_dim"]


# --- Sinks -------------------------------------------------------------------------------------

# One program each for the tests below: 4 rows, 11 columns, 6 query and 3 kv heads of width 10.
ROWS, COLUMNS = (4, 6, 10), (11, 3, 10)
_attend = jax.jit(attend)


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_sink_takes_its_share_of_the_softmax_and_is_dropped():
    """With Q.K = 0, V = 1 and n keys the output is n / (n + e^s), for the s of each head."""
    keys = np.array([1, 2, 5, 11])
    sinks = np.array([-1.5, 0.0, 0.75, 2.0, 3.5, 6.0], np.float32)
    mask = np.arange(11) < keys[:, None]
    q, v = np.zeros(ROWS, np.float32), np.ones(COLUMNS, np.float32)
    out = _attend(q, normal(0, COLUMNS), v, mask, sinks)
    expected = keys[:, None] / (keys[:, None] + np.exp(sinks))
    np.testing.assert_allclose(out, np.broadcast_to(expected[..., None], ROWS), rtol=1e-6)


def test_a_sink_that_is_far_below_every_score_is_none():
    q, k, v = normal(1, ROWS), normal(2, COLUMNS), normal(3, COLUMNS)
    mask = np.tri(4, 11, 7, dtype=bool)
    with_sinks = _attend(q, k, v, mask, np.full(6, -1e4, np.float32))
    np.testing.assert_allclose(with_sinks, _attend(q, k, v, mask), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("sink", "expected"), [(1e4, 0.0), (-1e4, 2.0)])
def test_scores_and_sinks_of_any_size_overflow_nothing(sink, expected):
    """The greater takes all: the sink, or keys whose scores are as large."""
    q, k = np.ones(ROWS, np.float32), np.full(COLUMNS, -sink, np.float32)
    v, sinks = np.full(COLUMNS, 2, np.float32), np.full(6, sink, np.float32)
    out = _attend(q, k, v, np.ones((4, 11), bool), sinks)
    np.testing.assert_allclose(out, np.full(ROWS, expected), rtol=1e-6)


# --- Windows -----------------------------------------------------------------------------------


def test_a_window_counts_the_row_itself():
    """W = 3: the query at 5 sees exactly the keys 3, 4 and 5."""
    place = np.arange(9)
    seen = window_mask(np.tri(9, dtype=bool), place, place, 3)
    np.testing.assert_array_equal(np.flatnonzero(seen[5]), [3, 4, 5])
    np.testing.assert_array_equal(np.flatnonzero(seen[1]), [0, 1])


def test_without_a_window_the_mask_stays_as_it_is():
    mask, place = np.tri(9, dtype=bool), np.arange(9)
    np.testing.assert_array_equal(window_mask(mask, place, place, None), mask)


def test_in_a_tree_a_window_counts_positions_and_not_rows():
    """A prefix of 4, then a root and two branches of three nodes whose rows alternate; W = 3."""
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5], [0, 2, 4, 6]]
    depth = np.array([len(path) - 1 for path in paths])
    tree = np.zeros((7, 11), bool)
    tree[:, :4] = True
    for node, path in enumerate(paths):
        tree[node, 4 + np.array(path)] = True
    seen = window_mask(tree, 4 + depth, np.append(np.arange(4), 4 + depth), 3)
    expected = {
        0: [2, 3, 4],  # the root stands in row 4
        1: [3, 4, 5],
        2: [3, 4, 6],
        3: [4, 5, 7],
        4: [4, 6, 8],  # the root is four rows behind, but two positions
        5: [5, 7, 9],  # the root is out of sight
        6: [6, 8, 10],
    }
    assert {node: np.flatnonzero(row).tolist() for node, row in enumerate(seen)} == expected


# --- Rotary positions --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_rope_parameters"])
def test_both_spellings_give_gpt_oss_its_rotary_positions(name):
    assert rope_of(name) == (GPT_OSS_ROPE, 64)


def test_the_ramp_of_gpt_oss_runs_where_its_authors_put_it():
    """From pair 8.0928 to 17.3980 of 32, not truncated; cosines and sines are scaled by 1.34657."""
    frequency, scale = rope_frequencies(GPT_OSS_ROPE, 64)
    assert scale == pytest.approx(1.34657, abs=5e-6)
    plain = 150000.0 ** (-np.arange(32) / 32)
    slowed = (1 - frequency / plain) / (1 - 1 / 32)  # 0 where a pair keeps its frequency
    inside = np.arange(9, 18)
    slope, offset = np.polyfit(inside, slowed[inside], 1)
    assert -offset / slope == pytest.approx(8.0928, abs=1e-4)
    assert (1 - offset) / slope == pytest.approx(17.3980, abs=1e-4)
    np.testing.assert_allclose(slowed[:9], 0, atol=1e-6)
    np.testing.assert_allclose(slowed[18:], 1, atol=1e-6)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_scale_are_those_of_transformers(data_dir, name):
    case = read_case(data_dir, ROPE_CASE)
    frequency, scale = rope_frequencies(*rope_of(name))
    np.testing.assert_allclose(frequency, case[f"{name}/inv_freq"], rtol=2e-7, atol=0)
    assert scale == pytest.approx(case[f"{name}/attention_factor"].item(), rel=1e-12)


def test_cosines_and_sines_are_scaled_at_every_position():
    cos, sin = rotary(np.array([0, 1, 4095, 131071]), 64, GPT_OSS_ROPE)
    np.testing.assert_allclose(np.hypot(cos, sin), 1.34657, atol=5e-6)
