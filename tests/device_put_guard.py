"""Watches `jax.device_put`: one function moves experts to the device, another one pins them.

with device_put_guard.watch() as moved:
    ...                                     # any other caller in the package's runtime fails
assert moved.bytes == transfers.traffic.bytes
"""

import ast
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from unittest import mock

import jax

from tests import source_tree

# Who may not call it, and the functions there that may: (file, function).
GUARDED = ("acceptmoe_jax/offload/", "acceptmoe_jax/runtime/")
ALLOWED = {
    ("acceptmoe_jax/offload/transfers.py", "_to_device"),
    ("acceptmoe_jax/offload/host_store.py", "_pin"),
}
_JAX = str(pathlib.Path(jax.__file__).parent)


@dataclasses.dataclass
class Moved:
    """What went from pinned host memory to the device.

    Attributes:
      bytes: of all arrays.
      strangers: (file, function) of every call that was refused.
    """

    bytes: int = 0
    strangers: list[tuple[str, str]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watch() -> Iterator[Moved]:
    """Counts what is moved, and fails on any caller that is not allowed.

    Raises:
      AssertionError: in the caller, and once more at the end should somebody have caught that.
    """
    moved = Moved()
    put = jax.device_put

    def watched(arrays, device=None, **options):
        caller = _caller()
        if caller[0].startswith(GUARDED) and caller not in ALLOWED:
            moved.strangers.append(caller)
            raise AssertionError(f"{caller} moves arrays to the device")
        placed = put(arrays, device, **options)
        for before, after in zip(jax.tree.leaves(arrays), jax.tree.leaves(placed)):
            if (_memory(before), _memory(after)) == ("pinned_host", "device"):
                moved.bytes += before.nbytes
        return placed

    with mock.patch.object(jax, "device_put", watched):
        yield moved
    assert not moved.strangers


def mentions() -> set[tuple[str, str]]:
    """(file, function or class at the top level) of all guarded code that names `device_put`."""
    return {
        (path, getattr(part, "name", ""))
        for folder in GUARDED
        for path in source_tree.files(folder)
        for part in source_tree.parsed(path).body
        for node in ast.walk(part)
        if "device_put" in (getattr(node, name, None) for name in ("attr", "id", "name"))
    }


def _caller() -> tuple[str, str]:
    """The function outside jax and this file that called, its file relative to the project."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith((_JAX, __file__)):
        frame = frame.f_back
    path = pathlib.Path(frame.f_code.co_filename)
    if path.is_relative_to(source_tree.ROOT):
        path = path.relative_to(source_tree.ROOT)
    return str(path), frame.f_code.co_name


def _memory(array) -> str | None:
    return array.sharding.memory_kind if isinstance(array, jax.Array) else None
