"""Records of benchmarks: from local files in their published formats, or from the hub."""

import dataclasses
import gzip
import importlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from acceptmoe_jax.errors import UserError

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the records of one split lie.

    Attributes:
      folder: of the data directory.
      files: names in that folder, of which the first that exists is read.
      parquet: patterns of the hub's Parquet files in the folder, of which the first that any file
        matches is read, all its files in order.
      hub: repository, configuration and splits of the hub.
      fields: what every record has.
    """

    folder: str
    files: tuple[str, ...]
    parquet: tuple[str, ...]
    hub: tuple[str, str | None, str]
    fields: tuple[str, ...]

    def records(self, data_dir: str | os.PathLike | None) -> list[Fields]:
        """Reads the records: of `data_dir`, or of the hub if that is None.

        Raises:
          UserError: if they are not there or are not what they should be.
        """
        if data_dir is None:
            records, where = _from_hub(*self.hub), f"the hub's {self.hub[0]}"
        else:
            paths = self._paths(pathlib.Path(data_dir) / self.folder)
            records = [record for path in paths for record in read_records(path)]
            where = ", ".join(map(str, paths))
        for number, record in enumerate(records):
            for field in self.fields:
                if field not in record:
                    raise UserError(f"{where}: record {number} has no {field!r}")
        if not records:
            raise UserError(f"{where}: no records")
        return records

    def _paths(self, folder: pathlib.Path) -> Sequence[pathlib.Path]:
        for name in self.files:
            if (folder / name).is_file():
                return [folder / name]
        for pattern in self.parquet:
            if found := sorted(folder.glob(pattern)):
                return found
        raise UserError(f"--data_dir: {folder} holds neither {self.files[0]} nor {self.parquet[0]}")


def read_records(path: str | os.PathLike) -> list[Fields]:
    """Reads JSON Lines, a JSON list (both with .gz as well) or Parquet, told by the file's name.

    Raises:
      UserError: naming the file, and the line if there is one.
    """
    path = pathlib.Path(path)
    suffixes = path.suffixes
    if suffixes[-1:] == [".parquet"]:
        return _read_parquet(path)
    zipped = suffixes[-1:] == [".gz"]
    try:
        with (gzip.open if zipped else open)(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if ".json" in suffixes:
        records = _parse(text, str(path))
        if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
            raise UserError(f"{path}: not a list of JSON objects")
        return records
    return [record for _, record in numbered_records(text, path)]


def numbered_records(text: str, path: str | os.PathLike) -> list[tuple[int, Fields]]:
    """The JSON objects of JSON Lines with their line numbers from 1; empty lines are left out.

    Raises:
      UserError: naming the file and the line.
    """
    found = []
    for number, line in enumerate(text.split("\n"), start=1):  # other line breaks may be in strings
        if line.strip():
            where = f"{path}, line {number}"
            record = _parse(line, where)
            if not isinstance(record, dict):
                raise UserError(f"{where}: not a JSON object")
            found.append((number, record))
    return found


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not valid JSON") from None


def _read_parquet(path: pathlib.Path) -> list[Fields]:
    parquet = _optional("pyarrow.parquet", f"{path}: to read Parquet, pip install pyarrow")
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise UserError(f"{path} cannot be read: {error}") from None


def _from_hub(repository: str, configuration: str | None, splits: str) -> list[Fields]:
    hub = _optional("datasets", "give --data_dir, or pip install datasets to read from the hub")
    try:
        return list(hub.load_dataset(repository, configuration, split=splits))
    except Exception as error:  # a library of many layers: network, cache, formats
        raise UserError(f"{repository} cannot be loaded from the hub: {error}") from None


def _optional(module: str, advice: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(advice) from None
