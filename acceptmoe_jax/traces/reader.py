"""Reads a trace one shard at a time: nothing but the index and headers before it is asked for."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from acceptmoe_jax import files
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.traces.format import (
    INDEX_FILE,
    TENSORS,
    VERSION,
    TraceSettings,
    Verifications,
)
from acceptmoe_jax.weights.safetensors_io import SafetensorsFile


@dataclasses.dataclass(frozen=True)
class Shard:
    """One request in the index; see `format`."""

    file: str
    prompt_id: str
    prompt_hash: str
    verifications: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """A recorded trace.

        trace = Trace.open("runs/trace")
        for prompt_id, verifications in trace.requests():
            ...

    Attributes:
      directory: where it lies.
      settings: what it was recorded with.
      shards: its requests, in the order in which they were decoded.
    """

    directory: pathlib.Path
    settings: TraceSettings
    shards: tuple[Shard, ...]

    @classmethod
    def open(cls, directory: str | os.PathLike) -> "Trace":
        """Reads the index, and checks the header of every shard against it.

        Raises:
          UserError: naming the file that is missing, truncated or not what the index says.
        """
        directory = pathlib.Path(directory)
        path = directory / INDEX_FILE
        raw = files.read_json(path)
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            found = raw.get("version") if isinstance(raw, dict) else None
            raise UserError(f"{path} is no trace of version {VERSION} (found {found!r})")
        settings = TraceSettings.from_json(raw.get("settings"), path)
        trace = cls(directory, settings, tuple(_shards(raw.get("shards"), path)))
        for shard in trace.shards:
            trace._file(shard)
        return trace

    @property
    def verifications(self) -> int:
        """Of all requests."""
        return sum(shard.verifications for shard in self.shards)

    def read(self, shard: Shard) -> Verifications:
        """All tensors of a request.

        Raises:
          UserError: naming the file, if it is missing, truncated or not what the index says.
        """
        file = self._file(shard)
        return Verifications(**{name: file.read(name) for name in TENSORS})

    def requests(self) -> Iterator[tuple[str, Verifications]]:
        """Every request's id and tensors, read when it is its turn."""
        for shard in self.shards:
            yield shard.prompt_id, self.read(shard)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor of all requests, one after the other along N, without reading the others."""
        parts = [self._file(shard).read(name) for shard in self.shards]
        empty = np.zeros(self.settings.shape(name, 0), TENSORS[name][1])
        return np.concatenate([empty, *parts])

    def _file(self, shard: Shard) -> SafetensorsFile:
        path = self.directory / shard.file
        file = SafetensorsFile(path)
        if file.metadata.get("prompt_id") != shard.prompt_id:
            raise UserError(
                f"{path} is of the prompt {file.metadata.get('prompt_id')!r}, but "
                f"{INDEX_FILE} says {shard.prompt_id!r}"
            )
        for name, (_, dtype) in TENSORS.items():
            if name not in file.entries:
                raise UserError(f"{path} holds no tensor {name}")
            entry, shape = file.entries[name], self.settings.shape(name, shard.verifications)
            if (entry.dtype, entry.shape) != (dtype, shape):
                raise UserError(
                    f"{path}: {name} is {entry.dtype}{list(entry.shape)}, but {INDEX_FILE} says "
                    f"{dtype}{list(shape)}"
                )
        return file


def _shards(raw: Any, path: pathlib.Path) -> Iterator[Shard]:
    if not isinstance(raw, list):
        raise UserError(f"{path} must hold a list of shards")
    for entry in raw:
        match entry:
            case {
                "file": str(file),
                "prompt_id": str(prompt_id),
                "prompt_hash": str(prompt_hash),
                "verifications": int(verifications),
            }:
                yield Shard(file, prompt_id, prompt_hash, verifications)
            case _:
                raise UserError(f"{path} has a malformed shard entry: {entry!r}")
