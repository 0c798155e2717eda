"""Path commitment: the fit, the map, the weights it gives nodes, and its place in the table.

Oracles: the minimax formula of isotonic regression, NumPy's interpolation, the tests' own loops.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.selection import (
    Commitment,
    CommitmentTable,
    PathTable,
    SelectorConfig,
    fit_path_commitment,
    node_commitment,
)
from acceptmoe_jax.selection.path_calibration import isotonic
from tests import selection_oracle
from tests.selection_blocks import block, compiled_select, mask_of, members, select

PATH = PathTable(
    knots=((0.0,), (-3.0, -1.5, -0.25), (-6.0, -2.0)), rates=((1.0,), (0.01, 0.2, 0.8), (0.05, 0.5))
)
COUNTS = ([40, 30, 12], [40, 400, 300], 40)
ORIGIN = dict(target_hash="t", head_hash="h", data="training prompts", seed=7)


def table(path=PATH, **settings):
    return CommitmentTable.from_counts(*COUNTS, path=path, **ORIGIN, **settings)


def drawn_nodes(seed, count=20_000):
    """Nodes of depths 1 and 2 whose chance of commitment is a known rising function of score."""
    rng = np.random.default_rng(seed)
    depth = rng.integers(1, 3, count)
    score = -rng.exponential(2.0, count)
    chance = np.exp(score) ** 0.8 / depth
    return depth, score, rng.random(count) < chance, chance


# The fit.


@pytest.mark.parametrize("seed", range(5))
def test_pooling_is_isotonic_regression(seed):
    rng = np.random.default_rng(seed)
    values = np.round(rng.random(40) + np.linspace(0, seed / 4, 40), 1)
    weights = rng.integers(1, 9, 40)
    expect = [
        max(
            min(np.average(values[j:k], weights=weights[j:k]) for k in range(i + 1, 41))
            for j in range(i + 1)
        )
        for i in range(40)
    ]
    np.testing.assert_allclose(isotonic(values, weights), expect, rtol=1e-12)


def test_the_fit_recovers_the_chance_that_nodes_were_drawn_with():
    depth, score, committed, chance = drawn_nodes(0)
    commitment = Commitment(jnp.ones(3), fit_path_commitment(depth, score, committed).arrays())
    found = np.asarray(node_commitment(commitment, jnp.array(depth), jnp.array(score, jnp.float32)))
    assert np.abs(found - chance).mean() < 0.02
    # At the top too, where few nodes are: a bin of many would flatten it.
    top = score > -0.1
    assert np.abs(found - chance)[top].mean() < 0.06


def test_rates_never_fall_even_where_the_observations_do():
    depth, score, committed, _ = drawn_nodes(1)
    fitted = fit_path_commitment(depth, -9 - score, committed)
    assert all((np.diff(rates) >= 0).all() for rates in fitted.rates)
    for at in (1, 2):
        assert np.allclose(fitted.rates[at], committed[depth == at].mean())


def test_no_depth_has_more_knots_than_asked_for():
    fitted = fit_path_commitment(*drawn_nodes(2)[:3], most_knots=5)
    assert [len(row) for row in fitted.knots] == [1, 5, 5]


def test_a_depth_with_few_nodes_has_its_average_rate():
    depth, score = np.full(9, 1), np.linspace(-4.0, 0.0, 9)
    fitted = fit_path_commitment(depth, score, score > -1.2, depths=4)
    assert fitted.rates == ((1.0,), (pytest.approx(3 / 9),), (1e-3,), (1e-3,))
    assert fitted.knots[1] == (pytest.approx(-2.0),)


def test_what_was_never_committed_keeps_a_floor():
    depth, score, committed, _ = drawn_nodes(3)
    fitted = fit_path_commitment(depth, score, committed & (score > -3))
    assert min(min(row) for row in fitted.rates) == 1e-3


def test_nodes_of_one_score_share_a_bin():
    score = np.repeat([-2.0, -1.0], 500)
    committed = np.arange(1000) % 5 < np.repeat([1, 3], 500)
    fitted = fit_path_commitment(np.full(1000, 1), score, committed)
    assert fitted.knots[1] == (-2.0, -1.0)
    assert fitted.rates[1] == pytest.approx((0.2, 0.6))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"score": np.zeros(4)}, "alike"),
        ({"score": np.array([0.0, -1.0, -np.inf])}, "finite"),
        ({"depths": 2}, "depth"),
        ({"depth": np.array([0, -1, 2])}, "depth"),
    ],
)
def test_nodes_that_cannot_be_fitted_are_refused(change, named):
    nodes = dict(
        depth=np.array([0, 1, 2]), score=np.array([0.0, -1, -2]), committed=np.array([True] * 3)
    )
    with pytest.raises(ValueError, match=named):
        fit_path_commitment(**nodes | change)


# The map.


def test_between_knots_the_map_is_linear_and_beyond_them_constant():
    depth = jnp.array([1] * 7 + [2] * 4 + [5])
    score = jnp.array([-9.0, -3.0, -2.0, -1.5, -1.0, -0.25, 0.0, -jnp.inf, -4.0, -1.0, 0.0, -4.0])
    found = jax.jit(node_commitment)(table().commitment(), depth, score)
    rows = np.minimum(depth, 2)  # a deeper node takes the last row
    expect = [np.interp(s, PATH.knots[d], PATH.rates[d]) for d, s in zip(rows, score)]
    np.testing.assert_allclose(found, expect, rtol=1e-6)


def test_the_root_is_certain_whatever_its_score():
    scores = jnp.array([0.0, -5.0, -jnp.inf])
    found = node_commitment(table().commitment(), jnp.zeros(3, jnp.int32), scores)
    np.testing.assert_array_equal(found, [1.0, 1.0, 1.0])


def test_a_table_without_a_path_calibration_is_refused():
    with pytest.raises(ValueError, match="no path calibration"):
        node_commitment(table(path=None).commitment(), jnp.zeros(1, jnp.int32), jnp.zeros(1))


# The weights.


def test_a_flat_map_at_the_depths_share_weighs_as_the_depth_rule():
    arrays = block(5)
    logits, depth, valid, phat, resident = arrays
    nodes = np.bincount(depth[valid], minlength=len(phat))
    path_phat = (phat / np.maximum(nodes, 1))[depth]
    by_depth = select(*arrays, config=SelectorConfig(top_k=3))
    by_path = select(*arrays, config=SelectorConfig(top_k=3, path=True), path_phat=path_phat)
    np.testing.assert_allclose(by_path.alpha, by_depth.alpha, rtol=1e-6)
    before = members(by_path.eligible_before_pruning)
    assert before == members(by_depth.eligible_before_pruning)


@pytest.mark.parametrize("admit", [0, 2])
@pytest.mark.parametrize("policy", ["acceptmoe", "acceptmoe_fix"])
def test_path_weighted_blocks_agree_with_the_reference_of_loops(policy, admit):
    config = SelectorConfig(policy=policy, top_k=3, budget=6, path=True, beta=0.8, admit=admit)
    differ = 0
    for seed in range(15):
        arrays = block(seed)
        path_phat = np.random.default_rng(seed).uniform(0.01, 1, 17).astype(np.float32)
        size = 3 if policy == "acceptmoe_fix" else None
        settings = dict(top_k=3, beta=0.8, size=size, path_phat=path_phat, admit=admit)
        expect = selection_oracle.select(*arrays, **settings)
        result = select(*arrays, config=config, path_phat=path_phat)
        np.testing.assert_allclose(result.alpha, expect["alpha"], rtol=1e-5)
        np.testing.assert_allclose(result.demand, expect["demand"], rtol=1e-5, atol=1e-6)
        for name in ("eligible_before_pruning", "admitted", "pruned", "eligible"):
            assert members(getattr(result, name)) == expect[name], (seed, name)
        np.testing.assert_array_equal(result.assignments, expect["assignments"])
        assert result.rerouting_budget == expect["rerouting_budget"], "counts, as without paths"
        by_depth = select(*arrays, config=dataclasses.replace(config, path=False))
        differ += members(by_depth.eligible) != expect["eligible"]
    assert differ > 2, "the weights must matter"


def test_pruning_displaces_the_weight_of_nodes_and_not_their_number():
    # By demand S = {0, 1, 2, 3}. Outside it is 4, the choice of one node that weighs 0.3; 2 is the
    # choice of one of 0.8, and 3 of three that together weigh 0.27.
    logits = np.full((6, 7), -9.0, np.float32)
    logits[:, 0] = 3.0
    for row, (second, logit) in enumerate([(1, 2), (2, 2), (3, 2), (3, 2), (3, 2), (4, -3)]):
        logits[row, second] = logit
    path_phat = np.array([1.0, 0.8, 0.09, 0.09, 0.09, 0.3], np.float32)
    arrays = (logits, np.array([0, 1, 1, 1, 1, 1]), np.ones(6, bool), np.array([1.0, 0.5]))
    counted = SelectorConfig(policy="acceptmoe_fix", top_k=2, budget=4, beta=1.0)
    weighed = dataclasses.replace(counted, path=True)
    for absent, by_count, by_weight in ((2, {2}, set()), (3, set(), {3})):
        arguments = (*arrays, ~mask_of([absent], 7))
        for config, pruned in ((counted, by_count), (weighed, by_weight)):
            result = compiled_select(*arguments, config=config, path_phat=path_phat)
            assert members(result.eligible_before_pruning) == {0, 1, 2, 3}
            assert result.rerouting_budget == 1
            assert members(result.pruned) == pruned


@pytest.mark.parametrize("admit", [0, 2])
def test_pruning_by_weight_keeps_its_promises(admit):
    config = SelectorConfig(top_k=3, path=True, protect_anchor=False, admit=admit)
    pruning = 0
    for seed in range(15):
        arrays = block(seed)
        path_phat = np.random.default_rng(seed).uniform(0.01, 1, 17).astype(np.float32)
        result = select(*arrays, config=config, path_phat=path_phat)
        weight = np.zeros(14)
        for row in np.flatnonzero(arrays[2]):
            weight[result.natural_ids[row]] += path_phat[row] ** 0.5
        before, eligible = np.asarray(result.eligible_before_pruning), np.asarray(result.eligible)
        assert weight[~eligible].sum() <= 2 * weight[~before].sum() + 1e-5
        assert eligible.sum() >= config.top_k
        demand, pruned = np.asarray(result.demand), members(result.pruned)
        order = sorted(members(before & ~arrays[-1]), key=lambda e: (demand[e], e))
        assert pruned == set(order[: len(pruned)]), "a prefix in ascending demand"
        pruning += bool(pruned)
    assert pruning > 5, "the blocks must exercise pruning"


def test_what_a_padded_node_scores_does_not_matter():
    arrays = block(3)
    path_phat = np.where(arrays[2], 0.3, np.nan).astype(np.float32)
    result = select(*arrays, config=SelectorConfig(top_k=3, path=True), path_phat=path_phat)
    assert np.isfinite(result.demand).all() and not result.alpha[~arrays[2]].any()


def test_path_weights_need_the_nodes_own_probabilities_where_nodes_are_weighed():
    arrays = block(0)
    with pytest.raises(ValueError, match="path_phat is needed"):
        select(*arrays, config=SelectorConfig(top_k=3, path=True))
    with pytest.raises(ValueError, match="path_phat must have shape"):
        select(*arrays, config=SelectorConfig(top_k=3, path=True), path_phat=np.ones(16))
    select(*arrays, config=SelectorConfig(policy="native", top_k=3, path=True))


def test_path_and_uniform_weights_exclude_each_other():
    with pytest.raises(ValueError, match="path"):
        SelectorConfig(path=True, uniform=True)


# The table.


def test_a_saved_calibration_loads_as_it_was(tmp_path):
    file = tmp_path / "commitment.json"
    table().save(file)
    assert CommitmentTable.load(file) == table()
    record = json.loads(file.read_text())
    assert record["version"] == 1
    assert record["path"]["knots"] == [[0.0], [-3.0, -1.5, -0.25], [-6.0, -2.0]]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ([], "path"),
        ({"knots": [[0.0]] * 3}, "knots and rates"),
        ({"knots": [[0.0]] * 3, "rates": [[1.0]] * 3, "bins": 3}, "knots and rates"),
        ({"knots": [[0.0]] * 3, "rates": [1.0] * 3}, "lists of numbers"),
        ({"knots": [[0.0]] * 3, "rates": [["1"]] * 3}, "lists of numbers"),
        ({"knots": [[0.0]] * 2, "rates": [[1.0]] * 2}, "one row a depth"),
        ({"knots": [[0.0]] * 3, "rates": [[1.0], [0.5], []]}, "same shape"),
        ({"knots": [], "rates": []}, "at least one knot"),
        ({"knots": [[0.0], [-1, -1], [0]], "rates": [[1.0], [0.1, 0.2], [0.1]]}, "ascend"),
        ({"knots": [[0.0], [-2, -1], [0]], "rates": [[1.0], [0.3, 0.2], [0.1]]}, "never fall"),
        ({"knots": [[0.0]] * 3, "rates": [[1.0], [0.0], [0.1]]}, r"\(0, 1\]"),
        ({"knots": [[0.0]] * 3, "rates": [[0.9], [0.5], [0.1]]}, "root"),
    ],
)
def test_a_malformed_calibration_is_refused_by_file(tmp_path, path, named):
    file = tmp_path / "commitment.json"
    table().save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"path": path}))
    with pytest.raises(UserError, match=named) as refusal:
        CommitmentTable.load(file)
    assert str(file) in str(refusal.value)


def test_per_node_phat_needs_no_new_calibration():
    assert table().with_per_node(True) == table(per_node=True)
    assert table(per_node=True).with_per_node(False) == table()


def test_a_step_is_given_the_tables_numbers():
    commitment = table().commitment()
    np.testing.assert_allclose(commitment.phat, [1.0, 0.75, 0.3])
    assert commitment.path.knots.shape == commitment.path.rates.shape == (3, 3)
    assert table(path=None).commitment().path is None
