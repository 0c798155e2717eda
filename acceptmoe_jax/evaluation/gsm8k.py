"""GSM8K: word problems whose answer is a number (Cobbe et al., 2021)."""

import dataclasses
import functools
import re
from fractions import Fraction

from acceptmoe_jax.evaluation.answers import NEXT_QUESTION, cut, final_number, number_text
from acceptmoe_jax.evaluation.datasets import Source
from acceptmoe_jax.evaluation.tasks import (
    Messages,
    Problem,
    Style,
    Task,
    last_part,
    user_message,
)

NAME = "gsm8k"
_SHOTS = 5
_INSTRUCTION = "Solve this problem step by step. End with a line '#### ' and the number alone."


def task(data_dir: str | None) -> Task:
    """The task; a problem's id is its line number in its split's file, from 0."""

    @functools.cache
    def problems(split: str) -> list[Problem]:
        source = Source(
            folder="gsm8k",
            files=(f"{split}.jsonl", f"{split}.jsonl.gz"),
            parquet=(f"main/{split}-*.parquet", f"{split}-*.parquet"),
            hub=("openai/gsm8k", "main", split),
            fields=("question", "answer"),
        )
        return [Problem(str(i), each) for i, each in enumerate(source.records(data_dir))]

    def prompt(problem: Problem, style: Style) -> str | Messages:
        question = problem.fields["question"]
        if style == "chat":
            return user_message(f"{_INSTRUCTION}\n\n{question}")
        shots = [_shot(each) for each in problems("train")[:_SHOTS]]
        return "".join([*shots, f"Question: {question}\nAnswer:"])

    return Task(NAME, ("train", "test"), problems, prompt, NEXT_QUESTION, NumberScorer("answer"))


def _shot(problem: Problem) -> str:
    answer = re.sub(r"<<.*?>>", "", problem.fields["answer"])  # marks for a calculator
    return f"Question: {problem.fields['question']}\nAnswer: {answer}\n\n"


@dataclasses.dataclass(frozen=True)
class NumberScorer:
    """Compares the completion's final number with that of a field, exactly."""

    field: str
    runs_code = False

    def extract(self, problem: Problem, completion: str) -> str | None:
        number = final_number(cut(last_part(completion), NEXT_QUESTION))
        return None if number is None else number_text(number)

    def judge(self, problem: Problem, answer: str) -> tuple[bool, str]:
        gold = final_number(problem.fields[self.field])
        return Fraction(answer) == gold, f"the answer is {number_text(gold)}"

    def close(self) -> None:
        """Nothing is held."""
