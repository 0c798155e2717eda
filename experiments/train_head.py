"""Trains a pocket target's EAGLE-3 head on the target's own distributions.

    python -m experiments.train_head --target=checkpoints/pocket-qwen3-moe \
        --output_dir=checkpoints/pocket-qwen3-moe-eagle3 --work_dir=runs/train-qwen3-moe-head \
        [--tokens=1300000] [--gsm8k_train=FILE] [--export_only]

The target may be of either family. One layer, unrolled over the steps it will draft; its
vocabulary is the 1,024 most frequent of the target's 1,536 tokens. On two CPU cores a step of 3,072
tokens takes about 2.6 seconds and the run about 20 minutes; the shipped GPT-OSS head had 800,000
tokens and 12 minutes. It resumes and exports as `experiments.train_target` does.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.models.config import RopeConfig
from acceptmoe_jax.models.eagle3 import Eagle3Config
from acceptmoe_jax.pocket import corpus
from acceptmoe_jax.runtime.pretrained import load_pretrained
from acceptmoe_jax.speculation import TreeConfig
from acceptmoe_jax.training import batches, head, loop, report, target
from acceptmoe_jax.training.optimizer import OptimizerConfig, make_optimizer
from acceptmoe_jax.weights.saving import draft_tables, save_eagle3

_TARGET = flags.DEFINE_string("target", None, "Directory of the trained target.", required=True)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the head goes.", required=True)
_WORK_DIR = flags.DEFINE_string(
    "work_dir", None, "Saves and metrics of the run; it resumes from here.", required=True
)
_TOKENS = flags.DEFINE_integer("tokens", 1_300_000, "Training tokens; each is seen once.")
_SEED = flags.DEFINE_integer("seed", 1, "Of the data and the initial parameters.")
_GSM8K_TRAIN = flags.DEFINE_string(
    "gsm8k_train", None, "GSM8K's train.jsonl, for variety; without it, Python source only."
)
_STEPS = flags.DEFINE_integer("unroll_steps", 5, "Draft steps that training unrolls.")
_BATCH_ROWS = flags.DEFINE_integer("batch_rows", 24, "Rows of 128 tokens a step.")
_EXPORT_ONLY = flags.DEFINE_bool("export_only", False, "Write the last save and stop.")

DRAFT_VOCAB = 1024
# Drills are never drafted; the rest is as the target saw it.
MIXTURE = corpus.Mixture(drills=0.0)


def head_config(target_hidden_size: int, vocab_size: int) -> Eagle3Config:
    """Widths differ from the target's wherever they may."""
    return Eagle3Config(
        hidden_size=target_hidden_size,  # it shares the target's embedding
        target_hidden_size=target_hidden_size,
        num_heads=8,
        num_kv_heads=4,
        head_dim=26,
        intermediate_size=448,
        vocab_size=vocab_size,
        draft_vocab_size=DRAFT_VOCAB,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10_000.0),
        aux_layer_ids=(0, 1, 2),
    )


def main() -> None:
    run = loop.Run(pathlib.Path(_WORK_DIR.value))
    pretrained = load_pretrained(_TARGET.value, None, dtype=jnp.float32, tree=TreeConfig())
    target_config = pretrained.setup.target
    config = head_config(target_config.hidden_size, target_config.vocab_size)
    target_params = target.from_banks(pretrained.weights.target, pretrained.weights.banks)
    tokenizer = tokenizers.Tokenizer.from_file(str(pretrained.target.directory / "tokenizer.json"))
    packed = corpus.training_rows(
        tokenizer, _TOKENS.value, _SEED.value, _GSM8K_TRAIN.value, MIXTURE
    )
    completions = packed.tokens[packed.loss_weights == 1]
    target_ids = head.frequent_tokens(completions, target_config.vocab_size, DRAFT_VOCAB)
    teach = jax.jit(
        functools.partial(head.teach, config=target_config, aux_layer_ids=config.aux_layer_ids)
    )
    loss_fn = functools.partial(head.head_loss, config=config, steps=_STEPS.value)

    steps = len(packed.tokens) // _BATCH_ROWS.value
    settings = {
        "seed": _SEED.value,
        "tokens": _TOKENS.value,
        "gsm8k_train": _GSM8K_TRAIN.value is not None,
        "batch_rows": _BATCH_ROWS.value,
        "steps": steps,
        "unroll_steps": _STEPS.value,
    }
    run.claim(settings)
    optimizer = make_optimizer(OptimizerConfig(), steps)
    state = loop.initial_state(
        head.init_head(jax.random.key(_SEED.value), config, target_params, target_ids), optimizer
    )

    def lesson_at(step: int) -> head.Lesson:
        rows = batches.batch_rows(len(packed.tokens), _BATCH_ROWS.value, _SEED.value, step)
        return teach(target_params, batches.take_rows(packed, rows), target_ids)

    if _EXPORT_ONLY.value:
        done, state = loop.restore(run, state)
    else:
        done = steps
        held_out = [
            teach(target_params, batch, target_ids) for batch in batches.held_out_batches(tokenizer)
        ]
        state = loop.train(
            run,
            state,
            optimizer,
            loss_fn,
            batch_at=lesson_at,
            held_out=loop.mean_metrics(loss_fn, held_out),
            config=loop.LoopConfig(steps, _BATCH_ROWS.value * corpus.ROW_LENGTH),
        )
    d2t, t2d = draft_tables(target_ids, target_config.vocab_size)
    facts = settings | {
        "steps_done": done,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "completion_tokens_in_draft_vocabulary": float(np.mean(t2d[completions])),
    }
    report.write_report(_OUTPUT_DIR.value, facts, run.metrics())
    save_eagle3(_OUTPUT_DIR.value, config.to_hf(), state.params, d2t, t2d)


if __name__ == "__main__":
    reporting.run_program(main)
