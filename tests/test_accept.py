"""The greedy accept walk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.speculation import TreeConfig, accept_greedy, grow
from tests.speculation_oracle import FakeDraft, oracle_walk, random_tree, target_id, tree_of

accept = jax.jit(accept_greedy, static_argnames="max_accepted")


@functools.partial(jax.jit, static_argnames="config")
def grown_tree(seed, levels, config, root_token):
    draft, scratch = FakeDraft(seed, levels), jnp.zeros(config.draft_rows, jnp.uint32)
    first = draft.first(root_token, config)
    return grow(draft.step_fn(config), scratch, *first, root_token, config)[0]


def paths_of(tree):
    """Returns every node's path of tokens, the root's first."""
    paths = []
    for token, parent in zip(tree.tokens.tolist(), tree.parent.tolist()):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("vocabulary", [2, 3, 6])
def test_the_walk_equals_a_recursive_walk_over_random_trees(vocabulary):
    rng = np.random.default_rng(vocabulary)
    lengths = set()
    for _ in range(150):
        tree = random_tree(rng, nodes=24, max_depth=5, vocabulary=vocabulary)
        target = rng.integers(vocabulary, size=24).astype(np.int32)
        path = oracle_walk(jax.tree.map(np.asarray, tree), target)
        result = accept(tree, target, max_accepted=6)
        padding = [0] * (6 - len(path))
        np.testing.assert_array_equal(result.rows, path + padding)
        np.testing.assert_array_equal(result.tokens, [*target[path], *padding])
        assert int(result.length) == len(path)
        assert int(result.bonus) == target[path[-1]]
        lengths.add(len(path))
    assert len(lengths) >= 4


def test_the_bonus_comes_from_the_last_accepted_nodes_row():
    # One of four drafts is accepted, node 2.
    tree = tree_of([9, 1, 2, 3, 4], [-1, 0, 0, 2, 2])
    result = accept(tree, jnp.array([2, 50, 60, 70, 80]), max_accepted=3)
    assert int(result.length) == 2
    np.testing.assert_array_equal(result.rows, [0, 2, 0])
    np.testing.assert_array_equal(result.tokens, [2, 60, 0])
    assert int(result.bonus) == 60


def test_a_one_node_draft_that_the_target_disagrees_with_is_rejected():
    result = accept(tree_of([9, 1], [-1, 0]), jnp.array([3, 1]), max_accepted=2)
    assert (int(result.length), int(result.bonus)) == (1, 3)
    np.testing.assert_array_equal(result.tokens, [3, 0])


def test_of_two_children_with_one_token_the_first_is_taken():
    # The second would lead further.
    tree = tree_of([9, 1, 1, 5, 7], [-1, 0, 0, 1, 2])
    result = accept(tree, jnp.array([1, 6, 7, 0, 0]), max_accepted=3)
    np.testing.assert_array_equal(result.rows, [0, 1, 0])
    np.testing.assert_array_equal(result.tokens, [1, 6, 0])


def test_invalid_nodes_never_match():
    tree = tree_of([9, 1, 1], [-1, 0, 0], valid=[True, False, True])
    result = accept(tree, jnp.array([1, 5, 6]), max_accepted=2)
    np.testing.assert_array_equal(result.rows, [0, 2])
    tree = tree.replace(valid=np.array([True, False, False]))
    assert int(accept(tree, jnp.array([1, 5, 6]), max_accepted=2).length) == 1


def test_the_root_is_never_accepted_as_a_draft():
    tree = tree_of([9, 1], [-1, 0])
    result = accept(tree, jnp.array([9, 9]), max_accepted=4)
    assert int(result.length) == 1
    np.testing.assert_array_equal(result.tokens, [9, 0, 0, 0])


def test_a_match_below_a_rejected_node_is_not_reached():
    tree = tree_of([9, 1, 2, 3], [-1, 0, 1, 2])
    assert int(accept(tree, jnp.array([4, 2, 3, 0]), max_accepted=4).length) == 1


def test_never_more_than_max_accepted_tokens_are_emitted():
    tree = tree_of([9, 1, 2, 3], [-1, 0, 1, 2])
    result = accept(tree, jnp.array([1, 2, 3, 4]), max_accepted=3)
    np.testing.assert_array_equal(result.tokens, [1, 2, 3])
    assert (int(result.length), int(result.bonus)) == (3, 3)


def test_the_first_maximum_decides_between_tied_children():
    logits = jnp.array([[1.0, 3.0, 3.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    tree = tree_of([0, 2, 1], [-1, 0, 0])
    verify = jax.jit(lambda logits: accept_greedy(tree, jnp.argmax(logits, axis=-1), 2))
    result = verify(logits)
    np.testing.assert_array_equal(result.rows, [0, 2])
    np.testing.assert_array_equal(result.tokens, [1, 0])


def test_a_target_that_drafts_for_itself_accepts_every_step():
    config = TreeConfig(steps=4, top_k=4, nodes=40)
    for seed in range(5):
        # With few levels the greedy token is all but certain, so its path is in every tree.
        draft = FakeDraft(seed, levels=4)
        tree = grown_tree(seed, draft.levels, config, root_token=11)

        def greedy(path):
            return int(target_id(np.argmax(draft.after_path(path, config.steps))))

        decoded = [11]
        for _ in range(config.max_accepted):
            decoded.append(greedy(decoded))
        target = np.array([greedy(path) for path in paths_of(tree)])
        result = accept(tree, target, max_accepted=config.max_accepted)
        assert int(result.length) == config.max_accepted
        np.testing.assert_array_equal(result.tokens, decoded[1:])


def test_the_tree_wins_where_the_target_leaves_the_first_child():
    config = TreeConfig(steps=3, top_k=4, nodes=30)
    tree = jax.tree.map(np.asarray, grown_tree(2, 64, config, root_token=11))
    parent = tree.parent
    first_child = {int(p): int(np.flatnonzero(parent == p)[0]) for p in parent[1:]}
    leaving = [
        node
        for node in range(1, config.nodes)
        if tree.depth[node] == 3
        and first_child[parent[node]] != node
        and first_child[parent[parent[node]]] != parent[node]
    ]
    assert leaving, "the case must hold a path that twice leaves the first child"
    for node in leaving:
        path = [0, int(parent[parent[node]]), int(parent[node]), node]
        target = np.full(config.nodes, 999)
        target[path[:-1]] = tree.tokens[path[1:]]
        result = accept(tree, target, max_accepted=config.max_accepted)
        np.testing.assert_array_equal(result.rows, path)
        assert int(result.bonus) == 999


def test_the_walk_is_the_same_compiled_eager_and_batched_and_compiles_once():
    rng = np.random.default_rng(7)
    trees = [random_tree(rng, nodes=13, max_depth=4, vocabulary=3) for _ in range(6)]
    targets = rng.integers(3, size=(6, 13)).astype(np.int32)
    traces = []

    @jax.jit
    def compiled(tree, target):
        traces.append(1)
        return accept_greedy(tree, target, 5)

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
    eager = accept_greedy(jax.tree.map(jnp.asarray, trees[0]), jnp.asarray(targets[0]), 5)
    jax.tree.map(np.testing.assert_array_equal, eager, compiled(trees[0], targets[0]))
    batched = jax.jit(jax.vmap(lambda *block: accept_greedy(*block, 5)))(stacked, targets)
    for i, (tree, target) in enumerate(zip(trees, targets)):
        one = jax.tree.map(lambda leaf: leaf[i], batched)
        jax.tree.map(np.testing.assert_array_equal, one, compiled(tree, target))
    assert len(traces) == 1


def test_results_are_int32():
    result = accept(tree_of([9, 1], [-1, 0]), jnp.array([1, 1]), max_accepted=2)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(result)} == {"int32"}
