"""Where the time of a layer goes when its experts are in host memory, and how much the host needs.

    python -m experiments.offload_profile \
        --target=checkpoints/pocket-gpt-oss --draft=checkpoints/pocket-gpt-oss-eagle3 \
        --dtype=float32 --expert_slots=48 --output_dir=runs/offload_profile

Decodes held-out pocket tasks under `native` and `acceptmoe`, and splits the time of each MoE layer
and verification between the calls of the host. Then the same calls run as a rehearsal, with
programs that compute nothing and experts of a few bytes (`experiments.rehearsal`): on a CPU, XLA
runs small programs inside their calls, so what the host itself needs shows there only.

Of the rehearsals, `host` has the quickest of each layer or round, which other programs on the
machine disturb least, and `all passes` the median of all. The whole has no clock inside. `base` is
what a layer takes without its loads, by least squares. A load costs some 30 us in `jax.device_put`,
most of it Python of jax, once an array; by arithmetic, not measured, a link of 56 GB/s takes 168 us
for an expert of Qwen3-30B-A3B, behind which the calls for all groups but the first would hide.

Writes `summary.json` and `profile.md`; a minute on two CPU cores.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_atomically, write_json
from acceptmoe_jax.pocket import families
from acceptmoe_jax.runtime.engine import Engine
from experiments import engine_flags, model_flags
from experiments.host_times import PARTS, watched
from experiments.rehearsal import Recording, Rehearsal

_TASKS = flags.DEFINE_integer("tasks", 2, "Held-out pocket tasks of each family.", lower_bound=1)
_PASSES = flags.DEFINE_integer("passes", 15, "Rehearsals of each kind.", lower_bound=1)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the files go.", required=True)

_METHODS = ("native", "acceptmoe")
_SHARE = 48 / 128
_PARTS = {
    "part": "",
    "decoding_ms": ".3f",
    "decoding_ms_90th": ".3f",
    "host_ms": ".3f",
    "host_ms_90th": ".3f",
}
_METHOD = {
    "method": "",
    "verifications": "d",
    "used": ".1f",
    "loads": ".1f",
    "waves": ".2f",
    "host_ms": ".3f",
    "host_ms_90th": ".3f",
    "host_ms_all_passes": ".3f",
    "base_ms": ".3f",
    "ms_a_load": ".3f",
}


def main() -> None:
    if model_flags.DRAFT.value is None:
        raise UserError("--draft is needed: rounds are what is profiled")
    engine = model_flags.load_engine(default_slot_share=_SHARE)
    prompts = [
        record.prompt
        for family in families.FAMILIES
        for record in families.generate(family, "test", 0, _TASKS.value)
    ]
    with reporting.progress() as bar:
        task = bar.add_task("offload_profile", total=len(_METHODS) * (2 + 2 * _PASSES.value))
        profiles = {
            method: _profile(engine, method, prompts, lambda: bar.advance(task))
            for method in _METHODS
        }
    where = engine_flags.measured_on(engine)
    methods = [{"method": name} | profile["whole"] for name, profile in profiles.items()]
    summary = {
        "methods": profiles,
        "device": reporting.device_description(),
        "dtype": engine_flags.DTYPE.value,
        "target": model_flags.TARGET.value,
        "draft": model_flags.DRAFT.value,
        "passes": _PASSES.value,
        "versions": reporting.versions(),
    } | engine_flags.offload_facts(engine)
    title = f"Measured on {where}: milliseconds of the host, a MoE layer and verification"
    reporting.print_table(title, methods, _METHOD)
    text = [f"## {title}\n\n{reporting.markdown_table(methods, _METHOD)}"]
    for name, profile in profiles.items():
        title = f"{name}: medians and 90th percentiles of a MoE layer and verification"
        reporting.print_table(title, profile["parts"], _PARTS)
        text.append(f"## {title}\n\n{reporting.markdown_table(profile['parts'], _PARTS)}")
    output = pathlib.Path(_OUTPUT_DIR.value)
    write_json(output / "summary.json", summary)
    write_atomically(output / "profile.md", "\n".join(text))
    print(f"Written: {output / 'summary.json'}")


def _profile(engine: Engine, method: str, prompts: Sequence[str], done) -> dict[str, Any]:
    """`whole`: what a layer takes; `parts`: of what."""

    def decode() -> None:
        engine.generate(
            prompts,
            selector=method,
            max_new_tokens=engine_flags.MAX_NEW_TOKENS.value,
            **engine_flags.chat_options(),
        )
        done()

    recording = Recording()
    with recording.listening():  # and whatever must be compiled
        decode()
    before = engine.runner.loads
    with watched() as decoding:
        decode()
    loads = engine.runner.loads - before
    rehearsal = Rehearsal(recording, engine.runner, engine.model.weights)
    rehearsal.run()
    whole, parts = [], []
    for _ in range(_PASSES.value):  # in turn, so that a noisy machine disturbs both alike
        with watched(parts=False) as layers:
            rehearsal.run()
        whole.append(1e3 * np.asarray(layers.forwards) / len(engine.runner.tables))
        done()
        with watched() as layers:
            rehearsal.run()
        parts.append(_milliseconds(layers.samples))
        done()
    quickest = np.min(whole, axis=0)
    verifications = len(quickest)
    of_layers = verifications * len(engine.runner.tables)
    loads_a_layer = np.asarray(layers.loads) / len(engine.runner.tables)
    slope, base = np.polyfit(loads_a_layer, quickest, 1)
    return {
        "whole": {
            "verifications": verifications,
            "used": (loads.table.hits + loads.table.misses) / of_layers,
            "loads": loads.table.loads / of_layers,
            "waves": loads.table.waves / of_layers,
            "host_ms": float(np.median(quickest)),
            "host_ms_90th": float(np.percentile(quickest, 90)),
            "host_ms_all_passes": float(np.median(whole)),
            "base_ms": float(base),
            "ms_a_load": float(slope),
        },
        "parts": _part_rows(_milliseconds(decoding.samples), np.min(parts, axis=0)),
    }


def _milliseconds(samples: Sequence[dict[str, float]]) -> np.ndarray:
    """[layers and verifications, parts]."""
    return 1e3 * np.asarray([[sample.get(part, 0.0) for part in PARTS] for sample in samples])


def _part_rows(decoding: np.ndarray, host: np.ndarray) -> list[dict[str, Any]]:
    """A row a part, and their sum."""
    columns = zip((*PARTS, "sum"), _with_sum(decoding).T, _with_sum(host).T, strict=True)
    return [
        {
            "part": part,
            "decoding_ms": float(np.median(taken)),
            "decoding_ms_90th": float(np.percentile(taken, 90)),
            "host_ms": float(np.median(alone)),
            "host_ms_90th": float(np.percentile(alone, 90)),
        }
        for part, taken, alone in columns
    ]


def _with_sum(parts: np.ndarray) -> np.ndarray:
    return np.concatenate([parts, parts.sum(1, keepdims=True)], axis=1)


if __name__ == "__main__":
    reporting.run_program(main)
