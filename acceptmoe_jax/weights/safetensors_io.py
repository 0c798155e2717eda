"""Safetensors files: a reader that knows every tensor's dtype and bytes, and an atomic writer.

Format: 8 bytes (little-endian length n), n bytes of JSON (`{name: {dtype, shape, data_offsets}}`),
then the data. One file may mix dtypes (bf16 weights with uint8 blocks or int64 tables), so each
tensor is read with its own.

The writer is the `safetensors` package. The reader is ours, because the package's numpy interface
hides the offsets, calls a truncated file "incomplete metadata" and a misshapen tensor "invalid
shape" without its name, takes a name listed twice, and cannot read 8-bit floats. Ours also reads
into a buffer that the caller owns: nothing stays mapped, so host memory is what was asked for, and
a row of a stacked array is filled in place.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_json

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}

_LENGTH_BYTES = 8
# The CPU backend adopts a host buffer of this alignment instead of copying it.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `shape` items of `dtype` in the bytes [begin, end) of `file`."""

    file: pathlib.Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def read(self) -> np.ndarray:
        """The tensor in a buffer of its own, in the file's dtype."""
        out = aligned_empty(self.shape, self.dtype)
        self.read_into(out)
        return out

    def read_into(self, out: np.ndarray) -> None:
        """Fills `out`, a contiguous array of this shape and dtype.

        Raises:
          UserError: if the file has become shorter since it was opened.
        """
        if out.shape != self.shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(f"{self.name} needs a contiguous {self.dtype} array of {self.shape}")
        target = memoryview(out.reshape(-1).view(np.uint8))
        with open(self.file, "rb", buffering=0) as stream:
            stream.seek(self.begin)
            while target:
                count = stream.readinto(target)
                if not count:
                    raise UserError(f"{self.file}: {self.name} ended before its last byte")
                target = target[count:]


class SafetensorsFile:
    """A checked safetensors file: `entries` by name (in file order) and the string `metadata`.

    Opening reads the header only.

    Raises:
      UserError: naming the file, and the tensor where there is one, if the file is missing,
        truncated or not in the format: a header that is no JSON, a name listed twice, a dtype that
        is not in `DTYPES`, offsets outside the data, holes or overlaps, or a shape that does not
        fill its bytes.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        header, data_begin, file_size = _read_header(self.path)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.entries: dict[str, TensorEntry] = {
            name: _parse_entry(self.path, name, raw, data_begin, file_size)
            for name, raw in header.items()
        }
        _check_coverage(self.path, self.entries.values(), data_begin, file_size)

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` in a buffer of its own; UserError if the file lacks it."""
        if name not in self.entries:
            raise UserError(f"{self.path} holds no tensor {name}")
        return self.entries[name].read()


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at an address that the CPU backend adopts without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + nbytes].view(dtype).reshape(shape)


def host_array(array: Any, dtype: np.dtype) -> np.ndarray:
    """A numpy or JAX array on the host, in `dtype`; copied only where it must be."""
    return np.asarray(array).astype(dtype, copy=False)


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json.loads` that refuses a repeated key with a ValueError."""
    result = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key} is listed twice")
        result[key] = value
    return result


def save_file(
    path: str | os.PathLike,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one safetensors file, whole or not at all; parent folders are made as needed.

    Args:
      path: of the file.
      tensors: arrays (numpy or JAX) of any dtypes in `DTYPES`, mixed freely.
      metadata: strings for the header; transformers expects `{"format": "pt"}`, the default.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The package writes memory as it lies: without C order a transposed array is scrambled.
    arrays = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # The package makes files that only their owner can read; `touch` keeps to the umask.
        temporary.touch()
        mode = temporary.stat().st_mode
        safetensors.numpy.save_file(arrays, temporary, metadata=dict(metadata or {"format": "pt"}))
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_sharded(
    directory: str | os.PathLike,
    tensors: Mapping[str, np.ndarray],
    max_shard_bytes: int | None = None,
) -> None:
    """Writes a model's weights the way the hub lays them out.

    One `model.safetensors` where everything fits in `max_shard_bytes` (None: no limit), else
    `model-00001-of-0000n.safetensors` and on, and `model.safetensors.index.json` last. Tensors
    keep their order; one larger than the limit gets a shard alone. Weight files of an earlier save
    that are no part of this one are removed at the end.
    """
    directory = pathlib.Path(directory)
    shards: list[dict[str, np.ndarray]] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or (max_shard_bytes is not None and tensor.nbytes > room):
            shards.append({})
            room = max_shard_bytes or 0
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        written = {"model.safetensors": shards[0]}
    else:
        written = {
            f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard
            for i, shard in enumerate(shards)
        }
    for file, shard in written.items():
        save_file(directory / file, shard)
    index = directory / "model.safetensors.index.json"
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: file for file, shard in written.items() for name in shard}
        write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})
    else:
        index.unlink(missing_ok=True)
    for stale in directory.glob("model*.safetensors"):
        if stale.name not in written:
            stale.unlink()


def _read_header(path: pathlib.Path) -> tuple[dict[str, Any], int, int]:
    """(parsed header, first byte of the data, size of the file)."""
    try:
        with open(path, "rb") as stream:
            file_size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(_LENGTH_BYTES)
            data_begin = _LENGTH_BYTES + int.from_bytes(prefix, "little")
            if len(prefix) < _LENGTH_BYTES or data_begin > file_size:
                raise UserError(f"{path} is truncated, or no safetensors file: no whole header")
            text = stream.read(data_begin - _LENGTH_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory, not a safetensors file") from None
    try:
        header = json.loads(text, object_pairs_hook=unique_keys)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are kinds of it
        raise UserError(f"{path} has a bad safetensors header: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise UserError(f"{path} has a bad safetensors header: not an object of tensors")
    return header, data_begin, file_size


def _parse_entry(
    path: pathlib.Path, name: str, raw: Any, data_begin: int, file_size: int
) -> TensorEntry:
    match raw:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
            type(size) is int and size >= 0 for size in shape
        ):
            pass
        case _:
            raise UserError(f"{path}: the header entry of {name} is malformed: {raw!r}")
    if code not in DTYPES:
        raise UserError(f"{path}: {name} has the dtype {code}, which is not supported")
    if not 0 <= begin <= end:
        raise UserError(f"{path}: {name} has the impossible offsets [{begin}, {end}]")
    expected = math.prod(shape) * DTYPES[code].itemsize
    if expected != end - begin:
        raise UserError(
            f"{path}: {name} holds {end - begin} bytes, but {code}{shape} takes {expected}"
        )
    if data_begin + end > file_size:
        raise UserError(
            f"{path} is truncated: {name} ends at byte {data_begin + end} of {file_size}"
        )
    return TensorEntry(path, name, DTYPES[code], tuple(shape), data_begin + begin, data_begin + end)


def _check_coverage(
    path: pathlib.Path, entries: Iterable[TensorEntry], data_begin: int, file_size: int
) -> None:
    position = data_begin
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            fault = "overlaps the tensor before it" if entry.begin < position else "follows a hole"
            raise UserError(f"{path}: {entry.name} {fault} (byte {entry.begin})")
        position = entry.end
    if position != file_size:
        raise UserError(f"{path} has {file_size - position} bytes after its last tensor")
