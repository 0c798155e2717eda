"""The four pocket families as tasks; their code is judged by running it beside its reference."""

import functools
import random

from acceptmoe_jax.evaluation.answers import last_boxed
from acceptmoe_jax.evaluation.code_answers import bound_names
from acceptmoe_jax.evaluation.code_scorer import CodeScorer
from acceptmoe_jax.evaluation.gsm8k import NumberScorer
from acceptmoe_jax.evaluation.sandbox.run import Limits, Program
from acceptmoe_jax.evaluation.tasks import (
    Messages,
    Problem,
    Scorer,
    Style,
    Task,
    last_part,
    user_message,
)
from acceptmoe_jax.pocket import families, functions, mathematics, word_problems
from acceptmoe_jax.pocket.records import Record
from acceptmoe_jax.pocket.scoring import signature

NAMES = families.FAMILIES
_CALLS = 24  # of each kind of argument
_WORDS = "apple Echo level it STOP radar tune a onion Sand noise rest trust by query"


def task(family: str, limits: Limits = Limits(), *, seed: int = 0, count: int = 100) -> Task:
    """One family; a problem's id is its place among the `count` that the seed draws."""

    @functools.cache
    def problems(split: str) -> list[Problem]:
        records = families.generate(family, split, seed, count)
        return [Problem(str(i), vars(record)) for i, record in enumerate(records)]

    return Task(family, ("train", "test"), problems, _prompt, (), _scorer(family, limits))


def _prompt(problem: Problem, style: Style) -> str | Messages:
    text = problem.fields["prompt"]
    return user_message(text) if style == "chat" else text


def _scorer(family: str, limits: Limits) -> Scorer:
    if family == word_problems.NAME:
        return NumberScorer("completion")
    if family == mathematics.NAME:
        return _BoxScorer()
    if family == functions.FROM_DOCSTRING:
        return CodeScorer(_program, _code_prompt, limits)
    return CodeScorer(_program, limits=limits)


class _BoxScorer:
    """Compares the last box as text: the family's answers have one form each."""

    runs_code = False

    def extract(self, problem: Problem, completion: str) -> str | None:
        return last_boxed(last_part(completion)) or None

    def judge(self, problem: Problem, answer: str) -> tuple[bool, str]:
        gold = problem.fields["answer"]
        return answer == gold, f"the answer is {gold}"

    def close(self) -> None:
        """Nothing is held."""


def _code_prompt(problem: Problem) -> str:
    """The signature and what follows it, without the sentence that asks for it."""
    prompt = problem.fields["prompt"]
    return prompt[prompt.index(signature(prompt)) :] + "\n"


def _program(problem: Problem) -> Program:
    """Compares answer and reference on values of every kind that the reference takes."""
    record = Record(**problem.fields)
    begun = _code_prompt(problem) if record.family == functions.FROM_DOCSTRING else ""
    reference = begun + record.answer
    (name,) = bound_names(reference)
    test = (
        f"for value in {_arguments()!r}:\n"
        "    try:\n"
        "        wanted = reference(value)\n"
        "    except Exception:\n"
        "        continue\n"
        f"    found = {name}(value)\n"
        "    assert type(found) is type(wanted) and found == wanted, (value, found)\n"
    )
    return Program("", (name,), (test,), reference=f"{reference}\nreference = {name}")


@functools.cache
def _arguments() -> list[list[int] | int | str]:
    """Lists of numbers, numbers and texts, the same for every problem."""
    rng = random.Random("arguments of pocket functions")
    words = _WORDS.split()
    lists = [rng.choices(range(-30, 31), k=length) for length in range(_CALLS)]
    texts = [" ".join(rng.choices(words, k=length)) for length in range(_CALLS)]
    numbers = [rng.randrange(10 ** rng.randint(1, 3)) for _ in range(_CALLS)]
    return [*lists, *texts, *numbers]
