"""Whole rounds with the Pallas kernels inside, in interpret mode, against the same in plain JAX."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.runtime import programs
from acceptmoe_jax.selection import Commitment, SelectorConfig
from pallas_kernels.implementations import KERNELS, Implementations, implementations
from tests import tiny_models

CACHE_ROWS = 64
COMMITMENT = Commitment(jnp.asarray([1.0, 0.7, 0.5, 0.3], jnp.float32))
ROUNDS = 3
INTERPRETED = dataclasses.replace(KERNELS["triton"], interpret=True)


def _prefilled(setup, weights, seed):
    """The state after a random prompt."""
    prompt = np.random.default_rng(seed).integers(0, setup.target.vocab_size, 19)
    state = programs.empty_state(setup, CACHE_ROWS, jnp.float32)
    tokens = jnp.zeros(32, jnp.int32).at[: len(prompt)].set(prompt)
    prefill = jax.jit(functools.partial(programs.prefill_chunk, setup))
    return prefill(weights, state, tokens, jnp.int32(len(prompt)), jnp.int32(-1))


def _decode(target, kernels, selector, seed):
    """Some rounds after a prompt: the committed tokens, the logits of their rows, set sizes."""
    setup = dataclasses.replace(tiny_models.setup(target), implementations=kernels)
    weights = tiny_models.weights(target)
    state = _prefilled(setup, weights, seed)
    run = jax.jit(functools.partial(programs.speculative_round, setup, selector=selector))
    committed, logits, used = [int(state.last_token)], [], []
    for _ in range(ROUNDS):
        state, done = run(weights, state, COMMITMENT)
        length = int(done.acceptance.length)
        committed += done.acceptance.tokens[:length].tolist()
        logits.append(done.logits[:length])
        used.append(done.counts.used)
    return committed, np.concatenate(logits), np.stack(used)


@pytest.mark.parametrize(
    ("target", "seed"),  # of prompts after which drafts are accepted
    [
        pytest.param(tiny_models.TARGET, 3, id="qwen3_moe"),
        pytest.param(tiny_models.GPT_OSS, 0, id="gpt_oss", marks=pytest.mark.slow),
    ],
)
def test_rounds_with_the_kernels_commit_the_tokens_of_plain_jax(target, seed):
    selector = SelectorConfig(policy="acceptmoe", top_k=target.top_k)
    expected, expected_logits, expected_used = _decode(target, Implementations(), selector, seed)
    committed, logits, used = _decode(target, INTERPRETED, selector, seed)
    assert committed == expected
    assert len(committed) > ROUNDS + 1, "no draft was accepted: the test shows little"
    np.testing.assert_array_equal(used, expected_used)
    assert used.max() < target.num_experts, "nothing was restricted"
    scale = np.abs(expected_logits).max()
    np.testing.assert_allclose(logits, expected_logits, atol=1e-4 * scale)


@pytest.mark.slow
def test_a_batch_of_rounds_with_the_kernels_commits_what_each_sequence_does_alone():
    setup = dataclasses.replace(tiny_models.setup(), implementations=INTERPRETED)
    weights = tiny_models.weights()
    selector = SelectorConfig(policy="acceptmoe", top_k=setup.target.top_k)
    run = functools.partial(programs.speculative_round, setup, selector=selector)
    states = [_prefilled(setup, weights, seed) for seed in (3, 4)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    alone, together = jax.jit(run), jax.jit(jax.vmap(run, in_axes=(None, 0, None)))
    for _ in range(ROUNDS):
        batch, done = together(weights, batch, COMMITMENT)
        for lane, state in enumerate(states):
            states[lane], one = alone(weights, state, COMMITMENT)
            np.testing.assert_array_equal(done.acceptance.tokens[lane], one.acceptance.tokens)
            np.testing.assert_array_equal(done.counts.used[lane], one.counts.used)
    assert int(batch.length[0]) != int(batch.length[1]), "both do the same: the test shows little"


def test_a_gpu_gets_kernels_and_a_cpu_plain_jax():
    assert implementations("auto", "NVIDIA H200") == KERNELS["triton"]
    assert implementations("auto", "cpu") == Implementations()
    with pytest.raises(ValueError, match="kernels 'cuda' is not one of auto, xla, triton, mosaic"):
        implementations("cuda")
