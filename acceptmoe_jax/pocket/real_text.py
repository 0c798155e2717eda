"""Real text for variety: the Python standard library, and GSM8K's training split where given."""

import itertools
import json
import os
import pathlib
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator

from acceptmoe_jax.errors import UserError

CHUNK_CHARACTERS = 300


def chunks(pieces: Iterable[str], limit: int = CHUNK_CHARACTERS) -> list[str]:
    """Joins consecutive pieces (lines, sentences) into runs of at most `limit` characters.

    Longer pieces are dropped; a run is stripped of the blanks at its end.
    """
    runs, current = [], ""
    for piece in pieces:
        if len(piece) > limit:
            continue
        if len(current) + len(piece) > limit:
            runs.append(current)
            current = ""
        current += piece
    runs.append(current)
    return [run.rstrip() for run in runs if run.strip()]


def standard_library_chunks() -> list[str]:
    """Chunks of the running interpreter's top-level modules, in the order of their names."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return [
        chunk
        for path in sorted(folder.glob("*.py"))
        for chunk in chunks(path.read_text(encoding="utf-8").splitlines(keepends=True))
    ]


def gsm8k_chunks(path: str | os.PathLike) -> list[str]:
    """Questions with their answers from GSM8K's jsonl, calculator marks (`<<...>>`) removed.

    Raises:
      UserError: if the file is missing or a line is no JSON object with question and answer.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    runs = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            text = f"{entry['question']}\n{entry['answer']}"
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(
                f"{path}, line {number}: no JSON object with question and answer"
            ) from None
        sentences = re.split(r"(?<=[.?!] )|(?<=\n)", re.sub(r"<<.*?>>", "", text))
        runs += chunks(sentences)
    return runs


def stream(seed: int, gsm8k_train: str | os.PathLike | None = None) -> Iterator[str]:
    """Endless chunks in random order, without repetition until a source is used up.

    Where GSM8K is given, it and the standard library take turns.
    """
    rng = random.Random(f"real text/{seed}")
    sources = [standard_library_chunks()]
    if gsm8k_train is not None:
        sources.append(gsm8k_chunks(gsm8k_train))
    return itertools.chain.from_iterable(zip(*(_shuffled(rng, source) for source in sources)))


def _shuffled(rng: random.Random, items: list[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(items, len(items))
