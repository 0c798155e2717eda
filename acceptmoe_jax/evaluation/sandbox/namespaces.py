"""A root of our own: no network, no other processes, a read-only system and an empty folder."""

import os
import pathlib
import sys

from acceptmoe_jax.evaluation.sandbox import confinement, linux

# What a Python program needs of the system; not /home, /root, /var, /tmp or /run.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
WRITABLE = "/answer"  # not /tmp: Python or this package may lie below that
_WRITABLE_BYTES = 64 * 2**20
FIRST_USER = 1 << 30  # users that own nothing, each with its own count of processes
_INNER_USER = 1000


def separate() -> None:
    """Moves this process, and by the process table its children, into namespaces of their own.

    Root needs no user namespace; others need one, which some systems and most containers forbid.

    Raises:
      OSError: where it is forbidden.
    """
    user, group = os.geteuid(), os.getegid()
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET
    flags |= linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    if user == 0:
        linux.unshare(flags)
        return
    linux.unshare(flags | linux.CLONE_NEWUSER)
    pathlib.Path("/proc/self/setgroups").write_text("deny")
    pathlib.Path("/proc/self/uid_map").write_text(f"{_INNER_USER} {user} 1")
    pathlib.Path("/proc/self/gid_map").write_text(f"{_INNER_USER} {group} 1")


def enter_root(folder: str, package: str, user: int) -> None:
    """Makes `folder` the root of this process, the first in its process namespace, and drops root.

    Args:
      folder: an empty folder; what is mounted on it is seen by this process alone.
      package: the folder of acceptmoe_jax.
      user: whom root becomes; another in every sandbox, so that its processes are counted apart.

    Raises:
      OSError: where a mount is forbidden.
    """
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    for path in _shown(package):
        _show(folder, path)
    for path in _DEVICES:
        inside = pathlib.Path(folder + path)
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.touch()
        linux.mount(path, str(inside), None, linux.MS_BIND)
    for path in ("/proc", WRITABLE):
        os.makedirs(folder + path)
    linux.mount("proc", f"{folder}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV)
    linux.make_read_only(folder)
    options = f"size={_WRITABLE_BYTES},mode=1777"
    linux.mount("tmpfs", folder + WRITABLE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    os.chroot(folder)
    os.chdir(WRITABLE)
    if os.geteuid() == 0:
        confinement.become(user)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def _shown(package: str) -> list[str]:
    """Folders to show, outer ones before inner ones, without those that lie in another."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, package}
    link = sys.executable
    while os.path.islink(link):  # of an environment, to the interpreter that it was made with
        link = os.path.join(os.path.dirname(link), os.readlink(link))
        python.add(os.path.dirname(link))
    paths = {path for path in _SYSTEM if os.path.exists(path)}
    paths |= {change(path) for path in python for change in (os.path.abspath, os.path.realpath)}
    return [
        path
        for path in sorted(paths)
        if not any(path != outer and path.startswith(f"{outer}/") for outer in paths)
    ]


def _show(folder: str, path: str) -> None:
    inside = pathlib.Path(folder + path)
    if os.path.islink(path):
        inside.symlink_to(os.readlink(path))
        return
    inside.mkdir(parents=True, exist_ok=True)
    linux.mount(path, str(inside), None, linux.MS_BIND | linux.MS_REC)
