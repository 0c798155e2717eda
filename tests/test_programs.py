"""The jitted programs on a tiny random model: the loop's invariants, in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.runtime import programs
from acceptmoe_jax.selection import Commitment, SelectorConfig
from tests import tiny_models

CACHE_ROWS = 128
CROSSING_SEEDS = 8  # prompts, of which some have a draft accepted at the window's edge
COMMITMENT = Commitment(jnp.asarray([1.0, 0.7, 0.5, 0.3], jnp.float32))
NATIVE = SelectorConfig(policy="native", top_k=4)
ACCEPTMOE = SelectorConfig(policy="acceptmoe", top_k=4)
PROMPT = np.random.default_rng(0).integers(0, tiny_models.TARGET.vocab_size, 23)


QWEN3_MOE, GPT_OSS = tiny_models.TARGET, tiny_models.GPT_OSS
both_families = pytest.mark.parametrize(
    "target", [QWEN3_MOE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"]
)

_weights = functools.cache(tiny_models.weights)


@functools.cache
def _program(name, target=QWEN3_MOE, **static):
    setup = tiny_models.setup(target)
    return jax.jit(functools.partial(getattr(programs, name), setup, **static))


def _prefill(tokens, chunk=32, target=QWEN3_MOE):
    state = programs.empty_state(tiny_models.setup(target), CACHE_ROWS, jnp.float32)
    for at in range(0, len(tokens), chunk):
        part = np.zeros(chunk, np.int32)
        piece = tokens[at : at + chunk]
        part[: len(piece)] = piece
        following = tokens[at + chunk] if at + chunk < len(tokens) else -1
        state = _program("prefill_chunk", target)(
            _weights(target), state, jnp.asarray(part), jnp.int32(len(piece)), jnp.int32(following)
        )
    return state


def _round(state, selector=NATIVE, override=None, target=QWEN3_MOE):
    run = _program("speculative_round", target, selector=selector)
    return run(_weights(target), state, COMMITMENT, override)


def _decode(rounds, selector=NATIVE, target=QWEN3_MOE):
    """Rounds after the prefill of PROMPT; returns the final state and all committed tokens."""
    state = _prefill(PROMPT, target=target)
    committed = [*PROMPT.tolist(), int(state.last_token)]
    for _ in range(rounds):
        state, done = _round(state, selector, target=target)
        committed += done.acceptance.tokens[: int(done.acceptance.length)].tolist()
    return state, committed


def _assert_same_state(state, other, rows):
    """Equal up to rounding in everything that is alive: `rows` cache rows and the draft's top-k."""
    for cache, expected in zip(
        (*state.caches, state.draft.cache), (*other.caches, other.draft.cache), strict=True
    ):
        np.testing.assert_allclose(cache.k[:rows], expected.k[:rows], atol=2e-4)
        np.testing.assert_allclose(cache.v[:rows], expected.v[:rows], atol=2e-4)
    assert int(state.last_token) == int(other.last_token)
    np.testing.assert_array_equal(state.draft.topk_ids, other.draft.topk_ids)
    np.testing.assert_allclose(state.draft.topk_logp, other.draft.topk_logp, atol=2e-4)
    np.testing.assert_allclose(state.draft.hidden, other.draft.hidden, atol=2e-3)


@both_families
def test_after_ten_rounds_the_state_is_that_of_a_fresh_prefill(target):
    state, committed = _decode(rounds=10, target=target)
    assert len(committed) > len(PROMPT) + 11, "no draft was accepted: the test shows nothing"
    fresh = _prefill(np.asarray(committed[:-1]), chunk=64, target=target)
    _assert_same_state(state, fresh, len(committed) - 1)


def test_after_every_round_both_caches_hold_all_committed_tokens_but_the_last():
    state = _prefill(PROMPT)
    committed = len(PROMPT) + 1
    for _ in range(5):
        assert int(state.length) == committed - 1
        state, done = _round(state)
        committed += int(done.acceptance.length)
    assert int(state.length) == committed - 1


@both_families
def test_prefill_in_chunks_is_prefill_in_one(target):
    _assert_same_state(
        _prefill(PROMPT, chunk=8, target=target), _prefill(PROMPT, target=target), len(PROMPT)
    )


def test_dead_rows_are_never_read():
    state, _ = _decode(rounds=3)
    _, expected = _round(state)

    def poison(leaf):
        return leaf.at[int(state.length) :].set(1e30)

    state = state.replace(
        caches=jax.tree.map(poison, state.caches),
        draft=state.draft.replace(cache=jax.tree.map(poison, state.draft.cache)),
    )
    _, actual = _round(state)
    np.testing.assert_array_equal(actual.logits, expected.logits)
    np.testing.assert_array_equal(actual.tree.tokens, expected.tree.tokens)


