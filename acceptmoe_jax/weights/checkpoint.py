"""A model directory in Hugging Face format: found, opened and checked before anything is read."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import read_json
from acceptmoe_jax.weights.safetensors_io import SafetensorsFile, TensorEntry, unique_keys

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    INDEX_FILE,
]
# The same weights again in the vendors' own layouts (GPT-OSS).
_HUB_IGNORED = ["original/*", "metal/*"]


def resolve_directory(name: str) -> pathlib.Path:
    """The local directory of a model: `name` itself, or the download of the hub id `name`.

    Raises:
      UserError: if `name` is neither a directory nor a model that the hub gives us.
    """
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{name} is a file; a model is a directory with a config.json")
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED
            )
        )
    except HFValidationError:
        raise UserError(f"{name} is no directory (and cannot be the id of a hub model)") from None
    except (HfHubHTTPError, OSError) as error:  # unknown id, no access, no network
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{name} is no directory, and the hub does not give a model of that id: {reason}"
        ) from None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The config and the tensors (not yet read) of a model directory.

    Attributes:
      directory: where it lies.
      config: the parsed `config.json`.
      source: the file that lists the tensors (`model.safetensors` or the index), for messages.
      entries: dtype, shape, file and bytes of every tensor, by key.
    """

    directory: pathlib.Path
    config: Mapping[str, Any]
    source: pathlib.Path
    entries: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, directory: str | os.PathLike) -> "Checkpoint":
        """Reads the config, the index if the weights are sharded, and the headers of all files.

        Raises:
          UserError: naming file and key, if a file is missing or damaged, or if the index and the
            shards disagree on which tensor lies where.
        """
        directory = pathlib.Path(directory)
        config = read_json(directory / "config.json")
        if not isinstance(config, dict):
            raise UserError(f"{directory / 'config.json'} does not hold an object")
        single, index = directory / SINGLE_FILE, directory / INDEX_FILE
        if single.exists():
            return cls(directory, config, single, SafetensorsFile(single).entries)
        if index.exists():
            return cls(directory, config, index, _read_shards(index))
        raise UserError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")

    @property
    def config_file(self) -> str:
        """The name of the config's file, for messages."""
        return str(self.directory / "config.json")

    def read(self, key: str) -> np.ndarray:
        """One tensor in its own dtype; UserError if there is none of that key."""
        if key not in self.entries:
            raise UserError(f"{self.source} holds no tensor {key}")
        return self.entries[key].read()


def _read_shards(index: pathlib.Path) -> dict[str, TensorEntry]:
    weight_map = _read_weight_map(index)
    shards = {}
    for key, file in weight_map.items():
        if file not in shards:
            path = index.parent / file
            if not path.is_file():
                raise UserError(f"{index}: {key} should lie in {file}, which does not exist")
            shards[file] = SafetensorsFile(path)
    for key, file in weight_map.items():
        if key not in shards[file].entries:
            raise UserError(f"{index}: {key} should lie in {file}, which does not hold it")
    for file, shard in shards.items():
        for key in shard.entries:
            if weight_map.get(key) != file:
                raise UserError(f"{shard.path}: {key} is not listed for this file in {index.name}")
    return {key: shards[file].entries[key] for key, file in weight_map.items()}


def _read_weight_map(index: pathlib.Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except ValueError as error:
        raise UserError(f"{index} is not a valid index: {error}") from None
    match raw:
        case {"weight_map": {**weight_map}}:
            pass
        case _:
            raise UserError(f"{index} has no weight_map")
    for key, file in weight_map.items():
        # A bare name: an index must not reach outside its directory.
        if not isinstance(file, str) or pathlib.PurePath(file).name != file:
            raise UserError(f"{index}: {key} should name a file beside the index, not {file!r}")
    return weight_map
