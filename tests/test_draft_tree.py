"""The draft tree: its growth, the mask and the positions of its block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.speculation import TreeConfig, block_mask, grow, positions, tree_mask
from tests.speculation_oracle import (
    VOCABULARY,
    FakeDraft,
    assert_same_tree,
    oracle_tree,
    random_tree,
    target_id,
    tree_of,
)

DEFAULT = TreeConfig()
CONFIGS = [
    TreeConfig(steps=1, top_k=4, nodes=4),
    TreeConfig(steps=2, top_k=3, nodes=8),
    TreeConfig(steps=3, top_k=2, nodes=7),
    TreeConfig(steps=4, top_k=1, nodes=5),
    TreeConfig(steps=3, top_k=4, nodes=37),  # the whole pool
    TreeConfig(steps=6, top_k=3, nodes=11),
    DEFAULT,
]
KINDS = {
    "distinct": dict(levels=4096),
    "ties": dict(levels=3),
    "certain": dict(levels=1),
    "holes": dict(levels=512, holes=5),
    "holes and ties": dict(levels=2, holes=6),
}
ROOT = 4


def named(config):
    return f"{config.steps}-{config.top_k}-{config.nodes}"


def grow_fake(draft, config, root_token=ROOT, calls=None):
    scratch = jnp.zeros(config.draft_rows, jnp.uint32)
    first = draft.first(root_token, config)
    return grow(draft.step_fn(config, calls), scratch, *first, root_token, config)[0]


@functools.partial(jax.jit, static_argnames="config")
def grow_compiled(seed, levels, holes, root_token, config):
    return grow_fake(FakeDraft(seed, levels, holes), config, root_token)


def grow_constant(logp, config, dtype=jnp.float32, compiler=jax.jit):
    """Grows from a draft whose every row of log-probabilities is `logp` [K]."""
    ids, square = jnp.arange(config.top_k), (config.top_k, config.top_k)

    def step_fn(logp, step, tokens, hidden, ancestors):
        return logp, jnp.broadcast_to(logp, square), jnp.broadcast_to(ids, square), hidden

    @compiler
    def grow_from(logp):
        return grow(step_fn, logp, logp, ids, jnp.zeros(3), ROOT, config)[0]

    return grow_from(jnp.asarray(logp, dtype))


def oracle_mask(parent):
    mask = np.zeros((len(parent), len(parent)), bool)
    for node in range(len(parent)):
        seen = node
        while seen >= 0:
            mask[node, seen] = True
            seen = int(parent[seen])
    return mask


def recorded_steps(seed, levels, config):
    """Returns what each draft step got: (tokens, hidden, ancestors) a step, as NumPy arrays."""

    @jax.jit
    def record():
        calls = []
        grow_fake(FakeDraft(seed, levels), config, calls=calls)
        return [inputs for _, *inputs in calls]

    return jax.tree.map(np.asarray, record())


# Settings


def test_defaults_are_the_published_settings():
    assert (DEFAULT.steps, DEFAULT.top_k, DEFAULT.nodes) == (5, 10, 64)
    assert (DEFAULT.pool_size, DEFAULT.draft_rows, DEFAULT.max_accepted) == (410, 40, 6)


@pytest.mark.parametrize(
    "settings, word",
    [
        (dict(steps=0), "steps"),
        (dict(top_k=0), "top_k"),
        (dict(nodes=0), "nodes"),
        (dict(nodes=412), "410"),
        (dict(steps=5, nodes=5), "steps"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, word):
    with pytest.raises(UserError, match=word):
        TreeConfig(**settings)


def test_a_tree_of_the_whole_pool_is_allowed():
    assert TreeConfig(nodes=411).nodes == 411


# Growth


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_growth_equals_a_tree_of_explicit_nodes(config, kind):
    settings = dict(levels=4096, holes=0) | KINDS[kind]
    for seed in range(4 if config == DEFAULT else 10):
        tree = grow_compiled(seed, settings["levels"], settings["holes"], ROOT + seed, config)
        draft = FakeDraft(seed, **settings)
        assert_same_tree(tree, oracle_tree(draft, ROOT + seed, config))


def test_each_beam_carries_the_hidden_state_of_the_row_that_proposed_it():
    config, draft = TreeConfig(steps=4, top_k=5, nodes=30), FakeDraft(seed=3, levels=16)
    for step, (tokens, hidden, _) in enumerate(recorded_steps(draft.seed, draft.levels, config)):
        for token, state in zip(tokens, hidden):
            path = (ROOT, *(state[1 : step + 1].astype(int) - 1))
            assert np.all(state[step + 1 :] == 0)
            logp = draft.after_path(path, config.steps)
            proposed = sorted(range(VOCABULARY), key=lambda v: (-logp[v], v))[: config.top_k]
            assert token in [target_id(v) for v in proposed]


def test_each_beam_attends_to_itself_and_its_true_ancestors_only():
    config = TreeConfig(steps=4, top_k=5, nodes=30)
    steps = recorded_steps(3, 16, config)
    reselected = False
    written = np.concatenate([tokens for tokens, _, _ in steps])
    for step, (_, hidden, ancestors) in enumerate(steps):
        for beam in range(config.top_k):
            rows = np.flatnonzero(ancestors[beam])
            assert list(rows // config.top_k) == list(range(step + 1))
            assert rows[-1] == step * config.top_k + beam
            np.testing.assert_array_equal(written[rows[:-1]] + 1, hidden[beam, 1 : step + 1])
            reselected |= bool(np.any(rows % config.top_k != beam))
    assert reselected, "the case must contain a beam whose ancestors stood at other beams"


def test_level_one_costs_no_forward():
    for config in CONFIGS:
        calls = []
        jax.eval_shape(lambda: grow_fake(FakeDraft(0), config, calls=calls))
        assert [step for step, *_ in calls] == list(range(config.steps - 1))


def test_the_carry_comes_back_as_the_last_step_left_it():
    config = TreeConfig(steps=4, top_k=2, nodes=9)
    rows = jnp.zeros((2, 2))

    def step_fn(seen, step, tokens, hidden, ancestors):
        return (*seen, step), rows, rows.astype(int), hidden

    first = rows[0], jnp.arange(2), jnp.zeros(3)
    assert jax.jit(lambda: grow(step_fn, (), *first, ROOT, config)[1])() == (0, 1, 2)


@pytest.mark.parametrize("certain", [0.0, -0.0, 1e-7], ids=["zero", "minus zero", "rounded up"])
def test_certain_children_never_enter_before_their_parents(certain):
    config = TreeConfig(steps=4, top_k=3, nodes=9)
    tree = grow_constant([certain, -0.0, -2.0], config)
    parent = np.asarray(tree.parent)
    assert np.all(parent[1:] < np.arange(1, config.nodes))
    np.testing.assert_array_equal(tree.depth[1:], tree.depth[parent[1:]] + 1)
    np.testing.assert_array_equal(tree.score, 0)
    assert list(tree.depth).count(1) == 2, "both certain children of the root come first"


def test_plus_zero_does_not_outrank_minus_zero():
    config = TreeConfig(steps=2, top_k=2, nodes=3)

    def step_fn(carry, step, tokens, hidden, ancestors):
        return carry, jnp.zeros((2, 2)), jnp.full((2, 2), 9), hidden

    @jax.jit
    def compiled(logp):
        return grow(step_fn, None, logp, jnp.array([1, 2]), jnp.zeros(3), ROOT, config)[0]

    tree = compiled(jnp.array([-0.0, -0.0]))
    np.testing.assert_array_equal(tree.tokens, [ROOT, 1, 2])


def test_impossible_candidates_fill_the_shape_but_are_invalid():
    config = TreeConfig(steps=3, top_k=3, nodes=12)
    tree = grow_constant([-1.0, -np.inf, -np.inf], config)
    valid, parent = np.asarray(tree.valid), np.asarray(tree.parent)
    assert valid.sum() == 1 + config.steps
    assert np.all(valid[parent[1:]] | ~valid[1:])
    np.testing.assert_array_equal(np.asarray(tree.score)[valid], [0, -1, -2, -3])
    assert np.all((parent[1:] >= 0) & (parent[1:] < np.arange(1, config.nodes)))


def test_scores_add_up_in_float32_whatever_the_draft_computes_in():
    config = TreeConfig(steps=3, top_k=1, nodes=4)
    tree = grow_constant([-1.0078125], config, jnp.bfloat16)
    assert tree.score.dtype == jnp.float32
    np.testing.assert_array_equal(tree.score, np.float32([0, -1.0078125, -2.015625, -3.0234375]))


def test_siblings_stand_best_first():
    tree = grow_compiled(5, 4096, 0, ROOT, DEFAULT)
    parent, score = np.asarray(tree.parent), np.asarray(tree.score)
    for node in range(DEFAULT.nodes):
        assert np.all(np.diff(score[parent == node]) <= 0)


def test_growth_is_the_same_compiled_and_eager():
    logp, config = [-0.5, -1.25, -1.5], CONFIGS[1]
    eager = grow_constant(logp, config, compiler=lambda function: function)
    jax.tree.map(np.testing.assert_array_equal, eager, grow_constant(logp, config))


def test_growth_is_the_same_batched():
    config = CONFIGS[1]
    grow_all = jax.jit(jax.vmap(lambda seed: grow_compiled(seed, 9, 1, ROOT, config)))
    batched = grow_all(jnp.arange(3))
    for seed in range(3):
        one = jax.tree.map(lambda leaf: leaf[seed], batched)
        jax.tree.map(np.testing.assert_array_equal, one, grow_compiled(seed, 9, 1, ROOT, config))


def test_growth_compiles_once_for_all_data():
    config, calls = CONFIGS[1], []
    compiled = jax.jit(lambda seed, root: grow_fake(FakeDraft(seed), config, root, calls))
    for seed in range(3):
        compiled(seed, ROOT + seed)
    assert len(calls) == config.steps - 1


def test_node_fields_have_the_stated_types():
    tree = jax.eval_shape(lambda: grow_fake(FakeDraft(0), CONFIGS[1]))
    kinds = dict(tokens="int32", parent="int32", depth="int32", score="float32", valid="bool")
    for name, kind in kinds.items():
        assert getattr(tree, name).dtype == kind and getattr(tree, name).shape == (8,)


# Mask and positions


def test_the_root_sees_no_other_node():
    tree = grow_compiled(1, 4096, 0, ROOT, DEFAULT)
    assert list(np.flatnonzero(tree_mask(tree.parent)[0])) == [0]


def test_siblings_never_see_each_other():
    tree = grow_compiled(1, 4096, 0, ROOT, DEFAULT)
    parent = np.asarray(tree.parent)
    siblings = (parent[:, None] == parent) & ~np.eye(DEFAULT.nodes, dtype=bool)
    assert siblings.any()
    assert not np.any(siblings & np.asarray(tree_mask(tree.parent)))


def test_a_node_sees_itself_and_its_ancestors_only():
    rng, compiled = np.random.default_rng(0), jax.jit(tree_mask)
    for nodes in (1, 2, 3, 17, 64):
        for max_depth in (1, 3, 100):
            tree = random_tree(rng, nodes, max_depth, vocabulary=5)
            np.testing.assert_array_equal(compiled(tree.parent), oracle_mask(tree.parent))


@pytest.mark.parametrize("nodes", [2, 4, 5, 9, 65])
def test_the_mask_of_a_chain_is_the_causal_mask(nodes):
    mask = jax.jit(tree_mask)(np.arange(nodes) - 1)
    np.testing.assert_array_equal(mask, np.tri(nodes, dtype=bool))


def test_the_block_sees_the_prefix_and_its_own_paths_and_nothing_else():
    tree = random_tree(np.random.default_rng(1), 7, 3, vocabulary=5)
    compiled = jax.jit(lambda tree, length: block_mask(tree, length, cache_rows=19))
    for length in (0, 1, 5, 12):  # 12 + 7 ends at the last row
        expected = np.zeros((7, 19), bool)
        expected[:, :length] = True
        expected[:, length : length + 7] = oracle_mask(tree.parent)
        np.testing.assert_array_equal(compiled(tree, length), expected)


def test_a_block_larger_than_the_cache_is_refused():
    with pytest.raises(ValueError, match="7 rows"):
        block_mask(random_tree(np.random.default_rng(1), 7, 3, 5), 0, cache_rows=6)


def test_positions_follow_the_depth_where_kept_nodes_are_not_contiguous():
    # Six nodes with parents -, 0, 0, 1, 1, 2, of which node 3 was not kept.
    tree = tree_of([9, 1, 2, 4, 5], [-1, 0, 0, 1, 2])
    np.testing.assert_array_equal(positions(tree, 30), [30, 31, 31, 32, 32])


def test_positions_of_a_grown_tree_count_the_edges_to_the_root():
    tree = grow_compiled(2, 64, 0, ROOT, DEFAULT)
    edges = np.asarray(tree_mask(tree.parent)).sum(axis=1) - 1
    assert np.max(edges) > 2
    np.testing.assert_array_equal(positions(tree, jnp.int32(100)), 100 + edges)
