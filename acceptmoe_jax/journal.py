"""Finished pieces of a run, a JSON line each, so that a run that was interrupted goes on."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_atomically


class Journal:
    """What of a run is done, by key.

        journal = Journal("runs/x/rows.jsonl", {"seed": 0})
        if "first" not in journal:
            journal.add("first", {"seconds": 1.5})

    The file's first line holds the settings of the run, every other one a key and its value. It
    gains whole lines only.

    Args:
      path: of the file; made with the first piece.
      settings: what all pieces depend on, as JSON.

    Raises:
      UserError: naming the file, if it is of other settings or damaged.
    """

    def __init__(self, path: str | os.PathLike, settings: Mapping[str, Any]):
        self.path = pathlib.Path(path)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._lines = [json.dumps({"settings": settings})]
        self._values: dict[str, Any] = {}
        if self.path.exists():
            self._read()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def add(self, key: str, value: Any) -> None:
        """Keeps a piece; it is in the file after this.

        Raises:
          ValueError: if the key is there already.
        """
        if key in self._values:
            raise ValueError(f"{key!r} is in {self.path} already")
        line = json.dumps({"key": key, "value": value})
        write_atomically(self.path, "\n".join([*self._lines, line]) + "\n")
        self._lines.append(line)
        self._values[key] = json.loads(line)["value"]

    def _read(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        try:
            held = json.loads(lines[0])["settings"]
            pieces = [(piece["key"], piece["value"]) for piece in map(json.loads, lines[1:])]
        except (IndexError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{self.path} is not what a run leaves behind: {error!r}") from None
        differing = [
            f"{name} is {_shown(held.get(name))}, not {_shown(self.settings.get(name))}"
            for name in dict.fromkeys((*held, *self.settings))
            if held.get(name) != self.settings.get(name)
        ]
        if differing:
            raise UserError(
                f"{self.path} is of other settings: {'; '.join(differing)}. Choose another folder, "
                "or delete it"
            )
        self._lines, self._values = lines, dict(pieces)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
