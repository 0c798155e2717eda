"""EVICT: cutting a tree to its best nodes, and choosing how many those are."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.speculation import (
    CostTable,
    DraftTree,
    TreeConfig,
    accept_greedy,
    choose_length,
    expected_tokens,
    grow,
    keep_best,
)
from tests.speculation_oracle import FakeDraft, oracle_best, random_scores, random_tree, tree_of

cut = jax.jit(keep_best, static_argnames="nodes")
accept = jax.jit(accept_greedy, static_argnames="max_accepted")

NODES, DEPTH = 14, 4
LENGTHS = (1, 2, 5, 9, NODES)
# The paths of three drafts: probabilities 1/2, 1/4 and 1/8, not in their order.
WORKED = np.log([1.0, 0.25, 0.5, 0.125])
ALL = np.ones(4, bool)


def random_cases(seed, count=30):
    """Trees with ties, with invalid nodes, with both and with neither."""
    rng = np.random.default_rng(seed)
    for case in range(count):
        tree = random_tree(rng, NODES, DEPTH, vocabulary=3)
        yield rng, random_scores(rng, tree, levels=(1, 2, 50)[case % 3])


def assert_same(one, other):
    for name in DraftTree.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
        assert getattr(one, name).dtype == getattr(other, name).dtype


# The cut


def test_the_best_nodes_are_kept_in_their_order_under_their_own_parents():
    invalid_kept = 0
    for _, tree in random_cases(0):
        for nodes in LENGTHS:
            kept = oracle_best(tree, nodes)
            result = cut(tree, nodes)
            for name in ("tokens", "depth", "score", "valid"):
                np.testing.assert_array_equal(getattr(result, name), getattr(tree, name)[kept])
            parents = [kept.index(tree.parent[node]) if node else -1 for node in kept]
            np.testing.assert_array_equal(result.parent, parents)
            invalid_kept += nodes < NODES and not np.all(result.valid)
    assert invalid_kept, "a case must hold fewer valid nodes than are kept"


def test_a_grown_tree_is_closed_under_ancestors_at_every_length():
    config = TreeConfig(steps=3, top_k=4, nodes=20)
    lengths = (1, 2, 6, 13, 19, 20)

    @jax.jit
    def cut_all(seed, levels, holes):
        draft, scratch = FakeDraft(seed, levels, holes), jnp.zeros(config.draft_rows, jnp.uint32)
        tree = grow(draft.step_fn(config), scratch, *draft.first(4, config), 4, config)[0]
        return tree, [keep_best(tree, nodes) for nodes in lengths]

    # Distinct scores, ties, certain children, and holes with ties.
    for levels, holes in ((4096, 0), (3, 0), (1, 0), (2, 6)):
        for seed in range(4):
            tree, cuts = jax.tree.map(np.asarray, cut_all(seed, levels, holes))
            for nodes, result in zip(lengths, cuts):
                kept = oracle_best(tree, nodes)
                assert set(tree.parent[kept[1:]]) <= set(kept)
                np.testing.assert_array_equal(result.tokens, tree.tokens[kept])
                above = result.parent[1:]
                np.testing.assert_array_equal(tree.parent[kept[1:]], np.array(kept)[above])


def test_the_whole_length_keeps_the_tree_bit_for_bit():
    for _, tree in random_cases(1, count=6):
        assert_same(cut(tree, NODES), tree)


def test_one_row_is_the_root_alone():
    tree = tree_of([9, 1, 2], [-1, 0, 1])
    assert_same(cut(tree, 1), jax.tree.map(lambda leaf: leaf[:1], tree))


def test_invalid_nodes_give_way_whatever_their_score():
    tree = tree_of([9, 1, 2, 3], [-1, 0, 0, 2], valid=[True, False, True, True])
    tree = tree.replace(score=np.array([0, -1, -2, -3], np.float32))
    result = cut(tree, 3)
    np.testing.assert_array_equal(result.tokens, [9, 2, 3])
    np.testing.assert_array_equal(result.parent, [-1, 0, 1])


@pytest.mark.parametrize("nodes", [-1, 0, 4])
def test_a_length_outside_the_tree_is_refused(nodes):
    with pytest.raises(ValueError, match=f"nodes .* 3, not {nodes}"):
        keep_best(tree_of([9, 1, 2], [-1, 0, 1]), nodes)


def test_what_a_cut_tree_emits_is_where_the_full_tree_goes_on():
    shorter = 0
    for rng, tree in random_cases(2):
        target = rng.integers(3, size=NODES).astype(np.int32)
        full = accept(tree, target, max_accepted=DEPTH + 1)
        full_path = list(np.asarray(full.rows)[: int(full.length)])
        for nodes in LENGTHS:
            kept = oracle_best(tree, nodes)
            result = accept(cut(tree, nodes), target[kept], max_accepted=DEPTH + 1)
            expected = sum(node in kept for node in full_path)
            assert int(result.length) == expected
            path = np.array(kept)[np.asarray(result.rows)[:expected]]
            np.testing.assert_array_equal(path, full_path[:expected])
            np.testing.assert_array_equal(result.tokens[:expected], full.tokens[:expected])
            shorter += 1 < expected < len(full_path)
    assert shorter, "a case must leave the kept nodes below an accepted draft"


def test_the_cut_is_the_same_batched():
    trees = [tree for _, tree in random_cases(3, count=3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
    batched = jax.jit(jax.vmap(functools.partial(keep_best, nodes=5)))(stacked)
    for i, tree in enumerate(trees):
        assert_same(jax.tree.map(lambda leaf: leaf[i], batched), cut(tree, 5))


# The length


def test_expected_tokens_add_up_the_best_paths_behind_the_root():
    np.testing.assert_allclose(expected_tokens(WORKED, ALL), [1, 1.5, 1.75, 1.875])
    np.testing.assert_allclose(
        expected_tokens(WORKED, ALL, root_bonus=False), [0, 0.5, 0.75, 0.875]
    )
    some = np.array([True, True, False, True])
    np.testing.assert_allclose(expected_tokens(WORKED, some), [1, 1.25, 1.375, 1.375])


def test_expected_tokens_are_those_of_the_cut_trees():
    for _, tree in random_cases(4, count=6):
        expected = expected_tokens(tree.score, tree.valid)
        for nodes in LENGTHS:
            probability = np.exp(np.asarray(cut(tree, nodes).score, np.float64)[1:])
            assert math.isclose(expected[nodes - 1], 1 + math.fsum(probability))


def test_the_most_expected_tokens_a_second_are_chosen():
    # 1 / 1, 1.75 / 1.5 and 1.875 / 1.8 tokens a second.
    assert choose_length(WORKED, ALL, CostTable((1, 3, 4), (1.0, 1.5, 1.8))) == 3


def test_lengths_count_the_root():
    # Two rows hold one draft: 1.5 / 1.4 beats 1. With two drafts it would be 1.75 / 1.8 for three.
    assert choose_length(WORKED, ALL, CostTable((1, 2, 3), (1.0, 1.4, 1.8))) == 2
    # Were length 2 credited with two drafts, 1.75 / 1.6 would beat 1.
    assert choose_length(WORKED, ALL, CostTable((1, 2), (1.0, 1.6))) == 1


def test_the_roots_bonus_is_a_switch_that_can_decide():
    costs = CostTable((2, 4), (1.0, 1.5))  # 1.5 against 1.25; without it 0.5 against 0.583
    assert choose_length(WORKED, ALL, costs) == 2
    assert choose_length(WORKED, ALL, costs, root_bonus=False) == 4


@pytest.mark.parametrize("seconds, chosen", [((3.0,) * 4, 4), ((1.0, 10.0, 20.0, 30.0), 1)])
def test_flat_costs_choose_the_longest_and_steep_ones_the_shortest(seconds, chosen):
    assert choose_length(WORKED, ALL, CostTable((1, 2, 3, 4), seconds)) == chosen


def test_of_two_that_tie_the_shorter_is_chosen():
    assert choose_length(WORKED, ALL, CostTable((1, 2, 3), (1.0, 1.5, 1.75))) == 1


def test_invalid_drafts_make_no_length_worth_more():
    costs = CostTable((2, 4), (1.0, 1.01))
    assert choose_length(WORKED, ALL, costs) == 4
    assert choose_length(WORKED, np.array([True, False, True, False]), costs) == 2


def test_lengths_above_the_tree_are_left_out():
    costs = CostTable((3, 4, 6), (1.0, 1.01, 0.1))
    assert choose_length(WORKED, ALL, costs) == 4
    with pytest.raises(ValueError, match="fits a tree of 2 nodes"):
        choose_length(WORKED[:2], ALL[:2], costs)


@pytest.mark.parametrize(
    "lengths, seconds, field",
    [
        ((), (), "lengths"),
        ((0, 2), (1.0, 2.0), "lengths"),
        ((2, 2), (1.0, 2.0), "lengths"),
        ((4, 2), (1.0, 2.0), "lengths"),
        ((2, 4), (1.0,), "seconds"),
        ((2, 4), (1.0, 0.0), "seconds"),
        ((2, 4), (1.0, -1.0), "seconds"),
        ((2, 4), (1.0, math.inf), "seconds"),
        ((2, 4), (1.0, math.nan), "seconds"),
    ],
)
def test_a_table_that_is_none_is_refused_by_field(lengths, seconds, field):
    with pytest.raises(ValueError, match=f"^{field} "):
        CostTable(lengths, seconds)
