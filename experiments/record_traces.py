"""Records what routers said at every verification, for replaying policies without the model.

    python -m experiments.record_traces \
        --target=checkpoints/pocket-qwen3-moe --draft=checkpoints/pocket-qwen3-moe-eagle3 \
        --dtype=float32 --pocket_prompts=32 --output_dir=runs/trace

Decodes the prompts under one policy, by default Standard SD, and writes per layer and verification
the router logits, the tree, the accepted path and the sets of the run: the layout stands in
acceptmoe_jax/traces/format.py. A run that was interrupted goes on where it stopped when it is
started again. A verification of a pocket model takes 0.13 MB, one of Qwen3-30B-A3B 1.6 MB.

Prompts come from `--prompts` (JSONL, as in experiments.generate) or from the generated pocket
tasks. What policies are fitted on must be of the training split. Half a minute for the command
above, on two CPU cores.
"""

import dataclasses
import time
from collections.abc import Mapping

import numpy as np
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.pocket import families
from acceptmoe_jax.prompts import read_prompts
from acceptmoe_jax.runtime.engine import Prompt
from acceptmoe_jax.traces import Trace
from acceptmoe_jax.traces.recording import record
from acceptmoe_jax.traces.replay import replay_trace
from experiments import ablation_flags, engine_flags, model_flags
from experiments.methods import METHODS, selector_of

_PROMPTS = flags.DEFINE_string("prompts", None, "A JSONL file of prompts.")
_POCKET = flags.DEFINE_integer("pocket_prompts", None, "Prompts from the pocket tasks.")
_SPLIT = flags.DEFINE_enum("split", "train", ["train", "test"], "Of --pocket_prompts.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the choice of --pocket_prompts.")
_SELECTOR = flags.DEFINE_enum(
    "selector",
    "native",
    [name for name, method in METHODS.items() if not (method.plain or method.evict)],
    "The method to decode under; the flags of ablations apply.",
)
_BUDGET = flags.DEFINE_integer("budget", None, "Experts a layer, where --selector needs it.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the trace goes.", required=True)

_COLUMNS = {
    "requests": "d",
    "verifications": "d",
    "megabytes": ".1f",
    "accepted_length": ".3f",
    "natural_union": ".1f",
    "seconds": ".1f",
}


def main() -> None:
    prompts = _prompts()
    if model_flags.DRAFT.value is None:
        raise UserError("--draft is needed: without a draft tree nothing is verified")
    engine = model_flags.load_engine()
    method = METHODS[_SELECTOR.value]
    selector = selector_of(engine, method, _BUDGET.value, ablation_flags.ablations())
    begin = time.perf_counter()
    with reporting.progress() as bar:
        task = bar.add_task("record", total=len(prompts))
        trace = record(
            engine,
            _OUTPUT_DIR.value,
            prompts,
            selector=selector,
            max_new_tokens=engine_flags.MAX_NEW_TOKENS.value,
            **engine_flags.chat_options(),
            on_request=lambda held: bar.update(task, completed=held),
        )
    seconds = time.perf_counter() - begin
    where = engine_flags.measured_on(engine)
    title = f"Trace of {trace.settings.target} under {_SELECTOR.value}; {where}"
    reporting.print_table(title, [_row(trace) | {"seconds": seconds}], _COLUMNS)
    print(f"Written: {trace.directory}")


def _prompts() -> Mapping[str, Prompt]:
    if (_PROMPTS.value is None) == (_POCKET.value is None):
        raise UserError("give either --prompts or --pocket_prompts")
    if _PROMPTS.value is not None:
        return read_prompts(_PROMPTS.value, "--prompts")
    each = _POCKET.value // len(families.FAMILIES)
    if each < 1:
        raise UserError(f"--pocket_prompts should be at least {len(families.FAMILIES)}")
    return {
        f"{family}/{_SPLIT.value}/{_SEED.value}/{index}": task.prompt
        for family in families.FAMILIES
        for index, task in enumerate(families.generate(family, _SPLIT.value, _SEED.value, each))
    }


def _row(trace: Trace) -> dict[str, float | None]:
    native = dataclasses.replace(trace.settings.selector, policy="native")
    unions = [r.natural_union for r in replay_trace(trace, trace.settings.commitment(), native)]
    union = np.concatenate(unions) if unions else np.zeros(0)
    size = sum((trace.directory / shard.file).stat().st_size for shard in trace.shards)
    return {
        "requests": len(trace.shards),
        "verifications": trace.verifications,
        "megabytes": size / 1e6,
        "accepted_length": float(np.mean(trace.tensor("length"))) if len(union) else None,
        "natural_union": float(np.mean(union)) if len(union) else None,
    }


if __name__ == "__main__":
    reporting.run_program(main)
