"""Scores many completions at once."""

import concurrent.futures
import os
from collections.abc import Callable, Sequence

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation.tasks import Problem, Score, Scorer


def require_permission(scorer: Scorer, allow_code_execution: bool) -> None:
    """Raises `UserError` if a scorer runs what a model wrote and that is not allowed."""
    if scorer.runs_code and not allow_code_execution:
        raise UserError(
            "this task runs code that a model wrote; if that is what you want, in a sandbox, "
            "give --allow_code_execution"
        )


def score_one(
    scorer: Scorer, problem: Problem, completion: str, *, allow_code_execution: bool = False
) -> Score:
    """Scores one completion; the scorer keeps what it holds, until it is closed.

    Raises:
      UserError: if permission is needed and not given.
    """
    require_permission(scorer, allow_code_execution)
    answer = scorer.extract(problem, completion)
    return _score(answer, None if answer is None else scorer.judge(problem, answer))


def score(
    scorer: Scorer,
    pairs: Sequence[tuple[Problem, str]],
    *,
    allow_code_execution: bool = False,
    jobs: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Scores completions, several at a time, each distinct answer to a problem once.

    Args:
      scorer: of the task.
      pairs: problems with a completion each.
      allow_code_execution: explicit permission to run code that a model wrote.
      jobs: how many are judged at a time; default: as many as there are cores.
      done: called after each.

    Returns:
      A score for each pair, in their order.

    Raises:
      UserError: if permission is needed and not given.
    """
    require_permission(scorer, allow_code_execution)
    answers = [(problem, scorer.extract(problem, text)) for problem, text in pairs]
    with concurrent.futures.ThreadPoolExecutor(jobs or _cores()) as pool:
        verdicts = {}
        for problem, answer in answers:
            key = problem.id, answer
            if answer is not None and key not in verdicts:
                verdicts[key] = pool.submit(scorer.judge, problem, answer)
        scores = []
        try:
            for problem, answer in answers:
                verdict = verdicts.get((problem.id, answer))
                scores.append(_score(answer, verdict and verdict.result()))
                done()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            scorer.close()
    return scores


def _score(answer: str | None, verdict: tuple[bool, str] | None) -> Score:
    if verdict is None:
        return Score(False, None, "no answer found")
    correct, reason = verdict
    return Score(correct, answer, reason)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
