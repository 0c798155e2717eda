"""Cache compaction after the accept walk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.speculation import accept_greedy, block_mask, compact, positions
from tests.speculation_oracle import random_tree, tree_of

# Node 5 hangs below node 2, as in the path [0, 2, 5] of 8.
EIGHT = tree_of([9, 1, 2, 3, 4, 5, 6, 7], [-1, 0, 0, 1, 1, 2, 2, 5])


def numbered(rows, *trailing, dtype=jnp.float32):
    """Returns an array [rows, *trailing] whose every row holds its own number."""
    column = jnp.arange(rows, dtype=dtype).reshape(rows, *(1 for _ in trailing))
    return jnp.broadcast_to(column, (rows, *trailing))


def fake_entries(tokens, at):
    """Keys and values [n, 2, 3] that depend on token and position, as rotary attention's do."""
    wave = np.arange(1, 7).reshape(2, 3)
    tokens, at = np.asarray(tokens)[:, None, None], np.asarray(at)[:, None, None]
    return {
        "k": np.float32(np.sin(tokens * wave + 0.1 * at * wave)),
        "v": np.float32(np.cos(tokens * wave - 0.3 * at)),
    }


def fake_forward(cache, tokens, at, mask):
    """One attention head over the rows the mask shows; touches no other row. Returns [n, 6]."""
    out = []
    for query, row in zip(fake_entries(tokens, at)["k"].reshape(len(tokens), 6), mask):
        keys = np.asarray(cache["k"])[row].reshape(-1, 6)
        weights = np.exp(keys @ query)
        out.append(weights / weights.sum() @ np.asarray(cache["v"])[row].reshape(-1, 6))
    return np.stack(out)


def test_path_0_2_5_of_8_lands_at_rows_0_1_2():
    moved = compact(numbered(8), jnp.array([0, 2, 5]), 3, 0)
    np.testing.assert_array_equal(moved, [0, 2, 5, 3, 4, 5, 6, 7])


def test_only_rows_of_the_accepted_path_are_written():
    cache = numbered(30, 2, 3)
    moved = compact(cache, jnp.array([0, 2, 5, 0, 0]), 3, 11)
    expected = np.array(cache)
    expected[[12, 13]] = expected[[13, 16]]
    np.testing.assert_array_equal(moved, expected)


def test_padding_of_the_rows_moves_nothing():
    for padding in (0, 4, -1, 1000):
        rows = jnp.array([0, 3, padding, padding])
        moved = compact(numbered(9), rows, 2, 2)
        np.testing.assert_array_equal(moved, [0, 1, 2, 5, 4, 5, 6, 7, 8])


def test_a_full_rejection_keeps_the_prompt_and_the_root():
    cache = numbered(12, 3)
    np.testing.assert_array_equal(compact(cache, jnp.array([0, 0, 0]), 1, 7), cache)


def test_a_first_child_chain_stays_where_it_is():
    cache = numbered(12, 3)
    np.testing.assert_array_equal(compact(cache, jnp.array([0, 1, 2, 3]), 4, 5), cache)


def test_a_block_at_the_very_end_of_the_cache_is_compacted_in_place():
    moved = compact(numbered(9), jnp.array([0, 2, 3]), 3, 5)
    np.testing.assert_array_equal(moved, [0, 1, 2, 3, 4, 5, 7, 8, 8])


def test_every_leaf_of_any_pytree_is_moved_in_its_own_dtype():
    caches = (
        {"k": numbered(8, 2, 3, dtype=jnp.bfloat16), "v": numbered(8, 5)},
        [numbered(8, dtype=jnp.int32)],
    )
    moved = compact(caches, jnp.array([0, 2, 5]), 3, 0)
    assert jax.tree.structure(moved) == jax.tree.structure(caches)
    for before, after in zip(jax.tree.leaves(caches), jax.tree.leaves(moved)):
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after, before[jnp.array([0, 2, 5, 3, 4, 5, 6, 7])])


