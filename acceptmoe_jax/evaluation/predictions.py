"""Prediction files: a JSON object a line, with the `id` of a problem and a `completion`."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation.datasets import numbered_records
from acceptmoe_jax.evaluation.tasks import Problem, Score
from acceptmoe_jax.files import write_atomically


class Prediction(NamedTuple):
    """A completion, its problem, and the id as the file wrote it."""

    id: str | int
    problem: Problem
    completion: str


def read_predictions(
    path: str | os.PathLike, flag: str, problems: Mapping[str, Problem]
) -> list[Prediction]:
    """Reads a predictions file.

    Args:
      path: the file.
      flag: the flag that named it, for messages.
      problems: by id.

    Raises:
      UserError: naming the flag, or the file and line.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag}: {path} cannot be read: {error}") from None
    predictions = []
    for number, record in numbered_records(text, path):
        where = f"{path}, line {number}"
        if type(record.get("id")) not in (str, int):
            raise UserError(f"{where}: no id (a text or a whole number)")
        if not isinstance(record.get("completion"), str):
            raise UserError(f"{where}: no completion (a text)")
        problem = problems.get(str(record["id"]))
        if problem is None:
            raise UserError(f"{where}: no problem has the id {record['id']!r}")
        predictions.append(Prediction(record["id"], problem, record["completion"]))
    if not predictions:
        raise UserError(f"{flag}: {path} holds no prediction")
    return predictions


def write_scores(
    path: str | os.PathLike, predictions: Sequence[Prediction], scores: Sequence[Score]
) -> None:
    """Writes a line for each prediction, in their order: id, correct, extracted, reason."""
    lines = [
        json.dumps({"id": prediction.id} | score._asdict())
        for prediction, score in zip(predictions, scores, strict=True)
    ]
    write_atomically(path, "".join(f"{line}\n" for line in lines))
