"""Training: grouped experts, optimiser, packed documents, the head's unrolling, resuming."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models import eagle3
from acceptmoe_jax.models.attention import causal_mask, empty_cache
from acceptmoe_jax.models.experts import bank_weights, init_bank
from acceptmoe_jax.training import batches, dispatch, head, loop, report, target
from acceptmoe_jax.training.optimizer import (
    OptimizerConfig,
    make_optimizer,
    muon_dimensions,
    schedule,
)
from pallas_kernels.masked_expert_gemm import combine
from pallas_kernels.masked_expert_gemm.ref import reference
from tests import tiny_models

CONFIG = dataclasses.replace(tiny_models.TARGET, num_layers=3)
HEAD = dataclasses.replace(tiny_models.HEAD, aux_layer_ids=(0, 1, 2))
FAMILIES = (CONFIG, tiny_models.GPT_OSS)
FAMILY_NAMES = ("qwen3_moe", "gpt_oss")
ROWS, LENGTH = 3, 20
UNROLL = 4
# Target ids of the draft vocabulary.
TARGET_IDS = np.sort(
    np.random.default_rng(0).permutation(CONFIG.vocab_size)[: HEAD.draft_vocab_size]
)

target_loss = jax.jit(target.target_loss, static_argnums=(2, 3))
head_loss = jax.jit(head.head_loss, static_argnums=(2, 3))
unroll = jax.jit(head.unroll, static_argnums=(2, 3))
head_apply = jax.jit(eagle3.Eagle3Head(HEAD).apply, static_argnames="method")
run_experts = jax.jit(dispatch.run_experts, static_argnums=(4, 5))
balance_statistics = jax.jit(dispatch.balance_statistics)


def random_batch(seed: int = 0, rows: int = ROWS) -> batches.Batch:
    """Rows of a document of 9 tokens, one of 8 and padding."""
    rng = np.random.default_rng(seed)
    segments = np.tile(np.repeat([1, 2, 0], [9, 8, 3]), (rows, 1)).astype(np.int32)
    positions = np.tile(np.r_[0:9, 0:8, 0:3], (rows, 1)).astype(np.int32)
    weights = rng.choice([0.1, 1.0], size=segments.shape) * (positions > 0) * (segments > 0)
    tokens = rng.integers(1, CONFIG.vocab_size, segments.shape).astype(np.int32)
    return batches.Batch(tokens, segments, positions, weights.astype(np.float32))


def random_params(abstract, scale: float):
    """Random leaves for `jax.ShapeDtypeStruct`s; norms near 1. NumPy's: nothing to compile."""
    rng = np.random.default_rng(4)

    def leaf(like):
        drawn = rng.standard_normal(like.shape, np.float32)
        return jnp.asarray(scale * drawn if like.ndim > 1 else 1 + 0.1 * drawn)

    return jax.tree.map(leaf, abstract)


def abstract_target(config) -> target.TargetParams:
    return jax.eval_shape(lambda: target.init_target(jax.random.key(0), config))


@functools.cache
def target_params() -> target.TargetParams:
    """Large enough that every part matters."""
    return random_params(abstract_target(CONFIG), 0.2)


@functools.cache
def lesson_and_head() -> tuple[head.Lesson, dict]:
    params = random_params(eagle3.abstract_params(HEAD, jnp.float32), 0.2)
    teach = functools.partial(head.teach, config=CONFIG, aux_layer_ids=HEAD.aux_layer_ids)
    return jax.jit(teach)(target_params(), random_batch(), TARGET_IDS), params


# The mixture of experts


def reference_experts(x, expert_ids, weights, bank, activation, block):
    """The same sum by the formula; what decoding calls has no derivative."""
    del block
    picks = reference(x, bank, expert_ids, weights, None, None, activation)
    return combine(picks, weights)


