"""The names of the reference cases, shared by those who compute them and those who compare.

Needs neither torch nor our own models, so that each side can import it without the other.
"""

import pathlib

import numpy as np
import safetensors.numpy

QWEN3_MOE = ("qwen3_moe_norm", "qwen3_moe_nonorm")  # norm_topk_prob true; false
GPT_OSS = ("gpt_oss_converted", "gpt_oss_mxfp4")  # as transformers saves it; as the hub has it
CHECKPOINTS = QWEN3_MOE + GPT_OSS
PROMPT_LENGTHS = (5, 37, 150)  # shorter and longer than a prefill bucket of 64 or 128 tokens
HEAD = "eagle3_tiny"
HEAD_TARGET = "qwen3_moe_norm"
# Cases on the one head: as its config says, and with `norm_before_residual` (EAGLE-3.1) set.
HEAD_CASES = {HEAD: False, f"{HEAD}_norm_before_residual": True}

# Keys of a config.json that say how positions rotate, in one spelling and the other. The first two
# are GPT-OSS's own.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_OWN_LIMITS = _YARN | {"factor": 5.0, "beta_fast": 7.0, "beta_slow": 0.5}
ROPES = {
    "gpt_oss": {"head_dim": 64, "rope_theta": 150000, "rope_scaling": _YARN},
    "gpt_oss_rope_parameters": {
        "head_dim": 64,
        "rope_parameters": _YARN | {"rope_theta": 150000.0},
    },
    "truncated": {
        "head_dim": 64,
        "rope_theta": 150000,
        "rope_scaling": _YARN | {"truncate": True},
    },
    "truncated_by_default": {
        "head_dim": 64,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        "max_position_embeddings": 8192,
    },
    "own_limits": {
        "head_dim": 48,
        "rope_parameters": _OWN_LIMITS | {"rope_theta": 1e4},
        "max_position_embeddings": 20480,
    },
    "short_context": {
        "head_dim": 20,
        "rope_theta": 500.0,
        "rope_scaling": _YARN | {"original_max_position_embeddings": 64},
        "max_position_embeddings": 2048,
    },
    "attention_factor": {
        "head_dim": 80,
        "rope_parameters": _YARN | {"rope_theta": 1e5, "attention_factor": 1.25},
    },
    "plain": {"head_dim": 18, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
}
ROPE_CASE = "rope"

# Greatest absolute error in float32; the largest hidden state of the targets is about 16.
TARGET_TOLERANCE = 1e-4
HEAD_TOLERANCE = 1e-5

SEED = 20  # of the recorded checkpoints and inputs
FRESH_SEEDS = (23, 27)  # of those that are computed live only; free of near ties in the routing


def prompt_name(checkpoint: str, length: int) -> str:
    """The case of one prompt."""
    return f"{checkpoint}_prompt_{length}"


def block_name(checkpoint: str) -> str:
    """The case of a verification block."""
    return f"{checkpoint}_block"


CASES = (
    *(prompt_name(name, length) for name in CHECKPOINTS for length in PROMPT_LENGTHS),
    *(block_name(name) for name in CHECKPOINTS),
    *HEAD_CASES,
    ROPE_CASE,
)


def read_case(data_dir: pathlib.Path, name: str) -> dict[str, np.ndarray]:
    """The recorded arrays of one of `CASES`."""
    return safetensors.numpy.load_file(data_dir / "references" / f"{name}.safetensors")
