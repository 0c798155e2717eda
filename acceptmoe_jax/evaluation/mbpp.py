"""MBPP: functions to write from a sentence and three assertions (Austin et al., 2021)."""

import functools

from acceptmoe_jax.evaluation.code_answers import bound_names, loaded_names
from acceptmoe_jax.evaluation.code_scorer import CodeScorer
from acceptmoe_jax.evaluation.datasets import Fields, Source
from acceptmoe_jax.evaluation.sandbox.run import Limits, Program
from acceptmoe_jax.evaluation.tasks import Messages, Problem, Style, Task, user_message

NAME = "mbpp"
SANITIZED = "mbpp_sanitized"
_DONE = "[DONE]"
_STOPS = (_DONE, "\nYou are an expert Python programmer", "<|endoftext|>")
# The published splits, by task_id; the published prompt has tasks 2, 3 and 4 for examples.
_SPLITS = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
    "all": range(1, 975),
}
_SHOTS = ("2", "3", "4")
_HUB = ("google-research-datasets/mbpp", "train+test+validation+prompt")
_FULL = Source(
    folder="mbpp",
    files=("mbpp.jsonl", "mbpp.jsonl.gz"),
    parquet=("full/*.parquet", "*.parquet"),
    hub=(_HUB[0], "full", _HUB[1]),
    fields=("task_id", "text", "code", "test_setup_code", "test_list"),
)
_SANITIZED = Source(
    folder="mbpp",
    files=("sanitized-mbpp.json", "sanitized-mbpp.json.gz"),
    parquet=("sanitized/*.parquet",),
    hub=(_HUB[0], "sanitized", _HUB[1]),
    fields=("task_id", "prompt", "code", "test_imports", "test_list"),
)


def task(data_dir: str | None, limits: Limits = Limits(), *, sanitized: bool = False) -> Task:
    """The task, of the full set or of the sanitized one; a problem's id is its `task_id`."""

    @functools.cache
    def problems(split: str) -> list[Problem]:
        records = (_SANITIZED if sanitized else _FULL).records(data_dir)
        records = sorted(records, key=lambda record: record["task_id"])
        chosen = [record for record in records if record["task_id"] in _SPLITS[split]]
        return [Problem(str(record["task_id"]), record) for record in chosen]

    def prompt(problem: Problem, style: Style) -> str | Messages:
        if style == "chat":
            return user_message(f"{_question(problem)}\n\nAnswer with the code in one code block.")
        shots = [each for each in problems("prompt") if each.id in _SHOTS and each != problem]
        solved = [f"{_question(each)}\n[BEGIN]\n{_code(each)}\n{_DONE}\n\n" for each in shots]
        return "".join([*solved, f"{_question(problem)}\n[BEGIN]\n"])

    scorer = CodeScorer(_program, limits=limits, stops=_STOPS)
    name = SANITIZED if sanitized else NAME
    return Task(name, tuple(_SPLITS), problems, prompt, _STOPS, scorer)


def _question(problem: Problem) -> str:
    """The published prompt; its tests name the function."""
    fields = problem.fields
    text = fields.get("text") or fields["prompt"]
    tests = "\n".join(fields["test_list"])
    return (
        f"You are an expert Python programmer, and here is your task: {text} "
        f"Your code should pass these tests:\n\n{tests}"
    )


def _code(problem: Problem) -> str:
    return problem.fields["code"].replace("\r\n", "\n").strip()


def _setup(fields: Fields) -> str:
    if "test_setup_code" in fields:
        return fields["test_setup_code"].replace("\r\n", "\n")
    return "\n".join(fields["test_imports"])


def _program(problem: Problem) -> Program:
    """The tests of `test_list`; `challenge_test_list` is no part of the published evaluation."""
    reference, tests = _code(problem), tuple(problem.fields["test_list"])
    called = loaded_names("\n".join(tests)) & bound_names(reference)
    return Program(
        answer="",
        names=tuple(sorted(called)),
        tests=tests,
        setup=_setup(problem.fields),
        reference=reference,
    )