def experts_case(config=CONFIG, rows: int = 23):
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (rows, config.hidden_size))
    weights, ids = jax.lax.top_k(
        jax.nn.softmax(jax.random.normal(keys[1], (rows, config.num_experts))), config.top_k
    )
    bank = init_bank(keys[2], config)
    biases = {
        name: 0.02 * jax.random.normal(keys[3], leaf.shape)
        for name, leaf in bank_weights(bank).items()
        if leaf.ndim == 2
    }
    return x, ids, weights, bank.replace(**biases), config.activation


@pytest.mark.parametrize("config", FAMILIES, ids=FAMILY_NAMES)
@pytest.mark.parametrize("block", [5, 64])
def test_grouped_experts_are_those_of_decoding(config, block):
    case = experts_case(config)
    expected = reference_experts(*case, block)
    np.testing.assert_allclose(run_experts(*case, block), expected, atol=2e-6)


@pytest.mark.parametrize("config", FAMILIES, ids=FAMILY_NAMES)
def test_gradients_of_grouped_experts_are_those_of_the_reference(config):
    x, ids, weights, bank, activation = experts_case(config)

    def loss(run, x, weights, leaves):
        y = run(x, ids, weights, bank.replace(**leaves), activation, 5)
        return jnp.sum(jnp.sin(30 * y))

    ours, dense = (
        jax.jit(jax.grad(functools.partial(loss, run), argnums=(0, 1, 2)))(
            x, weights, bank_weights(bank)
        )
        for run in (dispatch.run_experts, reference_experts)
    )
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(dense)):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_no_assignment_is_dropped_when_all_rows_want_the_same_experts():
    x, ids, *rest = experts_case()
    case = (x, jnp.broadcast_to(ids[0], ids.shape), *rest, 5)
    np.testing.assert_allclose(run_experts(*case), reference_experts(*case), atol=1e-6)


def test_every_block_holds_rows_of_its_own_expert_only():
    ids = experts_case()[1]
    block = 5
    blocks = jax.jit(dispatch.sort_into_blocks, static_argnums=(1, 2))(
        ids, CONFIG.num_experts, block
    )
    assert sorted(np.ravel(blocks.slot_of)) == sorted(
        np.flatnonzero(blocks.assignment_of < ids.size)
    )
    expert_of_slot = np.asarray(blocks.expert_of_block)[np.asarray(blocks.slot_of) // block]
    np.testing.assert_array_equal(expert_of_slot, ids)


def test_an_even_load_has_a_balance_loss_of_k():
    experts, k = CONFIG.num_experts, CONFIG.top_k
    ids = (jnp.arange(experts)[:, None] + jnp.arange(k)) % experts
    stats = balance_statistics(
        jnp.full((experts, experts), 1 / experts), ids, jnp.ones(experts, bool)
    )
    np.testing.assert_allclose(stats.balance, k, rtol=1e-5)
    np.testing.assert_allclose(stats.load, 1 / experts, rtol=1e-5)


def test_padding_does_not_count_as_load():
    probs = jax.nn.softmax(jax.random.normal(jax.random.key(0), (7, CONFIG.num_experts)))
    ids = jax.lax.top_k(probs, CONFIG.top_k)[1]
    valid = jnp.arange(7) < 4
    whole = balance_statistics(probs, ids, valid)
    part = balance_statistics(probs[:4], ids[:4], valid[:4])
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(part)):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_router_learns_from_the_weights_of_its_experts():
    x, _, _, bank, _ = experts_case()
    logits = jax.random.normal(jax.random.key(1), (len(x), CONFIG.num_experts))
    moe = dispatch.training_moe(CONFIG, jnp.ones(len(x), bool), block=5)
    grads = jax.jit(jax.grad(lambda logits: jnp.sum(moe(0, x, logits, bank)[0] ** 2)))(logits)
    chosen = jax.lax.top_k(logits, CONFIG.top_k)[1]
    assert (jnp.abs(jnp.take_along_axis(grads, chosen, axis=1)).max(axis=1) > 0).all()


# The optimiser


