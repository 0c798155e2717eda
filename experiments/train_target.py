"""Trains the pocket target: a Qwen3-MoE with 128 experts a layer, small enough for two cores.

    python -m experiments.train_target --output_dir=checkpoints/pocket-qwen3-moe \
        --work_dir=runs/train-target [--tokens=7200000] [--gsm8k_train=FILE] [--export_only]

10.6 M parameters, 1.4 M of them active, in float32; the checkpoint is bfloat16. On two CPU cores,
busy with other work besides, the shipped run took 56 minutes, with huge pages
(GLIBC_TUNABLES=glibc.malloc.hugetlb=1 on Linux; slower without). Killed at any moment, it goes
on from its last save when started again with the same flags. `--export_only` writes the last save,
however far it got, as a checkpoint.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.models.config import Qwen3MoeConfig
from acceptmoe_jax.pocket import corpus, tokenizer as pocket_tokenizer
from acceptmoe_jax.training import batches, loop, report, target
from acceptmoe_jax.training.optimizer import OptimizerConfig, make_optimizer
from acceptmoe_jax.weights.saving import save_qwen3_moe

_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the checkpoint goes.", required=True)
_WORK_DIR = flags.DEFINE_string(
    "work_dir", None, "Saves and metrics of the run; it resumes from here.", required=True
)
_TOKENS = flags.DEFINE_integer("tokens", 7_200_000, "Training tokens; each is seen once.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the data and the initial parameters.")
_GSM8K_TRAIN = flags.DEFINE_string(
    "gsm8k_train", None, "GSM8K's train.jsonl, for variety; without it, Python source only."
)
_BALANCE = flags.DEFINE_float(
    "balance_coefficient", 0.001, "Of the load-balancing loss; Qwen3-MoE's own is 0.001."
)
_BATCH_ROWS = flags.DEFINE_integer("batch_rows", 48, "Rows of 128 tokens a step.")
_EXPORT_ONLY = flags.DEFINE_bool("export_only", False, "Write the last save and stop.")

# Every dimension is a number of its own, so that a swapped axis cannot go unnoticed.
CONFIG = Qwen3MoeConfig(
    vocab_size=1536,
    hidden_size=192,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=40,
    num_experts=128,
    top_k=8,
    expert_width=32,
    dense_width=416,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_positions=1024,
)


def main() -> None:
    run = loop.Run(pathlib.Path(_WORK_DIR.value))
    tokenizer = pocket_tokenizer.train_tokenizer(
        corpus.tokenizer_texts(_SEED.value, gsm8k_train=_GSM8K_TRAIN.value), CONFIG.vocab_size
    )
    packed = corpus.training_rows(tokenizer, _TOKENS.value, _SEED.value, _GSM8K_TRAIN.value)
    steps = len(packed.tokens) // _BATCH_ROWS.value
    settings = {
        "seed": _SEED.value,
        "tokens": _TOKENS.value,
        "gsm8k_train": _GSM8K_TRAIN.value is not None,
        "batch_rows": _BATCH_ROWS.value,
        "steps": steps,
        "balance_coefficient": _BALANCE.value,
    }
    run.claim(settings)
    optimizer = make_optimizer(OptimizerConfig(), steps)
    state = loop.initial_state(target.init_target(jax.random.key(_SEED.value), CONFIG), optimizer)
    loss_fn = functools.partial(
        target.target_loss, config=CONFIG, balance_coefficient=_BALANCE.value
    )
    if _EXPORT_ONLY.value:
        done, state = loop.restore(run, state)
    else:
        done = steps
        state = loop.train(
            run,
            state,
            optimizer,
            loss_fn,
            batch_at=lambda step: batches.take_rows(
                packed,
                batches.batch_rows(len(packed.tokens), _BATCH_ROWS.value, _SEED.value, step),
            ),
            held_out=loop.mean_metrics(loss_fn, batches.held_out_batches(tokenizer)),
            config=loop.LoopConfig(steps, _BATCH_ROWS.value * corpus.ROW_LENGTH),
        )
    pocket_tokenizer.save_tokenizer(tokenizer, _OUTPUT_DIR.value, CONFIG.max_positions)
    facts = settings | {
        "steps_done": done,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    }
    report.write_report(_OUTPUT_DIR.value, facts, run.metrics())
    save_qwen3_moe(
        _OUTPUT_DIR.value,
        CONFIG.to_hf(),
        state.params["dense"],
        target.expert_banks(state.params, CONFIG),
        dtype=jnp.bfloat16,
    )


if __name__ == "__main__":
    reporting.run_program(main)
