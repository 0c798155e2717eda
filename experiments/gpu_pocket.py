"""The section of `experiments.gpu_check` that decodes with the pocket checkpoints."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.prompts import read_prompts
from acceptmoe_jax.runtime import programs, stages
from acceptmoe_jax.runtime.engine import Engine
from experiments.gpu_plan import POCKETS, ROOT, Item, Plan, Row, pocket_pair
from pallas_kernels.implementations import Implementations

_PROMPTS = "demo_prompts.jsonl"
_METHODS = ("native", "acceptmoe")
_PREFILL_ROWS = 256  # hold every prompt of the demo and what is made of it here

COLUMNS = {
    "target": "",
    "kernels": "",
    "dtype": "",
    "method": "",
    "prompts": "d",
    "tokens": "d",
    "prompts_equal_to_cpu": "d",
    "largest_margin_where_they_part": ".3f",
    "error": "",
}


@dataclasses.dataclass(frozen=True)
class _Texts:
    """Prompts, and the token ids of their answers by method."""

    prompts: list[Any]
    answers: dict[str, list[tuple[int, ...]]]


def pocket(plan: Plan) -> Iterator[Item]:
    """Texts of the pocket models, against those of `experiments.generate` on the CPU."""
    names = POCKETS[: 1 if plan.rehearsal else None]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        on_cpu = {name: pool.submit(_cpu_texts, name, plan) for name in names}
        for name in names:
            for kernels in plan.kernels_of_models:
                for dtype in ("float32",) if plan.rehearsal else ("float32", "bfloat16"):
                    measure = functools.partial(
                        _pocket_rows, name, dtype, plan.kernels[kernels], on_cpu[name].result, plan
                    )
                    labels = {"target": name, "kernels": kernels, "dtype": dtype}
                    yield Item(labels, measure)


def _cpu_texts(name: str, plan: Plan) -> _Texts:
    """What `experiments.generate` answers on the CPU in float32 and plain XLA."""
    target, head = pocket_pair(name)
    prompts = (ROOT / "checkpoints" / _PROMPTS).read_text().splitlines()[: plan.prompts]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / _PROMPTS
        file.write_text("\n".join(prompts))
        command = [
            *(sys.executable, "-m", "experiments.generate"),
            *(f"--target={target}", f"--draft={head}", f"--prompts={file}"),
            *("--dtype=float32", "--kernels=xla", "--audit_every=0", f"--output_dir={folder}"),
            *(f"--selectors={','.join(_METHODS)}", f"--max_new_tokens={plan.new_tokens}"),
        ]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"experiments.generate: {done.stderr.strip().splitlines()[-1]}")
        lines = (pathlib.Path(folder) / "generations.jsonl").read_text().splitlines()
        answers: dict[str, list[tuple[int, ...]]] = {method: [] for method in _METHODS}
        for line in map(json.loads, lines):
            answers[line["method"]].append(tuple(line["token_ids"]))
        return _Texts(list(read_prompts(str(file), "prompts").values()), answers)


@functools.cache
def _engine(name: str, dtype: str, implementations: Implementations) -> Engine:
    return Engine.from_pretrained(*pocket_pair(name), dtype=dtype, kernels=implementations)


def _pocket_rows(
    name: str,
    dtype: str,
    implementations: Implementations,
    on_cpu: Callable[[], _Texts],
    plan: Plan,
) -> list[Row]:
    rows = []
    engine = _engine(name, dtype, implementations)
    expected = on_cpu()
    # XLA would take TF32 for float32 products on a GPU.
    exact = "highest" if dtype == "float32" else None
    for method, theirs in expected.answers.items():
        with jax.default_matmul_precision(exact):
            answers = engine.generate(
                expected.prompts, selector=method, max_new_tokens=plan.new_tokens
            )
        parted = {
            index: _common(answer.token_ids, other)
            for index, (answer, other) in enumerate(zip(answers, theirs, strict=True))
            if answer.token_ids != other
        }
        margins = None
        if method == "native":  # a restricted verifier's logits are others
            margins = [
                _margin(next_logits(name, answers[index].prompt_ids + theirs[index][:place]))
                for index, place in parted.items()
            ]
        rows.append(
            {
                "method": method,
                "prompts": len(answers),
                "tokens": sum(len(answer.token_ids) for answer in answers),
                "prompts_equal_to_cpu": len(answers) - len(parted),
                "largest_margin_where_they_part": max(margins, default=None) if margins else None,
                "margins": margins,
            }
        )
    return rows


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(ours, theirs))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _margin(logits: jax.Array) -> float:
    """Best less second best."""
    second, best = np.sort(np.asarray(logits))[-2:]
    return float(best - second)


def next_logits(name: str, context: Sequence[int]) -> jax.Array:
    """A pocket target's logits after at least two tokens, in float32 and plain XLA."""
    model = _engine(name, "float32", Implementations()).model
    tokens = np.zeros(_PREFILL_ROWS, np.int32)
    tokens[: len(context) - 1] = context[:-1]
    with jax.default_matmul_precision("highest"):
        return _next_logits(model.setup)(
            model.weights, jnp.asarray(tokens), jnp.int32(len(context) - 1), context[-1]
        )


@functools.cache
def _next_logits(setup: programs.Setup) -> Callable[..., jax.Array]:
    """Of the root of a tree behind a prompt of `count` tokens and one more."""

    @jax.jit
    def run(weights, tokens, count, last):
        rows = _PREFILL_ROWS + setup.spare_rows
        state = programs.empty_state(setup, rows, jnp.float32)
        state = programs.prefill_chunk(setup, weights, state, tokens, count, last)
        native = setup.native()
        _, done = programs.speculative_round(
            setup, weights, state, stages.NO_COMMITMENT, selector=native
        )
        return done.logits[0]

    return run