def test_the_next_step_equals_a_fresh_prefill_with_all_dead_rows_poisoned():
    prompt, cache_rows, length = [3, 8, 1, 6, 2], 24, 5
    cache = {name: np.full((cache_rows, 2, 3), np.nan, np.float32) for name in ("k", "v")}
    block = fake_entries(EIGHT.tokens, positions(EIGHT, length))
    for name, entries in fake_entries(prompt, range(length)).items():
        cache[name][:length] = entries
        cache[name][length : length + 8] = block[name]

    target = jnp.array([2, 90, 5, 90, 90, 40, 90, 90])
    accepted = accept_greedy(EIGHT, target, max_accepted=4)
    assert list(accepted.rows[:3]) == [0, 2, 5] and int(accepted.length) == 3
    moved = jax.tree.map(np.array, compact(cache, accepted.rows, accepted.length, length))
    committed = [*prompt, 9, 2, 5]
    length += int(accepted.length)
    next_tree = tree_of([int(accepted.bonus), 70, 71], [-1, 0, 0])
    at = positions(next_tree, length)
    for name, entries in fake_entries(next_tree.tokens, at).items():
        moved[name][length:] = np.nan
        moved[name][length : length + 3] = entries

    mask = np.asarray(block_mask(next_tree, length, cache_rows))
    logits = fake_forward(moved, next_tree.tokens, at, mask)
    for node, token in enumerate(next_tree.tokens.tolist()):
        sequence = [*committed, 40] if node == 0 else [*committed, 40, token]
        fresh = fake_entries(sequence, range(len(sequence)))
        everything = np.ones((1, len(sequence)), bool)
        expected = fake_forward(fresh, sequence[-1:], [len(sequence) - 1], everything)[0]
        np.testing.assert_array_equal(logits[node], expected)


def test_after_each_of_ten_rounds_the_cache_holds_all_committed_tokens_but_the_bonus():
    rng = np.random.default_rng(4)
    committed, length = [5, 1, 2, 0], 3  # the last token is the bonus: it has no row yet
    cache = np.full(130, -1)
    cache[:3] = committed[:3]
    traces = []

    @jax.jit
    def compiled(*arguments):
        traces.append(1)
        return compact(*arguments)

    accept = jax.jit(accept_greedy, static_argnames="max_accepted")
    lengths = set()
    for _ in range(10):
        tree = random_tree(rng, nodes=16, max_depth=4, vocabulary=3)
        tree.tokens[0] = committed[-1]
        target = rng.integers(3, size=16).astype(np.int32)
        accepted = accept(tree, target, max_accepted=5)
        cache[length : length + 16] = tree.tokens
        cache = np.array(compiled(cache, accepted.rows, accepted.length, length))
        emitted = int(accepted.length)
        committed += accepted.tokens[:emitted].tolist()
        length += emitted
        assert length == len(committed) - 1
        np.testing.assert_array_equal(cache[:length], committed[:-1])
        cache[length:] = -1  # dead rows must never come back
        lengths.add(emitted)
    assert len(lengths) > 1
    assert len(traces) == 1


def test_a_donated_cache_is_updated_in_place_at_a_cost_of_the_moved_rows():
    rows, width = 4096, 64
    caches = {"k": jnp.zeros((rows, width)), "v": jnp.zeros((rows, width))}
    arguments = caches, jnp.arange(6), jnp.int32(3), jnp.int32(100)
    memory = jax.jit(compact, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * rows * width * 4
    assert memory.temp_size_in_bytes <= 8 * 6 * width * 4


@pytest.mark.parametrize("start", [0, 3, 9])
def test_compaction_is_the_same_compiled_eager_and_batched(start):
    cache, rows = numbered(16, 2), jnp.array([0, 1, 4, 6])
    eager = compact(cache, rows, 3, start)
    np.testing.assert_array_equal(jax.jit(compact)(cache, rows, 3, start), eager)
    batch = jnp.stack([cache, cache + 100])
    batched = jax.vmap(compact, in_axes=(0, None, None, None))(batch, rows, 3, start)
    np.testing.assert_array_equal(batched[0], eager)
    np.testing.assert_array_equal(batched[1], eager + 100)
