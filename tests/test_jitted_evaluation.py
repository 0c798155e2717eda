"""experiments.jitted_evaluation: one compiled program whose budgets are data."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.runtime import programs, stages
from acceptmoe_jax.runtime.recorded_blocks import record_blocks
from acceptmoe_jax.selection import Commitment, SelectorConfig
from tests import pocket, programs as program_modules, selection_oracle, tiny_models

jitted_evaluation = program_modules.imported("jitted_evaluation")
TOP_K, EXPERTS = tiny_models.TARGET.top_k, tiny_models.TARGET.num_experts
BUDGETS = jnp.asarray([5, 8, EXPERTS], jnp.int32)
COMMITMENT = Commitment(jnp.asarray([1.0, 0.7, 0.5, 0.3], jnp.float32))
PROMPTS = np.random.default_rng(0).integers(0, tiny_models.TARGET.vocab_size, (2, 17))
COUNTS = (17, 11)
ROUNDS = 3
NO_STOP = (-1,)

SETUP = tiny_models.setup()
WEIGHTS = functools.cache(tiny_models.weights)
_record = jax.jit(functools.partial(record_blocks, SETUP, ROUNDS, jnp.float32))
TRACES = []
COMPARED = 4  # nodes of each block: a random head's drafts are rarely accepted


@jax.jit
def _evaluate(*args):
    TRACES.append(args)
    return jitted_evaluation.evaluate(SETUP, *args)


def blocks(counts=COUNTS, stop_ids=NO_STOP):
    ids, counts = jnp.asarray(stop_ids), jnp.asarray(counts)
    recorded = _record(WEIGHTS(), ids, jnp.asarray(PROMPTS, jnp.int32), counts)
    rows = jnp.broadcast_to(jnp.arange(recorded.rows.shape[1]), recorded.rows.shape)
    return recorded.replace(rows=rows, count=jnp.where(recorded.count > 0, COMPARED, 0))


def scores(recorded, commitment=COMMITMENT, budgets=BUDGETS):
    return jax.device_get(_evaluate(WEIGHTS(), recorded, commitment, budgets))


@functools.cache
def scored():
    return scores(blocks())


def test_one_program_serves_all_budgets_blocks_and_commitments():
    scored()
    other = Commitment(jnp.asarray([1.0, 0.2, 0.1, 0.05], jnp.float32))
    changed = scores(blocks((9, 16)), other, jnp.asarray([4, 6, 7], jnp.int32))
    assert len(TRACES) == 1
    assert (changed.used != scored().used).all()


def test_a_budget_as_data_is_the_budget_of_the_policy():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(15, EXPERTS)), jnp.float32)
    tree = stages.Block(
        tokens=jnp.zeros(15, jnp.int32),
        positions=None,
        mask=None,
        depth=jnp.asarray(rng.integers(1, 4, 15)).at[0].set(0),
        valid=jnp.arange(15) < 12,
        score=jnp.zeros(15),
    )
    budgets = np.arange(TOP_K, EXPERTS + 1)
    block = (SETUP, tree, COMMITMENT, logits)
    of_budget = functools.partial(jitted_evaluation.eligible_experts, *block)
    ours = jax.jit(jax.vmap(of_budget))(jnp.asarray(budgets))
    block = jax.device_get((logits, tree.depth, tree.valid, COMMITMENT.phat))
    for budget, eligible in zip(budgets, ours, strict=True):
        expected = selection_oracle.select(*block, None, TOP_K, size=budget - TOP_K)
        assert set(np.flatnonzero(eligible)) == expected["eligible"]


def test_a_batch_scores_as_its_blocks_do_one_by_one_under_the_policy():
    """In NumPy and float64, from logits of the programs that the engine runs."""
    policy = SelectorConfig("acceptmoe_fix", top_k=TOP_K, budget=int(BUDGETS[0]))

    @jax.jit
    def verified(weights, block):
        tree = stages.tree_block(block.state, block.tree)
        outs = [
            programs.forward(SETUP, weights, block.state, tree, selector, COMMITMENT)
            for selector in (SETUP.native(), policy)
        ]
        return [stages.unembed(SETUP, weights, out.hidden) for out in outs], outs[1].moe

    recorded = blocks()
    rows, agreeing, kl, eligible, used = 0, 0, 0.0, 0.0, 0.0
    for i in range(len(recorded.count)):
        block = jax.tree.map(lambda leaf: leaf[i], recorded)
        logits, layers = jax.device_get(verified(WEIGHTS(), block))
        kept = np.asarray(block.rows)[: int(block.count)]
        native, restricted = (np.float64(each)[kept] for each in logits)
        rows += len(kept)
        agreeing += np.sum(native.argmax(axis=1) == restricted.argmax(axis=1))
        p, q = (each - np.log(np.exp(each).sum(axis=1))[:, None] for each in (native, restricted))
        kl += np.sum(np.exp(p) * (p - q))
        eligible += np.mean([counts.eligible for counts, _ in layers])
        used += np.mean([counts.used for counts, _ in layers])
    result = jax.tree.map(lambda leaf: leaf[0], scored())
    assert (result.rows, result.agreeing) == (rows, agreeing)
    assert agreeing < rows, "nothing was changed: the test shows nothing"
    np.testing.assert_allclose(result.kl, kl, rtol=1e-5)
    np.testing.assert_allclose([result.eligible, result.used], [eligible, used], rtol=1e-6)


def test_all_experts_are_native_routing():
    result = scored()
    assert result.agreeing[-1] == result.rows[-1] > 0
    assert abs(result.kl[-1]) < 1e-5 < result.kl[0]


def test_an_empty_place_in_a_batch_counts_nothing():
    one, other = (scores(blocks(counts)) for counts in ((17, 0), (0, 11)))
    jax.tree.map(
        lambda a, b, both: np.testing.assert_allclose(a + b, both, rtol=1e-4, atol=1e-5),
        one,
        other,
        scored(),
    )
    assert one.blocks[0] == ROUNDS


def test_what_follows_a_stop_token_does_not_count():
    recorded = blocks()
    stop = int(recorded.tree.tokens[1, 0])  # what the first round emitted last
    ended = blocks(stop_ids=(stop,))
    active = np.asarray(ended.state.active).reshape(2, ROUNDS)
    assert active[0].tolist() == [True, False, False]
    assert np.asarray(ended.count).reshape(2, ROUNDS)[0, 1:].tolist() == [0, 0]


@pytest.mark.slow
def test_the_program_says_what_each_budget_costs(tmp_path):
    done = pocket.run_program(
        "jitted_evaluation",
        f"--target={pocket.TARGET}",
        f"--draft={pocket.HEAD}",
        "--dtype=float32",
        "--budgets=16,128",
        "--tasks=1",
        f"--output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    small, whole = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert (small["budget"], whole["budget"]) == (16, 128)
    assert (whole["agreement"], small["used"]) == (1, 16)
    assert whole["kl"] < 1e-5 < small["kl"]
    assert "cpu" in done.stdout


def test_a_budget_below_top_k_is_refused_by_flag():
    done = pocket.run_program(
        "jitted_evaluation",
        f"--target={pocket.TARGET}",
        f"--draft={pocket.HEAD}",
        "--budgets=16,3",
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: --budgets: '3' is not a number from ")
