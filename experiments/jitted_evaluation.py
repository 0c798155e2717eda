"""Agreement and KL against the budget of experts, in one jitted function: the page to copy from.

    python -m experiments.jitted_evaluation \
        --target=checkpoints/pocket-qwen3-moe --draft=checkpoints/pocket-qwen3-moe-eagle3 \
        --dtype=float32 --budgets=12,16,24,32,48,64

`record_blocks` decodes a batch of prompts natively and keeps their verification blocks: caches that
hold the committed prefix, a draft tree, its accepted rows. `evaluate` verifies each block natively
and under every budget of `acceptmoe_fix`, and compares the accepted rows. A budget is data there,
so both axes are a `jax.vmap` and one program serves all budgets, blocks and commitment tables. To
evaluate a rule of your own, change `eligible_experts`.

Prints a table; --output_dir also writes `summary.json`. About a minute on two CPU cores.
"""

import functools
import pathlib

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_json
from acceptmoe_jax.runtime import programs, stages
from acceptmoe_jax.runtime.recorded_blocks import RecordedBlock, record_blocks
from acceptmoe_jax.runtime.state import Setup, Weights
from acceptmoe_jax.selection import Commitment, anchored_set, residual_distribution, select
from experiments import engine_flags, model_flags, prompt_flags

_BUDGETS = flags.DEFINE_list("budgets", ["12", "16", "24", "32", "48", "64"], "Experts a layer.")
_ROUNDS = flags.DEFINE_integer("rounds", 4, "Blocks of each prompt at most.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 4, "Prompts of a batch.", lower_bound=1)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where summary.json goes, if anywhere.")

_COLUMNS = {"budget": "d", "eligible": ".1f", "used": ".1f", "agreement": ".2%", "kl": ".5f"}


@flax.struct.dataclass
class Scores:
    """Sums over the blocks of a batch, under each budget; sums of batches add up."""

    blocks: Int[Array, "B"]
    rows: Int[Array, "B"]  # accepted rows compared
    agreeing: Int[Array, "B"]  # those with the same argmax
    kl: Float[Array, "B"]  # KL(native || restricted), nats
    eligible: Float[Array, "B"]  # mean size over layers
    used: Float[Array, "B"]


def evaluate(
    setup: Setup,
    weights: Weights,
    blocks: RecordedBlock,
    commitment: Commitment,
    budgets: Int[Array, "B"],
) -> Scores:
    """Restricted verification against native routing on the accepted rows of N blocks."""

    def of_block(block: RecordedBlock, budget: Int[Array, ""]) -> Scores:
        tree = stages.tree_block(block.state, block.tree)

        def choose(layer, logits):
            del layer
            eligible = eligible_experts(setup, tree, commitment, logits, budget)
            return stages.choose_experts(
                setup, setup.native(), tree, commitment, logits, override=eligible
            )

        native = programs.forward(setup, weights, block.state, tree, setup.native())
        out = programs.forward_choosing(setup, weights, block.state, tree, choose)
        native, restricted = (
            stages.unembed(setup, weights, hidden[block.rows])
            for hidden in (native.hidden, out.hidden)
        )
        counted = jnp.arange(len(block.rows)) < block.count
        same = jnp.argmax(native, axis=-1) == jnp.argmax(restricted, axis=-1)
        logp = jax.nn.log_softmax(native)
        kl = jnp.sum(jnp.exp(logp) * (logp - jax.nn.log_softmax(restricted)), axis=-1)
        counts = jax.tree.map(lambda *sizes: jnp.mean(jnp.stack(sizes)), *out.moe)
        active = block.state.active
        return Scores(
            blocks=active.astype(jnp.int32),
            rows=block.count,
            agreeing=jnp.sum(same & counted, dtype=jnp.int32),
            kl=jnp.sum(jnp.where(counted, kl, 0)),
            eligible=jnp.where(active, counts.eligible, 0),
            used=jnp.where(active, counts.used, 0),
        )

    # The native pass does not depend on the budget, so that it runs once for all of them.
    scores = jax.vmap(jax.vmap(of_block, in_axes=(None, 0)), in_axes=(0, None))(blocks, budgets)
    return jax.tree.map(lambda leaf: leaf.sum(axis=0), scores)