def test_muon_takes_projections_and_experts_and_adam_the_rest():
    params = {
        "target": abstract_target(SMALL),
        "head": eagle3.abstract_params(HEAD, jnp.float32),
    }
    labels = muon_dimensions(params)
    flat = jax.tree_util.tree_leaves_with_path(labels, is_leaf=lambda leaf: leaf is None)
    muon = {jax.tree_util.keystr(path) for path, label in flat if label is not None}
    adam = {jax.tree_util.keystr(path) for path, label in flat if label is None}
    assert all("_proj" in name or "'fc'" in name or "experts" in name for name in muon)
    for part in ("embed_tokens", "lm_head", "norm", "'mlp']['gate']"):
        assert any(part in name for name in adam)
    assert not any(part in name for name in adam for part in ("_proj", "experts", "'fc'"))


def test_muon_orthogonalises_each_expert_by_itself():
    params = {"gate": jnp.zeros((2, 3, 7))}
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0), 10)
    gradient = jax.random.normal(jax.random.key(0), (2, 3, 7))
    scaled = gradient * jnp.array([1.0, 100.0])[:, None, None]
    one, _ = optimizer.update({"gate": gradient}, optimizer.init(params), params)
    other, _ = optimizer.update({"gate": scaled}, optimizer.init(params), params)
    np.testing.assert_allclose(one["gate"], other["gate"], atol=1e-5)


def test_the_rate_warms_up_holds_and_decays_to_zero():
    rate = schedule(2.0, 4, 20)
    assert 0 < rate(0) < rate(1) < rate(3) < 2.0
    assert [float(rate(step)) for step in (4, 7, 10)] == [2.0, 2.0, 2.0]
    assert float(rate(15)) == pytest.approx(1.0)
    assert float(rate(20)) == 0.0


# Packed documents


def test_a_document_does_not_see_the_others_in_its_row():
    batch = random_batch()
    first = batch.segments == 1
    only_first = batch.replace(loss_weights=np.where(first, batch.loss_weights, 0))
    changed = only_first.replace(tokens=np.where(first, batch.tokens, batch.tokens % 50 + 3))
    params = target_params()
    one = target_loss(params, only_first, CONFIG, 0.0)[1].loss
    other = target_loss(params, changed, CONFIG, 0.0)[1].loss
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_packed_document_has_the_loss_it_has_alone():
    batch = random_batch(rows=1)
    second = jax.tree.map(lambda leaf: leaf[:, 9:17], batch)
    params = target_params()
    in_row = batch.replace(loss_weights=np.where(batch.segments == 2, batch.loss_weights, 0))
    np.testing.assert_allclose(
        target_loss(params, in_row, CONFIG, 0.0)[1].loss,
        target_loss(params, second, CONFIG, 0.0)[1].loss,
        rtol=1e-5,
    )


