"""The project's own files as tests of the house see them: sources, imports, requirements."""

import ast
import fnmatch
import pathlib
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("acceptmoe_jax", "experiments", "pallas_kernels", "tests")
# Distributions whose import name is not their own.
_DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint"}


def files(folder: str = ".") -> list[str]:
    """Every file under a folder that git does not ignore, relative to the root."""
    return sorted(str(path.relative_to(ROOT)) for path in _walk(ROOT / folder))


def _walk(folder: pathlib.Path):
    for path in folder.iterdir():
        if is_ignored(path.name):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def is_ignored(name: str) -> bool:
    """Whether git leaves out what has this name."""
    lines = (ROOT / ".gitignore").read_text().splitlines()
    patterns = [line.strip("/") for line in lines if line and not line.startswith("#")]
    return any(fnmatch.fnmatch(name, pattern) for pattern in [".git", *patterns])


def sources() -> list[str]:
    """Every Python file, relative to the root."""
    return [path for package in PACKAGES for path in files(package) if path.endswith(".py")]


def parsed(path: str) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse((ROOT / path).read_text(), path)


def imported(path: str) -> tuple[set[str], set[str]]:
    """The project files that a file imports, and the distributions (their canonical names).

    Raises:
      ImportError: if it imports a module of the project that does not exist.
    """
    own, others = set(), set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, member in names:
            top = module.split(".")[0]
            if top in PACKAGES:
                own.add(_file_of(module, member))
            elif top not in sys.stdlib_module_names:
                others.add(canonicalize_name(_DISTRIBUTIONS.get(top, top)))
    return own, others


def _file_of(module: str, member: str | None) -> str:
    """The file behind `import module`, or behind `from module import member`."""
    stem = module.replace(".", "/")
    candidates = [f"{stem}/{member}.py", f"{stem}/{member}/__init__.py"] if member else []
    for path in [*candidates, f"{stem}.py", f"{stem}/__init__.py"]:
        if (ROOT / path).is_file():
            return path
    raise ImportError(f"{module} does not exist")


def is_program(path: str) -> bool:
    """Whether the file does something when executed: it looks at `__name__` at its top level."""
    return any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        for node in parsed(path).body
    )


def requirement_lines(path: str) -> list[tuple[Requirement, str]]:
    """The requirements that a file lists, each with the comment beside it."""
    found = []
    for line in (ROOT / path).read_text().splitlines():
        text, _, comment = line.partition("#")
        if text.strip():
            found.append((Requirement(text.strip()), comment.strip()))
    return found


def required(path: str) -> set[str]:
    """The canonical names of the distributions that a file requires."""
    return {canonicalize_name(entry.name) for entry, _ in requirement_lines(path)}