def eligible_experts(
    setup: Setup,
    tree: stages.Block,
    commitment: Commitment,
    logits: Float[Array, "T E"],
    budget: Int[Array, ""],
) -> Bool[Array, "E"]:
    """The set of `acceptmoe_fix`: the root's k experts and the budget - k of most demand."""
    asked = select(logits, tree.depth, tree.valid, commitment.phat, config=setup.native())
    q = residual_distribution(asked.demand, asked.anchor)
    return anchored_set(q, asked.anchor, budget - setup.target.top_k)


def main() -> None:
    if model_flags.DRAFT.value is None:
        raise UserError("--draft is needed: without a draft tree nothing is verified")
    engine = model_flags.load_engine()
    setup, weights = engine.model.setup, engine.model.weights
    if engine.offload is not None:
        raise UserError("--expert_slots: here all experts are on the device")
    engine.selector("acceptmoe")  # says so, if there is no commitment table
    budgets = _budgets(setup)
    prompts = [
        engine.encode(prompt, **engine_flags.chat_options())
        for prompt in prompt_flags.prompts().values()
    ]
    size = min(_BATCH.value, len(prompts))
    prompts += [()] * (-len(prompts) % size)  # every batch has the same shape
    count = np.array([len(ids) for ids in prompts], np.int32)
    if count.max() > engine.max_length:
        raise UserError(f"a prompt has {count.max()} tokens, more than {engine.max_length}")
    tokens = np.zeros((len(prompts), count.max()), np.int32)
    for row, ids in zip(tokens, prompts):
        row[: len(ids)] = ids
    stop_ids = np.array(sorted(engine.tokenizer.stop_ids), np.int32)
    record = jax.jit(functools.partial(record_blocks, setup, _ROUNDS.value, engine.dtype))
    score = jax.jit(functools.partial(evaluate, setup))
    commitment = engine.commitment.commitment()
    total = None
    with reporting.progress() as bar:
        for at in bar.track(range(0, len(prompts), size)):
            blocks = record(weights, stop_ids, tokens[at : at + size], count[at : at + size])
            scores = jax.device_get(score(weights, blocks, commitment, budgets))
            total = scores if total is None else jax.tree.map(np.add, total, scores)
    rows = [
        {
            "budget": budget,
            "eligible": total.eligible[i] / total.blocks[i],
            "used": total.used[i] / total.blocks[i],
            "agreement": total.agreeing[i] / total.rows[i],
            "kl": max(total.kl[i] / total.rows[i], 0.0),
        }
        for i, budget in enumerate(budgets.tolist())
    ]
    title = (
        f"acceptmoe_fix against native routing on {total.rows[0]} accepted rows of "
        f"{total.blocks[0]} blocks, measured on {engine_flags.measured_on(engine)}"
    )
    reporting.print_table(title, rows, _COLUMNS)
    if _OUTPUT_DIR.value is not None:
        rows = [{key: float(value) for key, value in row.items()} for row in rows]
        summary = {"title": title, "rows": rows, "versions": reporting.versions()}
        write_json(pathlib.Path(_OUTPUT_DIR.value) / "summary.json", summary)


def _budgets(setup: Setup) -> np.ndarray:
    top_k, experts = setup.target.top_k, setup.target.num_experts
    for text in _BUDGETS.value:
        if not (text.isdecimal() and top_k <= int(text) <= experts):
            raise UserError(f"--budgets: {text!r} is not a number from {top_k} to {experts}")
    return np.array(sorted({int(text) for text in _BUDGETS.value}), np.int32)


if __name__ == "__main__":
    reporting.run_program(main)
