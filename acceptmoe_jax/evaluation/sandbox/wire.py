"""What judge and answer say to each other: JSON messages of plain values over a socket.

The judge must be able to read whatever an answer sends, so nothing here can name a class to make or
code to run. What is no plain value stays where it is and travels as a handle.
"""

import builtins
import decimal
import fractions
import json
import numbers
import os
from collections.abc import Callable
from typing import Any

MESSAGE_LIMIT = 16 * 2**20  # bytes; an answer could fill the judge's memory
_EXACT_IN_JSON = 2**53
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_TEXTS = {"complex": complex, "decimal": decimal.Decimal, "fraction": fractions.Fraction}


class ClosedError(Exception):
    """The other side is gone, or what it sent is no message."""


def send(channel: int, message: Any) -> None:
    """Writes one message to a file descriptor; raises `ClosedError` if nobody reads."""
    data = json.dumps(message).encode()
    data = len(data).to_bytes(4, "big") + data
    try:
        while data:
            data = data[os.write(channel, data) :]
    except OSError:
        raise ClosedError("the other side is gone") from None


def receive(channel: int) -> Any:
    """Reads one message; raises `ClosedError` at the end of the file or on anything else."""
    size = int.from_bytes(_read(channel, 4), "big")
    if size > MESSAGE_LIMIT:
        raise ClosedError(f"a message of {size} bytes")
    try:
        return json.loads(_read(channel, size))
    except (ValueError, RecursionError):
        raise ClosedError("a message that is no JSON") from None


def _read(channel: int, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = os.read(channel, size)
        except OSError:
            part = b""
        if not part:
            raise ClosedError("the other side is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def encode(value: Any, keep: Callable[[Any], list]) -> Any:
    """A plain value as JSON; subclasses travel as their base, a Counter as a dict.

    Args:
      value: anything.
      keep: called with what is no plain value; returns the two items that stand for it.
    """
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if abs(number) < _EXACT_IN_JSON else ["int", hex(number)]
    if isinstance(value, float):
        return float(value)
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [encode(item, keep) for item in value]]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return ["dict", [[encode(key, keep), encode(item, keep)] for key, item in pairs]]
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, value.hex()]
    for name, kind in _TEXTS.items():
        if isinstance(value, kind):
            return [name, str(value)]
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), keep)
    if isinstance(value, type) and vars(builtins).get(value.__name__) is value:
        return ["type", value.__name__]
    return keep(value)


def decode(data: Any, kept: Callable[[str, Any], Any]) -> Any:
    """The value that `encode` was given.

    Args:
      data: parsed JSON from anyone.
      kept: called with the items that `keep` returned.

    Raises:
      ClosedError: if the data is not what `encode` makes.
    """
    if not isinstance(data, (list, dict)):
        return data
    try:
        name, content = data
        if name in _CONTAINERS:
            return _CONTAINERS[name](decode(item, kept) for item in content)
        if name == "dict":
            return {decode(key, kept): decode(item, kept) for key, item in content}
        if name == "int":
            return int(content, 16)
        if name in ("bytes", "bytearray"):
            return (bytes if name == "bytes" else bytearray).fromhex(content)
        if name in _TEXTS:
            return _TEXTS[name](content)
        if name == "type" and isinstance(getattr(builtins, content, None), type):
            return getattr(builtins, content)
    except (TypeError, ValueError, ArithmeticError, RecursionError):
        raise ClosedError("a value that is none") from None
    return kept(name, content)
