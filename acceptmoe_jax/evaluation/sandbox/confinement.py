"""What the process of an answer takes from itself before it loads the answer; for good."""

import os
import pathlib
import resource
import sys
import tempfile
from typing import Any

from acceptmoe_jax.evaluation.sandbox import linux

NAMESPACES = "namespaces"
LIMITS = "limits"

_FORBIDDEN = ("socket.", "subprocess.", "ctypes.", "os.exec", "os.posix_spawn", "os.spawn")
_FORBIDDEN += ("os.system", "os.kill", "pty.spawn")


def limit(cpu_seconds: int, memory: int, processes: int, file_size: int) -> None:
    """Sets hard limits for this process and its children.

    Args:
      cpu_seconds: of each process.
      memory: bytes of address space of each process.
      processes: of this user; the kernel does not count root's.
      file_size: bytes of each file that is written.
    """
    wanted = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            if sys.platform == "linux":
                raise  # macOS does not limit the address space


def hand_over(folder: str, user: int, package: str) -> bool:
    """Gives a folder to a user if this process is root and that user can read Python and `package`.

    Returns:
      Whether it did so, and the answer can run as that user.
    """
    if os.geteuid() != 0:
        return False
    needed = [pathlib.Path(path) for path in (sys.prefix, sys.base_prefix, sys.executable, package)]
    shown = {path for each in needed for path in (each.resolve(), *each.resolve().parents)}
    if any(path.stat().st_mode & 0o005 != 0o005 for path in shown) or not _can_become(user):
        return False
    os.chown(folder, user, user)
    return True


def _can_become(user: int) -> bool:
    """Whether this process may become a user and give files away; containers can forbid both."""
    child = os.fork()
    if child == 0:
        try:
            with tempfile.NamedTemporaryFile() as file:
                os.chown(file.name, user, user)
            become(user)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def become(user: int) -> None:
    """Becomes a user of no groups but its own, for good. Raises OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def restrict(folder: str) -> None:
    """Where there are no namespaces: no network, no other programs, writes only below `folder`.

    Writes are Landlock's matter where the kernel has it (Linux 5.13). The rest is an audit hook of
    Python's, which code cannot remove but machine code can avoid: less than a namespace.
    """
    try:
        linux.landlock(folder)
    except OSError:
        pass
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    sys.addaudithook(_refuse)


def _refuse(event: str, _: Any) -> None:
    if event.startswith(_FORBIDDEN):
        raise PermissionError(f"{event} is not allowed here")