def _plain(prompt, count, target):
    """The prompt and `count` tokens decoded plainly."""
    state = _prefill(prompt, target=target)
    tokens = [*prompt.tolist(), int(state.last_token)]
    while len(tokens) < len(prompt) + count:
        state, _ = _program("autoregressive_step", target)(_weights(target), state)
        tokens.append(int(state.last_token))
    return tokens


@both_families
def test_native_rounds_emit_what_plain_decoding_emits(target):
    _, committed = _decode(rounds=25, target=target)
    assert committed == _plain(PROMPT, len(committed) - len(PROMPT), target)


def test_an_accepted_path_across_the_windows_edge_is_that_of_plain_decoding():
    """Nodes of one path lie before and behind the position where the first key drops out."""
    crossings = 0
    for seed in range(CROSSING_SEEDS):
        prompt = np.random.default_rng(seed).integers(0, GPT_OSS.vocab_size, 4)
        state = _prefill(prompt, target=GPT_OSS)
        committed = [*prompt.tolist(), int(state.last_token)]
        while int(state.length) < 2 * GPT_OSS.sliding_window:
            root = int(state.length)
            state, done = _round(state, target=GPT_OSS)
            length = int(done.acceptance.length)
            committed += done.acceptance.tokens[:length].tolist()
            crossings += root < GPT_OSS.sliding_window <= root + length - 1
        assert committed == _plain(prompt, len(committed) - len(prompt), GPT_OSS)
    assert crossings, "no accepted path crossed the edge: the test shows nothing"


def _leaves(tree):
    """The leaves as numbers, keys too."""
    return [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(tree)
    ]


def test_some_accepted_path_leaves_the_first_child():
    state = _prefill(PROMPT)
    for _ in range(25):
        state, done = _round(state)
        rows = done.acceptance.rows[: int(done.acceptance.length)].tolist()
        parents = done.tree.parent.tolist()
        if any(row != parents.index(parents[row]) for row in rows[1:]):
            return
    pytest.fail("no accepted path ever left the first child")


def test_the_whole_set_forced_as_data_is_native_bit_for_bit():
    state, _ = _decode(rounds=2)
    everything = jnp.ones((4, tiny_models.TARGET.num_experts), bool)
    forced_state, forced = _round(state, ACCEPTMOE, everything)
    native_state, native = _round(state, NATIVE, everything)
    for actual, expected in zip(_leaves((forced_state, forced)), _leaves((native_state, native))):
        np.testing.assert_array_equal(actual, expected)
    _, restricted = _round(state, ACCEPTMOE)
    assert (restricted.counts.used < forced.counts.used).any(), "the policy restricts nothing here"


def test_acceptmoe_uses_exactly_its_eligible_set():
    state, _ = _decode(rounds=1)
    for _ in range(4):
        state, done = _round(state, ACCEPTMOE)
        np.testing.assert_array_equal(done.counts.used, done.counts.eligible)


def test_an_audit_leaves_the_state_as_it_was():
    state, _ = _decode(rounds=2, selector=ACCEPTMOE)
    state, done = _round(state, ACCEPTMOE)
    audited, _ = _program("audit_round")(_weights(), state, done)
    alive = int(state.length)
    for actual, expected in zip(_leaves(audited), _leaves(state)):
        rows = slice(None, alive) if actual.shape[:1] == (CACHE_ROWS,) else ...
        np.testing.assert_array_equal(actual[rows], expected[rows])


def test_an_audit_of_native_routing_finds_nothing():
    state, _ = _decode(rounds=2)
    state, done = _round(state)
    _, audit = _program("audit_round")(_weights(), state, done)
    assert int(audit.agreeing) == int(done.acceptance.length)
    assert abs(float(audit.kl)) < 1e-5


def test_an_audit_of_a_lossy_round_is_the_difference_of_two_verifications():
    """KL and agreement, recomputed in float64 from a native round over the same state."""
    state, _ = _decode(rounds=2)
    start = state
    tight = SelectorConfig(policy="moe_spec", top_k=4, budget=4)
    state, done = _round(start, tight)
    _, audit = _program("audit_round")(_weights(), state, done)
    _, native = _round(start, NATIVE)
    np.testing.assert_array_equal(native.tree.tokens, done.tree.tokens)
    # Both walks begin at the root, so row 0 can be compared whatever came after it.
    one = done.replace(acceptance=done.acceptance.replace(length=jnp.int32(1)))
    _, first = _program("audit_round")(_weights(), state, one)
    p, q = (jax.nn.log_softmax(np.asarray(x.logits[0], np.float64)) for x in (native, done))
    assert float(first.kl) == pytest.approx(float(np.sum(np.exp(p) * (p - q))), rel=1e-3, abs=1e-6)
    assert int(first.agreeing) == int(np.argmax(p) == np.argmax(q))
    assert float(audit.kl) >= float(first.kl) > 1e-4
