"""Judges an answer in a sandbox: whether code that a model wrote passes its tests.

Of the three processes (see the package) only the last holds the model's code, and it is told
neither the tests nor the values that they expect. What it gets:

- where namespaces are permitted (`isolation` says so): no network, no other process in sight, a
  read-only view of system and Python alone, and an empty 64 MiB folder; with the judge dies every
  process that it left behind;
- elsewhere (many containers, macOS): the limits below, and on Linux 5.13 and newer Landlock, so
  that it can write to its empty temporary directory only. Sockets, signals and other programs are
  refused by an audit hook of Python's, which machine code can avoid. It can read what the caller
  can, and only Linux finds processes that left their session;
- always: limits on time, address space, processes and file sizes, and an empty environment. The
  kernel does not count root's processes, so root runs answers as a user that owns nothing, if
  such a user can read this Python (without namespaces it may not).

Time and memory are limited, not hidden: an answer can tell that it is being tested. Tests cannot
hand functions or other objects of their own to an answer, and do not see what it does to its
arguments.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from acceptmoe_jax.evaluation.sandbox import confinement, namespaces

_PACKAGE = pathlib.Path(__file__).parents[2]
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
_ENVIRONMENT |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
_GRACE_SECONDS = 15  # beyond the wall-clock limit, which the runner keeps
_numbers = itertools.count()
_PROGRAM = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
from acceptmoe_jax.evaluation.sandbox import runner
runner.main()
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one answer may use: seconds and bytes, of the answer's process and of each child."""

    cpu_seconds: int = 15
    wall_seconds: int = 60
    memory: int = 2**30
    processes: int = 32
    file_size: int = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Program:
    """An answer and its tests.

    Attributes:
      answer: the code that a model wrote.
      names: what the tests take from it.
      tests: statements that raise if the answer is wrong.
      setup: runs first, on both sides.
      reference: trusted code that the tests may use; `names` hide its own.
    """

    answer: str
    names: tuple[str, ...]
    tests: tuple[str, ...]
    setup: str = ""
    reference: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether all tests ran and passed, and if not why."""

    passed: bool
    reason: str


def run(program: Program, limits: Limits = Limits()) -> Verdict:
    """Runs the tests of a program; several threads may do so at once.

    Raises:
      RuntimeError: if there is no sandbox to be had, which is never the answer's doing.
    """
    return _run(program, limits, isolation())


@functools.cache
def isolation() -> str:
    """The level of isolation that this machine permits: "namespaces" or "limits"."""
    try:
        works = _run(Program("", (), ()), Limits(), confinement.NAMESPACES).passed
    except RuntimeError:
        works = False
    return confinement.NAMESPACES if works else confinement.LIMITS


def _run(program: Program, limits: Limits, level: str) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        request = dataclasses.asdict(program) | {
            "level": level,
            "folder": folder,
            "package": str(_PACKAGE),
            "number": os.getpid() * 64 % 2**24 + next(_numbers) % 64,
            "package_parent": str(_PACKAGE.parent),
            "wall_seconds": limits.wall_seconds,
            "limits": [limits.cpu_seconds, limits.memory, limits.processes, limits.file_size],
        }
        inside = namespaces.WRITABLE if level == confinement.NAMESPACES else folder
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _PROGRAM, str(_PACKAGE.parent)],
                input=json.dumps(request).encode(),
                capture_output=True,
                env=_ENVIRONMENT | dict.fromkeys(("HOME", "TMPDIR"), inside),
                start_new_session=True,
                timeout=limits.wall_seconds + _GRACE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return Verdict(False, "no end, and it could not be ended in time")
    try:
        verdict = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"the sandbox failed: {done.stderr.decode()[-1000:]}") from None
    if verdict.get("broken"):
        raise RuntimeError(verdict["reason"])
    return Verdict(verdict["passed"], verdict["reason"])
