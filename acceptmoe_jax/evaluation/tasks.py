"""What a task is: problems, prompts, stop strings and a scorer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

Style = Literal["chat", "completion"]
Messages = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One record of a benchmark.

    Attributes:
      id: as predictions name it.
      fields: the published record.
    """

    id: str
    fields: Mapping[str, Any]


class Score(NamedTuple):
    """What a completion was found to answer, whether that is right, and why it counts so."""

    correct: bool
    extracted: str | None
    reason: str


class Scorer(Protocol):
    """Judges completions in two steps: what the answer is, and whether it is right.

    Attributes:
      runs_code: whether `judge` executes what a model wrote, in the sandbox.
    """

    runs_code: bool

    def extract(self, problem: Problem, completion: str) -> str | None:
        """The answer as text; None where there is none. Executes nothing."""

    def judge(self, problem: Problem, answer: str) -> tuple[bool, str]:
        """Whether an extracted answer is right, and the reason; may be called from any thread."""

    def close(self) -> None:
        """Gives back processes that it holds."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A benchmark.

    Attributes:
      name: as flags and tables name it.
      splits: the names that `problems` knows.
      problems: the problems of a split.
      prompt: what a model is asked: messages in chat style, else a text to continue, where few-shot
        examples come from splits that are no test.
      stop_strings: end a generation in completion style.
      scorer: judges what a model wrote, in either style.
    """

    name: str
    splits: tuple[str, ...]
    problems: Callable[[str], list[Problem]]
    prompt: Callable[[Problem, Style], str | Messages]
    stop_strings: tuple[str, ...]
    scorer: Scorer


def user_message(text: str) -> Messages:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def last_part(completion: str) -> str:
    """What follows the reasoning of a model that shows it between think marks."""
    return completion.rpartition("</think>")[2]
