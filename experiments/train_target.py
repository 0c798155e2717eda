"""Trains the pocket target of a family, small enough for two cores.

    python -m experiments.train_target --family=qwen3_moe \
        --output_dir=checkpoints/pocket-qwen3-moe --work_dir=runs/train-qwen3-moe \
        [--tokens=7200000] [--gsm8k_train=FILE] [--export_only]

qwen3_moe: 10.6 M parameters, 1.4 M of them active; stored in bfloat16.
gpt_oss: the experts are rounded to MXFP4 in every forward of the training, gradients passing
straight through, and stored as MXFP4; `--nomxfp4` trains and stores without the rounding.

Training is in float32. On two CPU cores, busy with other work besides, a shipped run took about an
hour, with huge pages (GLIBC_TUNABLES=glibc.malloc.hugetlb=1 on Linux; slower without). Killed at
any moment, it goes on from its last save when started again with the same flags. `--export_only`
writes the last save, however far it got, as a checkpoint.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.models.config import RopeConfig
from acceptmoe_jax.models.gpt_oss import FULL, SLIDING, GptOssConfig
from acceptmoe_jax.models.qwen3_moe import Qwen3MoeConfig
from acceptmoe_jax.pocket import chat, corpus, tokenizer as pocket_tokenizer
from acceptmoe_jax.training import batches, loop, report, target
from acceptmoe_jax.training.optimizer import OptimizerConfig, make_optimizer
from acceptmoe_jax.weights.saving import save_gpt_oss, save_qwen3_moe

_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the checkpoint goes.", required=True)
_WORK_DIR = flags.DEFINE_string(
    "work_dir", None, "Saves and metrics of the run; it resumes from here.", required=True
)
_FAMILY = flags.DEFINE_enum("family", None, ["qwen3_moe", "gpt_oss"], "Which.", required=True)
_MXFP4 = flags.DEFINE_bool("mxfp4", True, "Round the experts of gpt_oss in training, and store so.")
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
QWEN3_MOE = Qwen3MoeConfig(
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
    rope=RopeConfig(10_000.0),
    max_positions=1024,
)
# The window is shorter than every prompt. YaRN stretches 128 positions, a training row, by 8.
GPT_OSS = GptOssConfig(
    vocab_size=1536,
    hidden_size=192,
    num_layers=4,
    num_heads=10,
    num_kv_heads=2,
    head_dim=24,
    num_experts=128,
    top_k=4,
    expert_width=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10_000.0, factor=8.0, original_positions=128, truncate=False),
    max_positions=1024,
    sliding_window=16,
    layer_types=(SLIDING, FULL, SLIDING, FULL),
)


def main() -> None:
    family = _FAMILY.value
    pockets = {"qwen3_moe": (QWEN3_MOE, chat.PLAIN), "gpt_oss": (GPT_OSS, chat.HARMONY)}
    config, chat_format = pockets[family]
    mxfp4 = family == "gpt_oss" and _MXFP4.value
    run = loop.Run(pathlib.Path(_WORK_DIR.value))
    tokenizer = pocket_tokenizer.train_tokenizer(
        corpus.tokenizer_texts(_SEED.value, chat_format, gsm8k_train=_GSM8K_TRAIN.value),
        chat_format,
        config.vocab_size,
    )
    packed = corpus.training_rows(tokenizer, _TOKENS.value, _SEED.value, _GSM8K_TRAIN.value)
    steps = len(packed.tokens) // _BATCH_ROWS.value
    settings = {
        "family": family,
        "seed": _SEED.value,
        "tokens": _TOKENS.value,
        "gsm8k_train": _GSM8K_TRAIN.value is not None,
        "batch_rows": _BATCH_ROWS.value,
        "steps": steps,
        "balance_coefficient": _BALANCE.value,
        "mxfp4_in_training": mxfp4,
    }
    run.claim(settings)
    optimizer = make_optimizer(OptimizerConfig(), steps)
    state = loop.initial_state(target.init_target(jax.random.key(_SEED.value), config), optimizer)
    loss_fn = functools.partial(
        target.target_loss, config=config, balance_coefficient=_BALANCE.value, mxfp4=mxfp4
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
    pocket_tokenizer.save_tokenizer(tokenizer, _OUTPUT_DIR.value, config.max_positions)
    facts = settings | {
        "steps_done": done,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    }
    report.write_report(_OUTPUT_DIR.value, facts, run.metrics())
    params, banks = state.params["dense"], target.expert_banks(state.params, config)
    if family == "gpt_oss":
        save_gpt_oss(_OUTPUT_DIR.value, config.to_hf(mxfp4), params, banks, mxfp4=mxfp4)
    else:
        save_qwen3_moe(_OUTPUT_DIR.value, config.to_hf(), params, banks, dtype=jnp.bfloat16)


if __name__ == "__main__":
    reporting.run_program(main)
