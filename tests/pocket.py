"""The shipped pocket checkpoint, as the end-to-end tests use it."""

import functools
import os
import pathlib
import subprocess
import sys

from acceptmoe_jax import Engine
from acceptmoe_jax.pocket import families

ROOT = pathlib.Path(__file__).parent.parent
TARGET = ROOT / "checkpoints" / "pocket-qwen3-moe"
HEAD = ROOT / "checkpoints" / "pocket-qwen3-moe-eagle3"


@functools.cache
def engine() -> Engine:
    """In float32, where everything must be exact."""
    return Engine.from_pretrained(str(TARGET), str(HEAD), dtype="float32")


def prompts(each: int, seed: int = 1) -> list[str]:
    """So many prompts of each family's test split."""
    return [
        record.prompt
        for family in families.FAMILIES
        for record in families.generate(family, "test", seed, each)
    ]


def run_program(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs `python -m experiments.NAME` as a user would, and captures what it says."""
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
