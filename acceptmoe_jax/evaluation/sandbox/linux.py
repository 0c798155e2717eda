"""The system calls of Linux that Python 3.11 has no function for."""

import ctypes
import errno
import os
import sys

# Numbers and flags of include/uapi/linux: sched.h, mount.h, prctl.h, landlock.h, fcntl.h.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
# The same on every architecture.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_LANDLOCK_VERSION = 1
_LANDLOCK_PATH_BENEATH = 1
# Landlock's rights by the version that brought them: what changes a file system; TCP; signals.
_WRITES = {1: 0x1FF2, 2: 0x2000, 3: 0x4000}
_TCP_VERSION, _TCP = 4, 3
_SCOPES_VERSION, _SCOPES = 6, 3

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, *arguments: object) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this is not Linux")
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def prctl(option: int, value: int) -> None:
    """prctl(2); does nothing elsewhere than on Linux. Raises OSError."""
    if sys.platform == "linux":
        zero = ctypes.c_ulong(0)
        _check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), "prctl")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this is not Linux")
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2). Raises OSError."""
    encoded_kind = kind and kind.encode()
    result = _libc.mount(
        source.encode(), target.encode(), encoded_kind, ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {target}")


def make_read_only(target: str) -> None:
    """Makes a mount and all below it read-only. Raises OSError."""
    read_only, nothing = MS_RDONLY | MS_NOSUID, 0
    attributes = (ctypes.c_uint64 * 4)(read_only, nothing, nothing, nothing)
    _syscall(
        _MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def landlock(writable: str) -> None:
    """Lets this process and its children change files below `writable` only, for good.

    Newer kernels also refuse TCP, and signals to other processes. Raises OSError where the kernel
    has no Landlock.
    """
    null = ctypes.c_void_p(None)
    version = _syscall(
        _LANDLOCK_CREATE, null, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION)
    )
    writes = sum(rights for since, rights in _WRITES.items() if since <= version)
    tcp = _TCP if version >= _TCP_VERSION else 0
    scopes = _SCOPES if version >= _SCOPES_VERSION else 0
    words = 3 if scopes else 2 if tcp else 1  # an older kernel knows a shorter structure
    handled = (ctypes.c_uint64 * words)(*(writes, tcp, scopes)[:words])
    size = ctypes.c_size_t(ctypes.sizeof(handled))
    rules = _syscall(_LANDLOCK_CREATE, handled, size, ctypes.c_uint32(0))
    folder = os.open(writable, os.O_PATH)
    beneath = ctypes.create_string_buffer(writes.to_bytes(8, sys.byteorder), 12)
    beneath[8:12] = folder.to_bytes(4, sys.byteorder)
    _syscall(
        _LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(_LANDLOCK_PATH_BENEATH), beneath,
        ctypes.c_uint32(0),
    )  # fmt: skip
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _syscall(_LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))
    os.close(folder)
    os.close(rules)