def test_every_row_is_seen_once_an_epoch_in_an_order_of_its_own():
    epochs = [
        np.concatenate([batches.batch_rows(12, 4, seed=5, step=3 * epoch + i) for i in range(3)])
        for epoch in range(2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert list(epochs[0]) != list(epochs[1])


def test_too_few_rows_for_a_batch_are_refused():
    with pytest.raises(ValueError, match="3 rows"):
        batches.batch_rows(3, 4, seed=0, step=0)


# The head


def test_unrolled_steps_equal_drafting_a_chain_with_a_cache():
    lesson, params = lesson_and_head()
    unrolled = unroll(params, lesson, HEAD, UNROLL)
    row, first, place = 1, 9, 3  # the second document of a row; it drafts after its fourth token
    rows = place + UNROLL
    document = slice(first, first + 8)
    embeddings, captured = lesson.embeddings[row, document], lesson.captured[row, document]
    cache = empty_cache(rows, HEAD.num_kv_heads, HEAD.head_dim, jnp.float32)
    fused = head_apply({"params": params}, captured[: place + 1], method="fuse")
    hidden, cache = head_apply(
        {"params": params},
        embeddings[1 : place + 2],
        fused,
        jnp.arange(place + 1),
        causal_mask(jnp.int32(0), place + 1, rows),
        cache,
        jnp.int32(0),
    )
    hidden = hidden[-1:]
    for step in range(1, UNROLL + 1):
        np.testing.assert_allclose(unrolled[step - 1][row, first + place], hidden[0], atol=2e-5)
        if step == UNROLL:
            break
        at = jnp.int32(place + step)
        hidden, cache = head_apply(
            {"params": params},
            embeddings[place + 1 + step][None],
            hidden,
            at[None],
            causal_mask(at, 1, rows),
            cache,
            at,
        )


def test_a_draft_does_not_see_the_drafts_of_other_places():
    lesson, params = lesson_and_head()
    place = 4
    other = jnp.zeros(LENGTH, bool).at[place].set(True)
    mask = head.step_mask(batches.packed_mask(lesson.segments), 3)[0, place]
    np.testing.assert_array_equal(mask[LENGTH : 2 * LENGTH], other)
    np.testing.assert_array_equal(mask[2 * LENGTH :], other)
    np.testing.assert_array_equal(mask[:LENGTH], np.arange(LENGTH) <= place)


def test_the_first_step_is_plain_distillation_of_the_next_token():
    lesson, params = lesson_and_head()
    batch = random_batch()
    total = weight = 0.0
    for row in range(ROWS):
        for start, end in ((0, 9), (9, 17)):
            count = end - start - 1
            hidden, _ = head_apply(
                {"params": params},
                lesson.embeddings[row, start + 1 : end],
                head_apply(
                    {"params": params}, lesson.captured[row, start : end - 1], method="fuse"
                ),
                jnp.arange(count),
                jnp.tril(jnp.ones((count, count), bool)),
            )
            logp = jax.nn.log_softmax(head_apply({"params": params}, hidden, method="logits"))
            for place in range(count - 1):
                if lesson.best[row, start + place + 1] >= 0:
                    share = batch.loss_weights[row, start + place + 2]
                    total -= share * np.dot(lesson.probs[row, start + place + 1], logp[place])
                    weight += share
    loss, metrics = head_loss(params, lesson, HEAD, 1)
    np.testing.assert_allclose(loss, total / weight, rtol=1e-5)
    np.testing.assert_allclose(metrics.loss, total / weight, rtol=1e-5)


def test_places_whose_greedy_token_the_draft_lacks_do_not_train_the_head():
    lesson, params = lesson_and_head()
    assert (lesson.best < 0).any()
    noise = jax.random.dirichlet(jax.random.key(0), jnp.ones(HEAD.draft_vocab_size), (ROWS, LENGTH))
    changed = lesson.replace(probs=jnp.where(lesson.best[..., None] < 0, noise, lesson.probs))
    loss, _ = head_loss(params, lesson, HEAD, 2)
    np.testing.assert_allclose(loss, head_loss(params, changed, HEAD, 2)[0], rtol=1e-6)


def test_the_second_step_weighs_eight_tenths_of_the_first():
    lesson, params = lesson_and_head()
    hidden = unroll(params, lesson, HEAD, UNROLL)[1]
    logp = jax.nn.log_softmax(head_apply({"params": params}, hidden, method="logits"))
    total = weight = 0.0
    for row in range(ROWS):
        for start, end in ((0, 9), (9, 17)):
            for place in range(start, end - 3):  # it reads token + 2 and predicts token + 3
                if lesson.best[row, place + 2] >= 0:
                    share = lesson.loss_weights[row, place + 3]
                    total -= share * np.dot(lesson.probs[row, place + 2], logp[row, place])
                    weight += share
    loss, metrics = head_loss(params, lesson, HEAD, 2)
    np.testing.assert_allclose(loss, metrics.loss + 0.8 * total / weight, rtol=1e-5)


def test_the_most_frequent_tokens_are_drafted():
    tokens = np.array([5, 5, 5, 2, 2, 7, 7, 1])
    np.testing.assert_array_equal(head.frequent_tokens(tokens, 9, 3), [2, 5, 7])


def test_a_head_starts_with_the_targets_output_rows():
    init = jax.jit(head.init_head, static_argnums=1)
    params = init(jax.random.key(0), HEAD, target_params(), TARGET_IDS)
    expected = target_params()["dense"]["lm_head"]["weight"][TARGET_IDS]
    np.testing.assert_array_equal(params["lm_head"]["weight"], expected)


# The loop


SMALL = dataclasses.replace(CONFIG, num_layers=1, dense_layers=())
OPTIMIZER = make_optimizer(OptimizerConfig(warmup_steps=2), 60)
LOSS = functools.partial(target.target_loss, config=SMALL, balance_coefficient=0.001)


def start_training(run, *, batch_at=random_batch, steps=6, save_seconds=0.0):
    return loop.train(
        run,
        loop.initial_state(random_params(abstract_target(SMALL), 0.02), OPTIMIZER),
        OPTIMIZER,
        LOSS,
        batch_at=batch_at,
        held_out=loop.mean_metrics(LOSS, [random_batch(99)]),
        config=loop.LoopConfig(
            steps, ROWS * LENGTH, log_every=2, evaluate_every=4, save_seconds=save_seconds
        ),
    )


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(whole run, its state, run that was killed in step 3 and started again, its state)."""
    whole = loop.Run(tmp_path_factory.mktemp("whole"))
    state = start_training(whole)
    parted = loop.Run(tmp_path_factory.mktemp("parted"))

    def dies(step):
        if step == 3:
            raise Killed
        return random_batch(step)

    with pytest.raises(Killed):
        start_training(parted, batch_at=dies)
    with parted.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')
    return whole, state, parted, start_training(parted)


def test_a_killed_run_ends_with_the_parameters_of_an_uninterrupted_one(runs):
    _, whole, _, resumed = runs
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_killed_run_ends_with_the_metrics_of_an_uninterrupted_one(runs):
    timed = ("seconds", "tokens_per_second")
    whole, resumed = (
        [{k: v for k, v in record.items() if k not in timed} for record in run.metrics()]
        for run in (runs[0], runs[2])
    )
    assert [record["step"] for record in whole] == [2, 4, 6]
    assert [record["step"] for record in whole if "held_out_loss" in record] == [4, 6]
    assert whole == resumed


def test_a_finished_run_trains_no_further(runs):
    whole, state, _, _ = runs

    def no_batch(step):
        raise AssertionError(step)

    again = start_training(whole, batch_at=no_batch)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_work_dir_of_other_settings_is_refused(tmp_path):
    run = loop.Run(tmp_path)
    run.claim({"seed": 0, "steps": 8})
    run.claim({"seed": 0, "steps": 8})
    with pytest.raises(UserError, match=r"run.json.*\(steps\)"):
        run.claim({"seed": 0, "steps": 9})


def test_training_learns_what_repeats(tmp_path):
    run = loop.Run(tmp_path)
    start_training(run, batch_at=lambda step: random_batch(0), steps=60, save_seconds=3600)
    losses = [record["loss"] for record in run.metrics()]
    assert losses[-1] < 0.3 * losses[0]


def test_the_head_learns_to_agree_with_the_target():
    lesson, params = lesson_and_head()
    optimizer = optax.adam(1e-2)
    loss_fn = functools.partial(head.head_loss, config=HEAD, steps=3)

    @jax.jit
    def update(params, state):
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, lesson)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, metrics

    state = optimizer.init(params)
    history = []
    for _ in range(60):
        params, state, metrics = update(params, state)
        history.append(metrics)
    assert (history[-1].top1 > history[0].top1 + 0.2).all()
    assert (history[-1].top10 >= history[-1].top1).all()
    assert history[-1].chain > history[0].chain


def test_the_report_keeps_the_last_value_of_each_metric(tmp_path):
    records = [{"step": 1, "loss": 3.0, "held_out_loss": 3.1}, {"step": 2, "loss": 2.0}]
    report.write_report(tmp_path, {"seed": 7}, records)
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["seed"] == 7
    assert written["final"] == {"step": 2, "loss": 2.0, "held_out_loss": 3.1}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
