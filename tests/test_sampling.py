"""Sampling: the filtered distribution, and the accept walk by draws.

The chi-square tests decode with a small Markov model: the distribution of the next token depends
on the last token alone, so that the joint distribution of emitted tokens is known exactly. Keys are
fixed: a case passes or fails for good.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.speculation import SamplingConfig, accept_greedy, sample_token, target_logp
from acceptmoe_jax.speculation.sampling import accept
from tests.speculation_oracle import random_tree, tree_of

VOCABULARY, ROWS, ROOT = 6, 14, 0
BLOCKS = 100
IMPOSSIBLE = 5  # never follows the root
DRAWS = 2**17
COUNTED = 3  # tokens whose joint distribution is compared, and the most that a walk emits

PLAIN = SamplingConfig(temperature=1.0)
FILTERED = SamplingConfig(temperature=1.3, top_k=4, top_p=0.8)
# Tokens, parents, and nodes that are invalid.
SHAPES = {
    "root alone": ([ROOT], [-1], []),
    "chain": ([ROOT, 1, 2, 3], [-1, 0, 1, 2], []),
    "wide": ([ROOT, 3, 1, 4, 2], [-1, 0, 0, 0, 0], []),
    "bushy": ([ROOT, 2, 1, 4, 1, 3, 5, 0, 2, 2], [-1, 0, 0, 0, 1, 1, 2, 2, 4, 6], []),
    "whole vocabulary": ([ROOT, 0, 1, 2, 3, 4, 1, 2, 3, 4, 0], [-1] + [0] * 5 + [3] * 5, []),
    "impossible child": ([ROOT, IMPOSSIBLE, 1, 4, 2], [-1, 0, 0, 1, 2], []),
    "twins": ([ROOT, 1, 1, 2, 3, 4, 3, 3, 0], [-1, 0, 0, 0, 1, 2, 3, 3, 7], []),
    "invalid nodes": ([ROOT, 2, 2, 1, 4, 3, 3], [-1, 0, 0, 0, 1, 2, 2], [1, 4, 5]),
}


def oracle_logp(logits, config):
    """The filtered distribution in float64, a token at a time."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: config.top_k]
    weight = np.exp((np.float64(logits) - np.max(logits)) / config.temperature)
    kept, mass, whole = [], 0.0, sum(weight[order])
    for token in order:
        kept.append(token)
        mass += weight[token] / whole
        if mass >= config.top_p:
            break
    logp = np.full(len(logits), -np.inf)
    with np.errstate(divide="ignore"):
        logp[kept] = np.log(weight[kept] / sum(weight[kept]))
    return logp


def markov_table():
    """Logits of the token after each token [V, V]."""
    table = np.random.default_rng(3).uniform(-0.7, 0.7, size=(VOCABULARY, VOCABULARY))
    table[ROOT, IMPOSSIBLE] = -np.inf
    return np.float32(table)


TABLE = markov_table()


def padded(shape):
    """The tree with invalid nodes up to ROWS, and the model's logits after each valid node.

    A walk that went through an invalid node would find another distribution there.
    """
    tokens, parent, invalid = SHAPES[shape]
    filling = ROWS - len(tokens)
    valid = [node not in invalid for node in range(len(tokens))] + [False] * filling
    tree = tree_of(tokens + [1] * filling, parent + [0] * filling, valid)
    astray = np.float32([9, 0, 0, 0, 0, 0])
    return tree, np.where(tree.valid[:, None], TABLE[tree.tokens], astray)


@functools.partial(jax.jit, static_argnames=("walk", "config"))
def emitted_tokens(tree, logits, seed, walk=accept, config=PLAIN):
    """The first COUNTED tokens of DRAWS decodings; after the walk the model itself goes on."""

    def decode(key):
        walk_key, own_key = jax.random.split(key)
        result = walk(tree, logits, config, walk_key, COUNTED)

        def next_token(last, place_and_key):
            place, key = place_and_key
            own = sample_token(jnp.asarray(TABLE)[last], config, key)
            token = jnp.where(place < result.length, result.tokens[place], own)
            return token, token

        places = jnp.arange(COUNTED)
        keys = jax.random.split(own_key, COUNTED)
        return jax.lax.scan(next_token, jnp.int32(ROOT), (places, keys))[1]

    return jax.vmap(decode)(jax.random.split(jax.random.key(seed), DRAWS))


def p_value(tokens, config=PLAIN):
    """The chi-square test of tokens [DRAWS, COUNTED] against the model's joint distribution."""
    step = np.exp([oracle_logp(row, config) for row in TABLE])
    sequences = list(itertools.product(range(VOCABULARY), repeat=COUNTED))
    joint = [np.prod([step[a, b] for a, b in zip((ROOT, *s), s)]) for s in sequences]
    expected = DRAWS * np.array(joint)
    place = np.ravel_multi_index(np.asarray(tokens).T, (VOCABULARY,) * COUNTED)
    observed = np.bincount(place, minlength=len(sequences))
    possible = expected > 0
    assert expected[possible].min() >= 5, "too rare for a chi-square test"
    assert not observed[~possible].any()
    statistic = np.sum((observed - expected)[possible] ** 2 / expected[possible])
    return float(jax.scipy.stats.chi2.sf(statistic, possible.sum() - 1))


