"""Writes a trace request by request, and continues one that was interrupted."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from acceptmoe_jax import files
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.runtime.verification import Verification
from acceptmoe_jax.traces.format import (
    INDEX_FILE,
    TENSORS,
    VERSION,
    TraceSettings,
    prompt_hash,
    shard_name,
)
from acceptmoe_jax.traces.reader import Shard, Trace
from acceptmoe_jax.weights.safetensors_io import save_file


class TraceWriter:
    """Adds requests to the trace of a folder, which is made or continued.

    Args:
      directory: of the trace.
      settings: of the run.

    Raises:
      UserError: if the folder holds a trace of other settings, naming them, or a damaged one.
    """

    def __init__(self, directory: str | os.PathLike, settings: TraceSettings):
        self.directory = pathlib.Path(directory)
        self.settings = settings
        self._shards: dict[str, Shard] = {}
        if (self.directory / INDEX_FILE).exists():
            trace = Trace.open(self.directory)
            differing = trace.settings.differences(settings)
            if differing:
                raise UserError(
                    f"{self.directory} holds a trace of other settings: {'; '.join(differing)}"
                )
            self._shards = {shard.prompt_id: shard for shard in trace.shards}
        else:
            self._write_index()

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._shards)

    def holds(self, prompt_id: str, token_ids: Sequence[int]) -> bool:
        """Whether a request has been recorded.

        Args:
          prompt_id: of the request.
          token_ids: of its prompt.

        Raises:
          UserError: if the id was recorded with another prompt.
        """
        shard = self._shards.get(prompt_id)
        if shard is not None and shard.prompt_hash != prompt_hash(token_ids):
            raise UserError(f"{self.directory} holds another prompt with the id {prompt_id!r}")
        return shard is not None

    def add(
        self, prompt_id: str, token_ids: Sequence[int], verifications: Sequence[Verification]
    ) -> None:
        """Writes a request that is not held yet; it is there whole after this, or not at all.

        Args:
          prompt_id: of the request.
          token_ids: of its prompt.
          verifications: recorded ones, in order; perhaps none.

        Raises:
          ValueError: if the id is held already, or a shape is not that of the settings.
        """
        if prompt_id in self._shards:
            raise ValueError(f"{prompt_id!r} has been recorded already")
        stacked = self.settings.stack(verifications)
        file = shard_name(len(self._shards))
        save_file(
            self.directory / file,
            {name: getattr(stacked, name) for name in TENSORS},
            {"prompt_id": prompt_id},
        )
        self._shards[prompt_id] = Shard(file, prompt_id, prompt_hash(token_ids), len(verifications))
        self._write_index()

    def _write_index(self) -> None:
        index = {
            "version": VERSION,
            "settings": dataclasses.asdict(self.settings),
            "shards": [dataclasses.asdict(shard) for shard in self._shards.values()],
        }
        files.write_json(self.directory / INDEX_FILE, index)
