"""Several prompts at once: the same answers as one at a time, and no expert for an idle lane."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.experts import init_bank
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.runtime import programs, stages
from acceptmoe_jax.runtime.engine import Engine
from acceptmoe_jax.selection import used_experts
from acceptmoe_jax.speculation import SamplingConfig
from pallas_kernels.masked_expert_gemm import masked_expert_gemm
from pallas_kernels.masked_expert_gemm.batching import batched
from tests import pocket, tiny_models

NEW_TOKENS = 20


@pytest.mark.parametrize("selector", ["acceptmoe", pytest.param("native", marks=pytest.mark.slow)])
def test_a_batch_of_eight_answers_as_eight_single_prompts(selector):
    engine, prompts = pocket.engine(), pocket.prompts(each=3)[:9]
    options = {"selector": selector, "max_new_tokens": NEW_TOKENS}
    single = engine.generate(prompts, **options)
    # Nine prompts in eight lanes: the last one takes the lane of one that has ended.
    batch = engine.generate(prompts, batch_size=8, **options)
    assert [g.token_ids for g in batch] == [g.token_ids for g in single]
    for one, other in zip(single, batch, strict=True):
        assert one.statistics.accepted_lengths == other.statistics.accepted_lengths
        np.testing.assert_array_equal(one.statistics.eligible, other.statistics.eligible)
        np.testing.assert_array_equal(one.statistics.used, other.statistics.used)


def test_draws_do_not_depend_on_what_runs_beside_a_prompt():
    engine, prompts = pocket.engine(), pocket.prompts(each=1)
    options = {
        "selector": "autoregressive",
        "max_new_tokens": 8,
        "sampling": SamplingConfig(temperature=1.5),
    }
    single = engine.generate(prompts, **options)
    batch = engine.generate(prompts, batch_size=3, **options)
    assert [g.token_ids for g in batch] == [g.token_ids for g in single]


def test_rows_of_an_idle_lane_use_no_expert():
    setup = tiny_models.setup()
    state = programs.empty_state(setup, 64, jnp.float32)
    token = jnp.zeros(1, jnp.int32)
    logits = jax.random.normal(jax.random.key(0), (1, setup.target.num_experts))
    used = [
        stages.choose_experts(
            setup,
            setup.native(),
            stages.chunk_block(state.replace(active=jnp.bool_(active)), token, jnp.int32(1)),
            stages.NO_COMMITMENT,
            logits,
        )[1].used
        for active in (True, False)
    ]
    assert used == [setup.target.top_k, 0]


def _batch_of_picks(rng, requests=3, rows=5):
    """Rows, expert ids and weights for the tiny target; one row picks nothing."""
    top_k, experts = tiny_models.TARGET.top_k, tiny_models.TARGET.num_experts
    x = rng.normal(size=(requests, rows, tiny_models.TARGET.hidden_size)).astype(np.float32)
    ids = rng.permuted(np.tile(np.arange(experts), (requests, rows, 1)), axis=2)[..., :top_k]
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    weights[1, -1] = 0
    return x, ids.astype(np.int32), weights


def test_under_vmap_each_request_gets_what_it_gets_alone():
    target = tiny_models.TARGET
    bank = init_bank(jax.random.key(0), target)

    def run(x, ids, weights):
        used = used_experts(ids, weights != 0, target.num_experts)
        return masked_expert_gemm(x, bank, ids, weights, *used, activation=target.activation)

    batch = _batch_of_picks(np.random.default_rng(0))
    singles = np.stack([run(*request) for request in zip(*batch)])
    np.testing.assert_allclose(jax.vmap(run)(*batch), singles, rtol=1e-5, atol=1e-7)
    assert np.abs(singles).max() > 1e-4


def test_under_vmap_the_union_of_the_requests_experts_is_run_once():
    bank = init_bank(jax.random.key(0), tiny_models.TARGET)
    experts = tiny_models.TARGET.num_experts
    calls = []

    def picks(x, bank, ids, weights, used_ids, used_count):
        calls.append(x.shape)
        return jnp.broadcast_to(used_count, (*ids.shape, x.shape[1]))

    def run(x, ids, weights):
        return batched(picks)(x, bank, ids, weights, *used_experts(ids, weights != 0, experts))

    x = np.ones((2, 1, 3), np.float32)
    ids = np.array([[[1, 4, 5, 9]], [[9, 2, 4, 7]]], np.int32)
    weights = np.array([[[1, 1, 1, 1]], [[1, 1, 1, 0]]], np.float32)
    counts = jax.vmap(run)(x, ids, weights)
    assert calls[-1] == (2, 3)  # the rows of both
    np.testing.assert_array_equal(counts, 5)  # 1, 2, 4, 5, 9


def test_a_batch_is_refused_where_experts_are_offloaded():
    engine = pocket.engine()
    offloaded = Engine(engine.model, engine.commitment, dtype=jnp.float32, max_length=256)
    offloaded.offload = OffloadConfig(slots=48)
    with pytest.raises(UserError, match="batch_size"):
        offloaded.generate(["x"], selector="native", batch_size=2)
    with pytest.raises(UserError, match="batch_size"):
        engine.generate(["x"], selector="native", batch_size=0)
