"""Statistics of traces, each jitted and against loops in NumPy."""

import functools

import jax
import numpy as np
import pytest

from acceptmoe_jax import selection
from acceptmoe_jax.traces import statistics
from tests import selection_oracle, trace_cases

VERIFICATIONS = trace_cases.requests(6, (11,))["p0"]
TRACE = trace_cases.SETTINGS.stack(VERIFICATIONS)
TOP_K = 3


def jitted(name, **static):
    return jax.jit(functools.partial(getattr(statistics, name), **static))


def test_the_accepted_path_as_a_mask():
    ours = jitted("committed")(TRACE.path, TRACE.length, TRACE.valid)
    np.testing.assert_array_equal(ours, [v.committed for v in VERIFICATIONS])
    assert set(TRACE.length.tolist()) > {1}


def test_an_invalid_node_is_never_on_the_path():
    ours = jitted("committed")(np.array([0, 2]), np.int32(2), np.array([True, True, False]))
    np.testing.assert_array_equal(ours, [True, False, False])


def test_reach_counts_verifications_whose_path_gets_to_a_depth():
    ours = jitted("reach")(TRACE.path, TRACE.length, TRACE.depth)
    expected = [sum(v.length > depth for v in VERIFICATIONS) for depth in range(5)]
    np.testing.assert_array_equal(ours, expected)


def test_commitment_probabilities_add_up_to_the_mean_accepted_length():
    phat = jitted("phat_by_depth")(TRACE.path, TRACE.length, TRACE.depth)
    mean = jitted("mean_accepted_length")(TRACE.length)
    assert phat[0] == 1
    np.testing.assert_allclose(phat.sum(), mean, rtol=1e-6)
    np.testing.assert_allclose(mean, np.mean([v.length for v in VERIFICATIONS]), rtol=1e-6)


def test_no_verification_has_no_mean():
    nothing = trace_cases.SETTINGS.stack([])
    assert jitted("mean_accepted_length")(nothing.length) == 0
    phat = jitted("phat_by_depth")(nothing.path, nothing.length, nothing.depth)
    np.testing.assert_array_equal(phat, np.zeros(5))


def test_nodes_by_depth_leaves_invalid_nodes_out():
    ours = jitted("nodes_by_depth", depths=5)(TRACE.depth, TRACE.valid)
    np.testing.assert_array_equal(ours, np.bincount(TRACE.depth[TRACE.valid], minlength=5))
    assert ours.sum() < TRACE.depth.size


def natural_picks(n, layer):
    picks = selection_oracle.natural_experts(TRACE.logits[n, layer], TOP_K)
    return picks[TRACE.valid[n]].ravel()


def test_natural_assignments_and_union_of_every_layer():
    args = (TRACE.logits, TRACE.valid[:, None])
    assignments = jitted("natural_assignments", top_k=TOP_K)(*args)
    union = jitted("natural_union", top_k=TOP_K)(*args)
    for n in range(11):
        for layer in range(2):
            picks = natural_picks(n, layer)
            np.testing.assert_array_equal(assignments[n, layer], np.bincount(picks, minlength=12))
            assert union[n, layer] == len(set(picks.tolist()))


def test_overlap_is_the_jaccard_index():
    a, b = TRACE.eligible, TRACE.used
    a[0, 0] = b[0, 0] = False
    ours = jitted("overlap")(a, b)
    assert ours[0, 0] == 1
    for n, layer in np.ndindex(11, 2):
        mine, theirs = set(np.flatnonzero(a[n, layer])), set(np.flatnonzero(b[n, layer]))
        if mine | theirs:
            expected = len(mine & theirs) / len(mine | theirs)
            np.testing.assert_allclose(ours[n, layer], expected, rtol=1e-6)


def test_top_k_mass_is_a_mean_over_valid_rows():
    ours = jitted("top_k_mass", top_k=TOP_K)(TRACE.logits, TRACE.valid[:, None])
    probabilities = selection_oracle.softmax(TRACE.logits.astype(np.float64))
    best = np.sort(probabilities, axis=-1)[..., -TOP_K:].sum(axis=-1)
    expected = [[best[n, i, TRACE.valid[n]].mean() for i in range(2)] for n in range(11)]
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_load_entropy_is_log_e_of_an_even_load():
    load_entropy = jitted("load_entropy")
    loads = np.array([[4, 4, 4, 4, 4], [0, 7, 0, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 0, 4]])
    share = np.array([0.1, 0.2, 0.3, 0.4])
    expected = [np.log(5), 0, 0, -(share * np.log(share)).sum()]
    np.testing.assert_allclose(load_entropy(loads), expected, atol=1e-6)


def test_commitment_samples_are_what_a_path_calibration_is_fitted_on():
    samples = jitted("commitment_samples")(
        TRACE.depth, TRACE.score, TRACE.valid, TRACE.path, TRACE.length
    )
    counted = np.asarray(samples.counted)
    arrays = [np.asarray(a)[counted] for a in (samples.depth, samples.score, samples.committed)]
    expected = [
        (v.depth[t], v.score[t], t in v.path[: v.length])
        for v in VERIFICATIONS
        for t in np.flatnonzero(v.valid)
    ]
    assert list(zip(*arrays)) == expected
    assert len(selection.fit_path_commitment(*arrays).knots) == arrays[0].max() + 1


def test_the_bootstrap_draws_requests_again_by_a_seed():
    parts, wholes = np.array([3.0, 0, 8, 2, 9]), np.array([4.0, 5, 10, 2, 12])
    interval = functools.partial(statistics.bootstrap_interval, parts, wholes)
    rng = np.random.default_rng(3)
    ratios = []
    for drawn in rng.integers(0, 5, (400, 5)):
        ratios.append(sum(parts[i] for i in drawn) / sum(wholes[i] for i in drawn))
    expected = np.percentile(ratios, [10, 90])
    np.testing.assert_allclose(interval(level=0.8, resamples=400, seed=3), expected, rtol=1e-12)
    assert interval(seed=1, resamples=9) == interval(seed=1, resamples=9)
    assert interval(seed=1, resamples=9) != interval(seed=2, resamples=9)
    low, high = interval()
    assert low < parts.sum() / wholes.sum() < high


def test_the_bootstrap_of_equal_requests_has_no_width():
    assert statistics.bootstrap_interval([1, 2], [2, 4]) == (0.5, 0.5)


def test_the_bootstrap_covers_what_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        wholes = rng.integers(5, 30, 40)
        parts = rng.binomial(wholes, 0.7)
        low, high = statistics.bootstrap_interval(parts, wholes, resamples=300, seed=trial)
        covered += low <= 0.7 <= high
    assert 0.88 < covered / 200 <= 0.99


@pytest.mark.parametrize(
    ("parts", "wholes", "message"),
    [
        ([], [], "one at least"),
        ([1], [1, 2], "one number a request"),
        ([0, 0], [0, 0], "nor all 0"),
        ([1, 1], [2, -1], "not be negative"),
    ],
)
def test_requests_without_a_ratio_are_refused(parts, wholes, message):
    with pytest.raises(ValueError, match=message):
        statistics.bootstrap_interval(parts, wholes)
