"""Evaluates models on tasks under several methods: accuracy, accepted length, throughput, sets.

    python -m experiments.evaluate \
        --targets=checkpoints/pocket-qwen3-moe,checkpoints/pocket-gpt-oss \
        --drafts=checkpoints/pocket-qwen3-moe-eagle3,checkpoints/pocket-gpt-oss-eagle3 \
        --tasks=pocket --samples=25 --dtype=float32 --max_new_tokens=64 --allow_code_execution \
        --output_dir=runs/evaluate

`--drafts` holds the head of each target, in the targets' order. Tasks are benchmarks, from
`--data_dir` or the hub, and families of pocket tasks (`pocket` is all of them); `--samples` test
problems of each are drawn by `--seed`, the same for every model and method. HumanEval, MBPP and the
pocket functions run what a model wrote, in a sandbox and with `--allow_code_execution` only.
`acceptmoe_fix` and `moe_spec` take acceptmoe's mean set size on the same model and task for their
budget. The flags of the engine, such as `--expert_slots`, are in force for all models.

Every sample is kept in `samples/MODEL/TASK/METHOD.jsonl` once it is scored; the same command goes
on where it was interrupted, and methods, tasks and models may be added. Writes `summary.json`,
`report.md`, `report.html` (all in one file) and its figures as PNG. Intervals are of 95 %, and
differences from Standard SD (`native`) are paired.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from absl import flags

from acceptmoe_jax import report_page, reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation import benchmarks, scoring
from acceptmoe_jax.evaluation.sandbox import run as sandbox
from acceptmoe_jax.evaluation.tasks import Task
from acceptmoe_jax.files import write_atomically, write_json
from experiments import (
    engine_flags,
    evaluation_report,
    method_flags,
    sampling_flags,
)
from experiments.evaluation_axes import POCKET, paired_models, task_names
from experiments.evaluation_run import Grid, summarised

_TARGETS = flags.DEFINE_list("targets", None, "Directories or hub ids.", required=True)
_DRAFTS = flags.DEFINE_list("drafts", [], "The EAGLE-3 head of each target, in their order.")
_TASKS = flags.DEFINE_list(
    "tasks", None, f"Of {', '.join(benchmarks.TASKS)}, or {POCKET}.", required=True
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folders of the benchmarks; default: the hub.")
_SAMPLES = flags.DEFINE_integer("samples", 100, "Test problems of each task.", lower_bound=1)
_STYLE = flags.DEFINE_enum(
    "style", None, ["chat", "completion"], "Of prompts; default: chat, if the target has chats."
)
_ALLOW = flags.DEFINE_bool("allow_code_execution", False, "Run code that a model wrote.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the files go.", required=True)

_METHODS = ("native", "moe_spec", "acceptmoe_fix", "acceptmoe")
# Flags of other programs that have no place here.
_REFUSED = {
    "chat": "--style says which prompts are chats",
    "batch_size": "speed is measured with one prompt at a time, as published",
    "keep_residency": "a sample would depend on those before it",
    "max_disagreement": "a sample would depend on those before it",
}


def main() -> None:
    for name, reason in _REFUSED.items():
        if flags.FLAGS[name].value != flags.FLAGS[name].default:
            raise UserError(f"--{name} is of no use here: {reason}")
    models = paired_models(_TARGETS.value, _DRAFTS.value)
    methods = method_flags.methods(_DRAFTS.value, _METHODS)
    tasks = [_task(name) for name in task_names(_TASKS.value)]
    offload = engine_flags.offload_config()
    output = pathlib.Path(_OUTPUT_DIR.value)
    grid = Grid(
        models=models,
        tasks=tasks,
        methods=methods,
        samples=_SAMPLES.value,
        seed=sampling_flags.SEED.value,
        style=_STYLE.value,
        allow_code_execution=_ALLOW.value,
        settings=engine_flags.settings() | method_flags.settings(),
        folder=output / "samples",
        load=lambda model: engine_flags.load_engine(model.target, model.draft),
    )
    summary = summarised(grid.run(), methods) | {
        "models": [vars(model) for model in models],
        "settings": {"samples": _SAMPLES.value, "style": _STYLE.value} | dict(grid.settings),
        "device": reporting.device_description(),
        "dtype": engine_flags.DTYPE.value,
        "versions": reporting.versions(),
    }
    if offload is not None:
        summary |= {"slots": offload.slots, "link": str(offload.link)}
        summary |= {"link_simulated": offload.link.simulated}
    if any(task.scorer.runs_code for task in tasks):
        summary["sandbox"] = sandbox.isolation()
    where = f"{engine_flags.conditions(offload)}, {_counted(summary)}{method_flags.in_words()}"
    _write(summary, where, output)


def _task(name: str) -> Task:
    seed, count = sampling_flags.SEED.value, _SAMPLES.value
    task = benchmarks.load_task(name, _DATA_DIR.value, seed=seed, count=count)
    try:
        scoring.require_permission(task.scorer, _ALLOW.value)
    except UserError as error:
        raise UserError(f"--tasks: {name}: {error}") from None
    return task


def _counted(summary: Mapping[str, Any]) -> str:
    counts = sorted({row["samples"] for row in summary["rows"]})
    return f"samples a task: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}"


def _write(summary: Mapping[str, Any], where: str, output: pathlib.Path) -> None:
    """The files, and the means on the terminal."""
    pictures = evaluation_report.figures(summary, where)
    parts, markdown = evaluation_report.page(summary, where, pictures)
    write_json(output / "summary.json", summary)
    for name, picture in pictures.items():
        write_atomically(output / name, picture.png)
    write_atomically(output / "report.md", markdown)
    write_atomically(output / "report.html", report_page.render("Evaluation", parts))
    table = evaluation_report.mean_table(summary, where, brief=True)
    reporting.print_table(table.title, table.rows, table.formats)
    print("\n".join(evaluation_report.words(summary, where)))
    print(f"Written: {output / 'report.html'}")


if __name__ == "__main__":
    reporting.run_program(main)