def walk_with_one_draw(tree, logits, config, key, max_accepted):
    """A walk to the root's first two children that reuses its draw for the bonus: wrong."""
    draw = jax.random.uniform(key)
    probability = jnp.exp(target_logp(logits[0], config))
    children = jnp.asarray(tree.tokens)[1:3]
    inside = draw < jnp.cumsum(probability[children])
    rest = jnp.cumsum(probability.at[children].set(0.0))
    token = jnp.where(
        jnp.any(inside), children[jnp.argmax(inside)], jnp.argmax(draw * rest[-1] < rest)
    )
    return accept_greedy(tree_of([ROOT], [-1]), token[None], max_accepted)


# The emitted tokens are the target's


@pytest.mark.parametrize("shape", SHAPES)
def test_emitted_tokens_are_distributed_as_the_targets_own(shape):
    assert p_value(emitted_tokens(*padded(shape), 1)) > 1e-3


def test_the_filters_act_first():
    assert p_value(emitted_tokens(*padded("bushy"), 2, config=FILTERED), FILTERED) > 1e-3


def test_one_draw_for_walk_and_bonus_would_be_noticed():
    assert p_value(emitted_tokens(*padded("wide"), 4, walk=walk_with_one_draw)) < 1e-12


def test_a_slightly_different_distribution_would_be_noticed():
    tokens = emitted_tokens(*padded("bushy"), 1)
    assert p_value(tokens, SamplingConfig(temperature=1.1)) < 1e-12


def test_one_token_is_drawn_from_the_filtered_distribution():
    draw = jax.jit(jax.vmap(lambda key: sample_token(TABLE[1], FILTERED, key)))
    observed = np.bincount(draw(jax.random.split(jax.random.key(5), DRAWS)), minlength=VOCABULARY)
    probability = np.exp(oracle_logp(TABLE[1], FILTERED))
    # Each count within five standard deviations.
    deviation = np.sqrt(DRAWS * probability * (1 - probability))
    assert np.all(np.abs(observed - DRAWS * probability) <= 5 * deviation)


# The walk


@jax.jit
def accept_one(tree, logits, key):
    return accept(tree, logits, PLAIN, key, 4)


@functools.partial(jax.jit, static_argnames="config")
def accept_all(trees, logits, keys, config=PLAIN):
    return jax.vmap(lambda *block: accept(*block[:2], config, block[2], 4))(trees, logits, keys)


