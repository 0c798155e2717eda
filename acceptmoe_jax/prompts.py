"""Prompt files: a JSON object a line, with `prompt` or `messages`, and an optional `prompt_id`."""

import json
import os
import pathlib

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.runtime.engine import Prompt


def read_prompts(path: str | os.PathLike, flag: str) -> dict[str, Prompt]:
    """Reads a prompts file.

    Args:
      path: the file.
      flag: the flag that named it, for messages.

    Returns:
      Prompts by id, in the order of the file; a line without an id has its number from 0.

    Raises:
      UserError: naming the flag, or the file and line.
    """
    path = pathlib.Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag}: {path} cannot be read: {error}") from None
    prompts = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError:
            raise UserError(f"{where}: not valid JSON") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: not a JSON object")
        prompt = record.get("prompt", record.get("messages"))
        if not isinstance(prompt, str if "prompt" in record else list):
            raise UserError(f"{where}: neither a prompt (text) nor messages (a list)")
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise UserError(f"{where}: the prompt is empty")
        name = str(record.get("prompt_id", len(prompts)))
        if name in prompts:
            raise UserError(f"{where}: the prompt_id {name!r} stands there twice")
        prompts[name] = prompt
    if not prompts:
        raise UserError(f"{flag}: {path} holds no prompt")
    return prompts
