"""The shipped pocket checkpoints, as the end-to-end tests use them."""

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
GPT_OSS_TARGET = ROOT / "checkpoints" / "pocket-gpt-oss"
GPT_OSS_HEAD = ROOT / "checkpoints" / "pocket-gpt-oss-eagle3"


@functools.cache
def engine(target: pathlib.Path = TARGET, head: pathlib.Path = HEAD) -> Engine:
    """In float32, where everything must be exact."""
    return Engine.from_pretrained(str(target), str(head), dtype="float32")


def assert_native_is_plain(engine: Engine, prompts: list[str], max_new_tokens: int) -> None:
    """Tree speculation under natural routing emits the tokens of plain decoding."""
    plain, native = (
        engine.generate(prompts, selector=selector, max_new_tokens=max_new_tokens)
        for selector in ("autoregressive", "native")
    )
    differing = [
        (i, a.token_ids, b.token_ids)
        for i, (a, b) in enumerate(zip(plain, native, strict=True))
        if a.token_ids != b.token_ids
    ]
    assert not differing, differing[0]


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
