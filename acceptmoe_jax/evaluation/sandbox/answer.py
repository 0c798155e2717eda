"""The process that holds the model's code: it loads it, and does what the judge asks of it.

Nothing that this process says is believed to be anything but the value of a call. It never sees
the tests, the values they expect, or where the verdict goes.
"""

import os
import sys
import types
from typing import Any

from acceptmoe_jax.evaluation.sandbox import confinement, wire

_OPERATIONS = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "item": lambda value, key: value[key],
    "in": lambda value, item: item in value,
}


class _Kept:
    """The objects that the judge knows by a handle."""

    def __init__(self):
        self._objects = []
        self._handles = {}  # by id: the list keeps every object alive

    def keep(self, value: Any) -> list:
        handle = self._handles.setdefault(id(value), len(self._objects))
        if handle == len(self._objects):
            self._objects.append(value)
        return ["handle", handle]

    def kept(self, _: str, handle: Any) -> Any:
        return self._objects[handle]


def main(channel: int, level: str, *limits: int) -> None:
    """Confines this process for good and then serves the judge.

    Args:
      channel: the file descriptor to the judge.
      level: of isolation; what namespaces do has been done.
      *limits: see `confinement.limit`.
    """
    confinement.limit(*limits)
    if level != confinement.NAMESPACES:
        confinement.restrict(os.getcwd())
    _serve(channel)


def _serve(channel: int) -> None:
    """Loads the first message's code and then answers operations until the judge is gone."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    kept = _Kept()
    while True:
        try:
            operation, *operands = wire.receive(channel)
        except wire.ClosedError:
            return
        try:
            if operation == "load":
                for code in operands:
                    exec(compile(code, "answer.py", "exec"), module.__dict__)
                value = None
            elif operation == "name":
                if operands[0] not in module.__dict__:
                    raise NameError(f"it defines no {operands[0]}")
                value = module.__dict__[operands[0]]
            else:
                arguments = [wire.decode(operand, kept.kept) for operand in operands]
                value = _OPERATIONS[operation](*arguments)
            reply = ["value", wire.encode(value, kept.keep)]
        except BaseException as error:
            reply = ["error", type(error).__name__, _text(error)]
        wire.send(channel, reply)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:
        return ""
