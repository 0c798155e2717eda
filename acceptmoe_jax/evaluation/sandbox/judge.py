"""The process that holds the tests. What they call runs in the process of the answer.

A test gets values and compares them here, so an answer passes by returning the right values and in
no other way: it cannot end the tests early, patch what they compare with, or write the verdict.
"""

import builtins
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from acceptmoe_jax.evaluation.sandbox import wire


class AnswerError(Exception):
    """The answer raised what no built-in exception stands for."""


class AnswerEnded(BaseException):
    """The answer's process is gone; no test may catch this."""


class _Answer:
    """The other process."""

    def __init__(self, channel: int):
        self._channel = channel
        self._remotes = {}

    def load(self, *codes: str) -> None:
        self._exchange(["load", *codes])

    def named(self, name: str) -> Any:
        return self._exchange(["name", name])

    def ask(self, operation: str, *operands: Any) -> Any:
        return self._exchange([operation, *(wire.encode(operand, _handle) for operand in operands)])

    def _exchange(self, message: list) -> Any:
        try:
            wire.send(self._channel, message)
            kind, *content = wire.receive(self._channel)
            if kind == "value":
                return wire.decode(content[0], self._remote)
            name, text = content
            name, text = str(name), str(text)
        except (wire.ClosedError, TypeError, ValueError, IndexError):
            raise AnswerEnded("the answer's process ended") from None
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, Exception):
            try:
                error = known(text)
            except TypeError:  # UnicodeError's kinds want more
                error = AnswerError(f"{name}: {text}")
            raise error
        raise AnswerError(f"{name}: {text}")

    def _remote(self, name: str, handle: Any) -> "Remote":
        if name != "handle" or not isinstance(handle, int):
            raise wire.ClosedError("a value that is none")
        return self._remotes.setdefault(handle, Remote(self, handle))


class Remote:
    """An object that lives in the answer's process: a function, an instance, an iterator.

    It equals itself only, whatever its own `__eq__` would say.
    """

    __slots__ = ("_answer", "_number")

    def __init__(self, answer: _Answer, number: int):
        object.__setattr__(self, "_answer", answer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._answer.ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._answer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._answer.ask("set", self, name, value)

    def __iter__(self) -> Any:
        iterator = self._answer.ask("iter", self)
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __next__(self) -> Any:
        return self._answer.ask("next", self)

    def __len__(self) -> int:
        return self._answer.ask("len", self)

    def __bool__(self) -> bool:
        return self._answer.ask("bool", self)

    def __getitem__(self, key: Any) -> Any:
        return self._answer.ask("item", self, key)

    def __contains__(self, item: Any) -> bool:
        return self._answer.ask("in", self, item)


def _handle(value: Any) -> list:
    if isinstance(value, Remote):
        return ["handle", value._number]
    raise TypeError(f"a test hands over a {type(value).__name__}, which cannot travel")


def judge(request: Mapping[str, Any], level: str, user: int | None = None) -> dict[str, Any]:
    """Runs the tests of a request against its answer.

    Args:
      request: a `run.Program` and more, see `run`.
      level: of isolation; what namespaces do has been done.
      user: whom the answer runs as; None for whom this process does.

    Returns:
      `passed`, and `reason`: empty, or why not in a few words.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-c", _PROGRAM, request["package_parent"]]
    command += [str(theirs.fileno()), level, *map(str, request["limits"])]
    user = {} if user is None else {"user": user, "group": user, "extra_groups": ()}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        **user,
    )
    theirs.close()
    try:
        return _verdict(request, _Answer(ours.fileno()))
    except AnswerEnded as error:
        return {"passed": False, "reason": f"{error}{_ending(process)}"}
    finally:
        ours.close()
        process.kill()
        process.wait()


def _ending(process: subprocess.Popen) -> str:
    try:
        status = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return ""
    return f" with status {status}" if status >= 0 else f" by {signal.Signals(-status).name}"


# -I leaves the working directory off the path, so the package's place is an argument.
_PROGRAM = """\
import sys
package, channel, level, *limits = sys.argv[1:]
sys.path.insert(0, package)
from acceptmoe_jax.evaluation.sandbox import answer
answer.main(int(channel), level, *map(int, limits))
"""


def _verdict(request: Mapping[str, Any], answer: _Answer) -> dict[str, Any]:
    namespace = {"__name__": "tests"}
    stage = "the set-up"
    try:
        exec(compile(request["setup"], "setup.py", "exec"), namespace)
        exec(compile(request["reference"], "reference.py", "exec"), namespace)
        stage = "the answer"
        answer.load(request["setup"], request["answer"])
        for name in request["names"]:
            namespace[name] = answer.named(name)
        for number, test in enumerate(request["tests"], start=1):
            stage = f"test {number} of {len(request['tests'])}"
            exec(compile(test, f"test_{number}.py", "exec"), namespace)
    except AnswerEnded as error:
        raise AnswerEnded(f"{stage}: {error}") from None
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        name = "" if isinstance(error, AnswerError) else type(error).__name__
        return {"passed": False, "reason": f"{stage}: {': '.join(filter(None, (name, text)))}"}
    return {"passed": True, "reason": ""}
