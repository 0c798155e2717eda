"""HumanEval: functions to complete from their docstrings (Chen et al., 2021)."""

import functools

from acceptmoe_jax.evaluation.code_scorer import CodeScorer
from acceptmoe_jax.evaluation.datasets import Source
from acceptmoe_jax.evaluation.sandbox.run import Limits, Program
from acceptmoe_jax.evaluation.tasks import Messages, Problem, Style, Task, user_message

NAME = "humaneval"
_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```", "<|endoftext|>")
_INSTRUCTION = "Complete this Python function. Answer with the whole function in one code block."
_SOURCE = Source(
    folder="humaneval",
    files=("HumanEval.jsonl.gz", "HumanEval.jsonl"),
    parquet=("openai_humaneval/test-*.parquet", "test-*.parquet"),
    hub=("openai/openai_humaneval", None, "test"),
    fields=("task_id", "prompt", "entry_point", "canonical_solution", "test"),
)


def task(data_dir: str | None, limits: Limits = Limits()) -> Task:
    """The task; a problem's id is its `task_id`."""

    @functools.cache
    def problems(split: str) -> list[Problem]:
        return [Problem(each["task_id"], each) for each in _SOURCE.records(data_dir)]

    scorer = CodeScorer(_program, lambda problem: problem.fields["prompt"], limits)
    return Task(NAME, ("test",), problems, _prompt, _STOPS, scorer)


def _prompt(problem: Problem, style: Style) -> str | Messages:
    code = problem.fields["prompt"]
    if style == "completion":
        return code
    return user_message(f"{_INSTRUCTION}\n\n```python\n{code.strip()}\n```")


def _program(problem: Problem) -> Program:
    fields = problem.fields
    name = fields["entry_point"]
    return Program(
        answer="",
        names=(name,),
        tests=(fields["test"], f"check({name})"),
        # Some tests use the prompt's imports and helpers.
        reference=fields["prompt"] + fields["canonical_solution"],
    )
