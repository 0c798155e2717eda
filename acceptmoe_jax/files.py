"""Small files that appear whole or not at all."""

import json
import os
import pathlib
from typing import Any

from acceptmoe_jax.errors import UserError


def write_atomically(path: str | os.PathLike, data: bytes | str) -> None:
    """Writes `data` to `path` through a temporary file in the same folder.

    A reader sees the old file or the new one, never a part; parent folders are made as needed.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file.

    Raises:
      UserError: if the file is missing or does not hold JSON; the message names it.
    """
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
