"""Scores predictions that exist already; no model is needed.

    python -m experiments.score --task=gsm8k --predictions=predictions.jsonl \
        --data_dir=../shared/data --output=scores.jsonl

`--data_dir` holds the folders gsm8k, math500, humaneval and mbpp with the published files; without
it records come from the hub, through `datasets`. A line of predictions is `{"id": ...,
"completion": ...}`, where the id is the line number in GSM8K's test file (from 0), MATH-500's
`unique_id`, or the `task_id` of HumanEval and MBPP (the full set), and several lines may share one.
A completion is a bare continuation of the prompt or a chat answer.

Writes a line for each, in the same order: `{"id", "correct", "extracted", "reason"}`. HumanEval
and MBPP run what the model wrote, in a sandbox and with `--allow_code_execution` only. On two cores
GSM8K takes seconds, a thousand answers of the other tasks two minutes.
"""

import pathlib
import sys

from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation import benchmarks, intervals, scoring
from acceptmoe_jax.evaluation.predictions import read_predictions, write_scores
from acceptmoe_jax.evaluation.sandbox import run

_TASK = flags.DEFINE_enum("task", None, benchmarks.BENCHMARKS, "The benchmark.", required=True)
_PREDICTIONS = flags.DEFINE_string("predictions", None, "A JSONL file.", required=True)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folders of the benchmarks; default: the hub.")
_OUTPUT = flags.DEFINE_string("output", None, "Where the scores go, as JSONL.", required=True)
_ALLOW = flags.DEFINE_bool("allow_code_execution", False, "Run code that a model wrote.")
_JOBS = flags.DEFINE_integer("jobs", None, "Answers at a time; default: the cores.", lower_bound=1)
_CPU_SECONDS = flags.DEFINE_integer(
    "cpu_seconds",
    15,
    "What the code of one answer may take; four times that by the clock.",
    lower_bound=1,
)

_COLUMNS = {
    "task": "",
    "samples": "d",
    "problems": "d",
    "of_problems": "d",
    "correct": "d",
    "accuracy": ".2%",
    "low": ".2%",
    "high": ".2%",
}


def main() -> None:
    output = pathlib.Path(_OUTPUT.value)
    if output.is_dir():
        raise UserError(f"--output: {output} is a directory")
    limits = run.Limits(_CPU_SECONDS.value, 4 * _CPU_SECONDS.value)
    task = benchmarks.load_task(_TASK.value, _DATA_DIR.value, limits)
    scoring.require_permission(task.scorer, _ALLOW.value)
    problems = task.problems("all" if "all" in task.splits else "test")
    by_id = {problem.id: problem for problem in problems}
    predictions = read_predictions(_PREDICTIONS.value, "--predictions", by_id)
    if task.scorer.runs_code:
        print(f"Code runs in a sandbox ({run.isolation()}).", file=sys.stderr)
    pairs = [(prediction.problem, prediction.completion) for prediction in predictions]
    with reporting.progress() as progress:
        bar = progress.add_task(task.name, total=len(pairs))
        scores = scoring.score(
            task.scorer,
            pairs,
            allow_code_execution=_ALLOW.value,
            jobs=_JOBS.value,
            done=lambda: progress.advance(bar),
        )
    write_scores(output, predictions, scores)
    right = [score.correct for score in scores]
    ids = [prediction.problem.id for prediction in predictions]
    accuracy = intervals.share(right, ids)
    row = {
        "task": task.name,
        "samples": len(right),
        "problems": len(set(ids)),
        "of_problems": len(problems),
        "correct": sum(right),
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
    }
    title = f"{_PREDICTIONS.value}, accuracy with its 95 % interval"
    reporting.print_table(title, [row], _COLUMNS)
    print(f"Written: {output}", file=sys.stderr)


if __name__ == "__main__":
    reporting.run_program(main)
