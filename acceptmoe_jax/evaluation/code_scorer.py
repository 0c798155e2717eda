"""Scores code by running it against tests in the sandbox."""

import dataclasses
from collections.abc import Callable

from acceptmoe_jax.evaluation.code_answers import function_code
from acceptmoe_jax.evaluation.sandbox.run import Limits, Program, run
from acceptmoe_jax.evaluation.tasks import Problem, last_part


@dataclasses.dataclass(frozen=True)
class CodeScorer:
    """Runs a completion's code against a problem's tests.

    Attributes:
      program: the tests of a problem, around an empty answer.
      prompt: the code that a completion may continue.
      limits: what an answer may use.
      stops: where a completion ends.
    """

    program: Callable[[Problem], Program]
    prompt: Callable[[Problem], str] = lambda problem: ""
    limits: Limits = Limits()
    stops: tuple[str, ...] = ()
    runs_code = True

    def extract(self, problem: Problem, completion: str) -> str | None:
        names = self.program(problem).names
        text = last_part(completion)
        for stop in self.stops:
            text = text.partition(stop)[0]
        return function_code(text, names, self.prompt(problem))

    def judge(self, problem: Problem, answer: str) -> tuple[bool, str]:
        program = dataclasses.replace(self.program(problem), answer=answer)
        verdict = run(program, self.limits)
        return verdict.passed, verdict.reason or "passes its tests"

    def close(self) -> None:
        """Nothing is held."""
