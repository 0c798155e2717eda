"""The names of the reference cases, shared by those who compute them and those who compare.

Needs neither torch nor our own models, so that each side can import it without the other.
"""

import pathlib

import numpy as np
import safetensors.numpy

CHECKPOINTS = ("qwen3_moe_norm", "qwen3_moe_nonorm")  # norm_topk_prob true; false
PROMPT_LENGTHS = (5, 37, 150)  # shorter and longer than a prefill bucket of 64 or 128 tokens
HEAD = "eagle3_tiny"
HEAD_TARGET = "qwen3_moe_norm"
# Cases on the one head: as its config says, and with `norm_before_residual` (EAGLE-3.1) set.
HEAD_CASES = {HEAD: False, f"{HEAD}_norm_before_residual": True}

# Greatest absolute error in float32; the largest hidden state of the targets is about 16.
TARGET_TOLERANCE = 1e-4
HEAD_TOLERANCE = 1e-5

SEED = 20  # of the recorded checkpoints and inputs
FRESH_SEEDS = (23, 24)  # of those that are computed live only; free of near ties in the routing


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
)


def read_case(data_dir: pathlib.Path, name: str) -> dict[str, np.ndarray]:
    """The recorded arrays of one of `CASES`."""
    return safetensors.numpy.load_file(data_dir / "references" / f"{name}.safetensors")
