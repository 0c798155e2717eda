r"""MATH-500: competition mathematics with the answer in a box (Hendrycks et al., 2021)."""

import functools
import re

from acceptmoe_jax.evaluation.answers import NEXT_QUESTION, cut, last_boxed
from acceptmoe_jax.evaluation.datasets import Source
from acceptmoe_jax.evaluation.math_equality import MathEquality
from acceptmoe_jax.evaluation.tasks import (
    Messages,
    Problem,
    Style,
    Task,
    last_part,
    user_message,
)

NAME = "math500"
_INSTRUCTION = r"Solve this problem step by step, and put your final answer in \boxed{}."
# The 500 problems have no training split, so these are ours.
_SHOTS = r"""Problem:
A rectangle is 3 units wide and its diagonal is 5 units long. What is its area?

Solution:
The other side is $\sqrt{5^2 - 3^2} = 4$ units long, so the area is $3 \cdot 4 = \boxed{12}.$

Problem:
Which $x$ satisfies $\frac{x + 1}{x} = 3?$

Solution:
Multiplying by $x$ gives $x + 1 = 3x,$ so $2x = 1$ and $x = \boxed{\frac{1}{2}}.$

"""
_ANSWER_IS = re.compile(r"answer is:?\s*(.+?)(?:\.?\s*(?:I hope[^\n]*)?$)", re.I | re.M)


def task(data_dir: str | None) -> Task:
    """The task; a problem's id is its `unique_id`."""

    @functools.cache
    def problems(split: str) -> list[Problem]:
        source = Source(
            folder="math500",
            files=(f"{split}.jsonl", f"{split}.jsonl.gz"),
            parquet=(f"data/{split}-*.parquet", f"{split}-*.parquet"),
            hub=("HuggingFaceH4/MATH-500", None, split),
            fields=("problem", "answer", "unique_id"),
        )
        return [Problem(each["unique_id"], each) for each in source.records(data_dir)]

    return Task(NAME, ("test",), problems, _prompt, NEXT_QUESTION, MathScorer())


def _prompt(problem: Problem, style: Style) -> str | Messages:
    text = problem.fields["problem"]
    if style == "chat":
        return user_message(f"{_INSTRUCTION}\n\n{text}")
    return f"{_SHOTS}Problem:\n{text}\n\nSolution:"


class MathScorer:
    """Compares the completion's last box with the field `answer`, by math-verify.

    A completion without any box answers with what follows its last "answer is", or with the whole
    of its one line; one whose only box does not close has no answer.
    """

    runs_code = False

    def __init__(self):
        self._equality = MathEquality()

    def extract(self, problem: Problem, completion: str) -> str | None:
        text = cut(last_part(completion), NEXT_QUESTION)
        boxed = last_boxed(text)
        if boxed is not None or r"\boxed" in text:
            return boxed or None
        if said := _ANSWER_IS.findall(text):
            return said[-1]
        line = text.strip()
        return line if line and "\n" not in line else None

    def judge(self, problem: Problem, answer: str) -> tuple[bool, str]:
        gold = problem.fields["answer"]
        return self._equality.equal(gold, answer), f"the answer is {gold}"

    def close(self) -> None:
        """Ends the processes of math-verify."""
        self._equality.close()
