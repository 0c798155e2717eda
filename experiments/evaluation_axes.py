"""The axes of an evaluation as flags give them: models and tasks."""

import dataclasses
import pathlib

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation import benchmarks, pocket_tasks

POCKET = "pocket"  # all families of pocket tasks


@dataclasses.dataclass(frozen=True)
class Model:
    """A target with its head.

    Attributes:
      name: of tables and folders.
      target, draft: directories or hub ids.
    """

    name: str
    target: str
    draft: str | None


def paired_models(targets: list[str], drafts: list[str]) -> list[Model]:
    """A model for each target, named as its folder.

    Raises:
      UserError: if there is no target, not a draft for each, or two have one name.
    """
    if not targets:
        raise UserError("--targets names no model")
    if drafts and len(drafts) != len(targets):
        raise UserError(
            f"--drafts must hold a head for each target, in their order: there are {len(targets)} "
            f"targets and {len(drafts)} drafts"
        )
    names = [pathlib.PurePath(target).name for target in targets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--targets: two are named {twice}, which names their results")
    heads = drafts or [None] * len(targets)
    return [Model(*each) for each in zip(names, targets, heads, strict=True)]


def task_names(given: list[str]) -> list[str]:
    """The tasks asked for, each once.

    Raises:
      UserError: if there is none, or one is unknown.
    """
    names: list[str] = []
    for name in given:
        names += pocket_tasks.NAMES if name == POCKET else [name]
    unknown = next((name for name in names if name not in benchmarks.TASKS), None)
    if unknown is not None:
        known = ", ".join((*benchmarks.TASKS, POCKET))
        raise UserError(f"--tasks: {unknown!r} is not one of {known}")
    if not names:
        raise UserError("--tasks names no task")
    return list(dict.fromkeys(names))
