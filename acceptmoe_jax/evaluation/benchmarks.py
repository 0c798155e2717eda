"""All tasks by name."""

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation import gsm8k, humaneval, math500, mbpp, pocket_tasks
from acceptmoe_jax.evaluation.sandbox.run import Limits
from acceptmoe_jax.evaluation.tasks import Task

BENCHMARKS = (gsm8k.NAME, math500.NAME, humaneval.NAME, mbpp.NAME, mbpp.SANITIZED)
TASKS = (*BENCHMARKS, *pocket_tasks.NAMES)


def load_task(
    name: str,
    data_dir: str | None = None,
    limits: Limits = Limits(),
    *,
    seed: int = 0,
    count: int = 100,
) -> Task:
    """The task of a name; its records are read when they are first asked for.

    Args:
      name: one of `TASKS`.
      data_dir: holds a folder for each benchmark; None reads from the hub.
      limits: what code may use.
      seed: of the draw of pocket problems.
      count: pocket problems drawn.

    Raises:
      UserError: for an unknown name.
    """
    if name == gsm8k.NAME:
        return gsm8k.task(data_dir)
    if name == math500.NAME:
        return math500.task(data_dir)
    if name == humaneval.NAME:
        return humaneval.task(data_dir, limits)
    if name in (mbpp.NAME, mbpp.SANITIZED):
        return mbpp.task(data_dir, limits, sanitized=name == mbpp.SANITIZED)
    if name in pocket_tasks.NAMES:
        return pocket_tasks.task(name, limits, seed=seed, count=count)
    raise UserError(f"no task {name!r}; there are {', '.join(TASKS)}")