def random_blocks(seed, scale=1.0):
    """BLOCKS random trees, some deeper than a walk, their logits [T, V] and their keys."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, ROWS, max_depth=5, vocabulary=VOCABULARY) for _ in range(BLOCKS)]
    logits = np.float32(rng.normal(scale=scale, size=(BLOCKS, ROWS, VOCABULARY)))
    trees = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
    return trees, logits, jax.random.split(jax.random.key(seed), BLOCKS)


def entry(batch, index):
    return jax.tree.map(lambda leaf: leaf[index], batch)


def test_rows_are_a_path_of_valid_nodes_and_tokens_what_they_emit():
    blocks = random_blocks(6, scale=0.2)
    results = jax.tree.map(np.asarray, accept_all(*blocks))
    for i in range(BLOCKS):
        tree, result = entry(blocks[0], i), entry(results, i)
        rows, tokens, length = result.rows, result.tokens, result.length
        np.testing.assert_array_equal([*rows[length:], *tokens[length:]], 0)
        assert rows[0] == 0 and result.bonus == tokens[length - 1]
        np.testing.assert_array_equal(tree.parent[rows[1:length]], rows[: length - 1])
        np.testing.assert_array_equal(tree.tokens[rows[1:length]], tokens[: length - 1])
        assert np.all(tree.valid[rows])
        if length < 4:
            children = (tree.parent == rows[length - 1]) & tree.valid
            assert result.bonus not in tree.tokens[children]
    assert set(results.length) == {1, 2, 3, 4}


def test_of_twins_the_first_is_taken():
    tree, logits = padded("twins")
    keys = jax.random.split(jax.random.key(7), 100)
    rows = {int(row) for key in keys for row in accept_one(tree, logits, key).rows}
    assert 1 in rows and not {2, 5, 7, 8} & rows


def test_where_children_hold_everything_every_draw_takes_a_possible_one(monkeypatch):
    tree = tree_of([ROOT, 4, 1, 3, 2, 5], [-1, 0, 0, 0, 0, 0])
    logits = np.float32(np.random.default_rng(8).normal(size=(500, 1, VOCABULARY)))
    logits[..., [0, 4, 5]] = -np.inf  # the first child, the last, and a token that is no child

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def walk(logits, draw):
        monkeypatch.setattr(jax.random, "uniform", lambda key: draw)
        rows = jnp.broadcast_to(logits, (6, VOCABULARY))
        return accept(tree, rows, PLAIN, jax.random.key(0), 2)

    for draw, token in ((0.0, 1), (1 - 2.0**-23, 2)):  # the least that there is and the greatest
        result = walk(logits, jnp.float32(draw))
        np.testing.assert_array_equal(result.length, 2)
        np.testing.assert_array_equal(result.tokens[:, 0], token)


@pytest.mark.parametrize(
    "config",
    [SamplingConfig(), SamplingConfig(temperature=1.5, top_k=1), SamplingConfig(temperature=1e-4)],
    ids=["temperature 0", "top-k 1", "temperature 1e-4"],
)
def test_the_limits_of_sampling_are_greedy(config):
    trees, logits, keys = random_blocks(9)
    if config.greedy:
        logits = np.round(2 * logits)  # ties
    best = jnp.argmax(logits, axis=-1)
    expected = jax.jit(jax.vmap(lambda *block: accept_greedy(*block, 4)))(trees, best)
    result = accept_all(trees, logits, keys, config)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    draw = jax.jit(jax.vmap(lambda row, key: sample_token(row, config, key)))
    np.testing.assert_array_equal(draw(logits[:, 0], keys), best[:, 0])
    assert set(np.asarray(result.length)) >= {1, 2, 3}


def test_a_key_decides_the_outcome():
    outcomes = set()
    tree, logits = padded("bushy")
    for seed in range(20):
        one, again = (accept_one(tree, logits, jax.random.key(seed)) for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, one, again)
        outcomes.add(tuple(np.asarray(one.tokens).tolist()))
    assert len(outcomes) > 5


def test_the_walk_is_the_same_batched():
    blocks = random_blocks(10, scale=0.2)
    batched = accept_all(*blocks)
    for i in range(5):
        one = accept_one(*entry(blocks, i))
        jax.tree.map(np.testing.assert_array_equal, one, entry(batched, i))


def test_results_are_int32():
    result = accept_one(*padded("chain"), jax.random.key(0))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(result)} == {"int32"}


# The filtered distribution

filtered = jax.jit(target_logp, static_argnames="config")


def kept(logits, config):
    return list(np.flatnonzero(np.isfinite(filtered(jnp.asarray(logits), config))))


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        FILTERED,
        SamplingConfig(temperature=0.6),
        SamplingConfig(temperature=1.4, top_k=3),
        SamplingConfig(temperature=0.9, top_p=0.7),
        SamplingConfig(temperature=1.0, top_k=50),  # more than there are
        SamplingConfig(temperature=1.0, top_p=1e-9),
    ],
    ids=str,
)
def test_filters_equal_a_walk_over_the_sorted_tokens(config):
    rng = np.random.default_rng(11)
    logits = np.float32(rng.integers(-5, 6, size=(200, 11)) / 2)  # many ties
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logp = jax.jit(jax.vmap(lambda row: target_logp(row, config)))(logits)
    expected = np.array([oracle_logp(row, config) for row in logits])
    np.testing.assert_array_equal(np.isfinite(logp), np.isfinite(expected))
    np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-6)
    assert logp.dtype == jnp.float32


def test_of_tokens_that_tie_the_lower_ids_are_kept():
    tied = jnp.array([-0.0, -3.0, 0.0, -0.0, 0.0])
    for config in (SamplingConfig(1.0, top_k=3), SamplingConfig(1.0, top_p=0.6)):
        assert kept(tied, config) == [0, 2, 3]


def test_top_p_counts_what_top_k_left():
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    # Of two tokens the first has 4/7; of all four it has 0.4.
    assert kept(logits, SamplingConfig(1.0, top_k=2, top_p=0.5)) == [0]
    assert kept(logits, SamplingConfig(1.0, top_p=0.5)) == [0, 1]


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(2.0, top_k=1)])
def test_a_greedy_config_leaves_the_first_maximum(config):
    logp = filtered(jnp.array([1.0, 3.0, 3.0]), config)
    np.testing.assert_array_equal(logp, [-np.inf, 0, -np.inf])


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-4, 1e4, 1e300])
def test_no_temperature_gives_a_distribution_that_is_none(temperature):
    logits = jnp.array([-1.0, 2.0, 2.0, -jnp.inf, 1e30], jnp.bfloat16)
    probability = np.exp(filtered(logits, SamplingConfig(temperature)))
    assert probability[3] == 0
    np.testing.assert_allclose(probability.sum(), 1, rtol=1e-6)


@pytest.mark.parametrize(
    "settings, field",
    [
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature=float("inf")), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_k=0), "top_k"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.1), "top_p"),
        (dict(top_p=float("nan")), "top_p"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, field):
    with pytest.raises(ValueError, match=f"^{field} "):
        SamplingConfig(**settings)


def test_the_default_is_greedy():
    assert SamplingConfig().greedy and SamplingConfig(1.0, top_k=1).greedy
    assert not PLAIN.greedy
