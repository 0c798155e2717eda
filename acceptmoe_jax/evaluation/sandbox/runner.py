"""The process between the caller and the judge: it isolates, keeps the time and cleans up.

    python -I -c ... < request   (see `run`)

The request and the verdict are JSON on stdin and stdout.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from acceptmoe_jax.evaluation.sandbox import confinement, judge, linux, namespaces

_JUDGE_MEMORY = 2 * 2**30  # bytes; it reads what the answer sends
_VERDICT_BYTES = 2**16


def main() -> None:
    """Reads a request, writes its verdict."""
    request = json.load(sys.stdin)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if request["level"] == confinement.NAMESPACES:
        namespaces.separate()
    else:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        _judge(request, writing)
    os.close(writing)
    try:
        text = _read(reading, time.monotonic() + request["wall_seconds"])
    finally:
        _kill(process)
    if text is None:
        verdict = {"passed": False, "reason": f"no end after {request['wall_seconds']} s"}
    elif not text:
        verdict = {"passed": False, "reason": "the judge was killed"}
    else:
        verdict = json.loads(text)
    json.dump(verdict, sys.stdout)


def _judge(request: Mapping[str, Any], writing: int) -> None:
    """Isolates this process, judges and ends it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # tests may print
        level, folder, package = request["level"], request["folder"], request["package"]
        user = namespaces.FIRST_USER + request["number"]
        if level == confinement.NAMESPACES:
            namespaces.enter_root(folder, package, user)
            user = None
        else:
            os.chdir(folder)
            user = user if confinement.hand_over(folder, user, package) else None
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the answer cannot look into its judge
        _limit(resource.RLIMIT_AS, _JUDGE_MEMORY)
        _limit(resource.RLIMIT_CPU, request["wall_seconds"] + 1)
        verdict = judge.judge(request, level, user)
    except BaseException as error:
        verdict = {"passed": False, "reason": f"the sandbox: {error!r}", "broken": True}
    os.write(writing, json.dumps(verdict).encode()[:_VERDICT_BYTES])
    os._exit(0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(kind, (value, value))
    except (ValueError, OSError):
        pass  # macOS does not limit the address space


def _read(reading: int, end: float) -> bytes | None:
    """All that is written until the pipe closes; None if that takes too long."""
    text = b""
    while select.select([reading], [], [], max(end - time.monotonic(), 0))[0]:
        part = os.read(reading, _VERDICT_BYTES)
        if not part:
            return text
        text += part
    return None


def _kill(process: int) -> None:
    """Kills a child and all its descendants, whatever session they moved to.

    In a process namespace they die with the first process. Elsewhere they become children of this
    one when their parents die, so that killing children ends when there are none.
    """
    os.kill(process, signal.SIGKILL)
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """The children of this process; none where there is no /proc, as on macOS."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found
