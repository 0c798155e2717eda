"""What every program of `experiments/` shares: how it ends, what it says it ran on, tables."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.progress
import rich.table
from absl import app

from acceptmoe_jax.errors import UserError

_VERSIONED = ("jax", "jaxlib", "flax", "numpy", "tokenizers")


def run_program(main: Callable[[], None]) -> None:
    """Parses flags and runs `main`; a user's mistake is one line on stderr and exit status 1."""

    def guarded(argv: Sequence[str]) -> None:
        try:
            if len(argv) > 1:
                raise UserError(f"unexpected argument {argv[1]!r}; flags begin with --")
            main()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    app.run(guarded)


def console() -> rich.console.Console:
    """The console for tables; wide enough for them where the output is no terminal."""
    wide = None if sys.stdout.isatty() else 140
    return rich.console.Console(width=wide, highlight=False)


def progress(*columns: str) -> rich.progress.Progress:
    """A progress bar with an estimate and further task fields; quiet where it would only clutter.

    Args:
      *columns: format strings over `task`, shown behind the bar.
    """
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        *(rich.progress.TextColumn(column) for column in columns),
        console=rich.console.Console(stderr=True),
        transient=True,
    )


def device_description() -> str:
    """The device that numbers were measured on, in words, such as "cpu: x86_64, 2 cores"."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{device.platform}: {device.device_kind}"
    return f"cpu: {platform.machine()}, {_cpu_count()} cores"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    packages = {name: importlib.metadata.version(name) for name in _VERSIONED}
    return {"python": platform.python_version()} | packages


def table(
    title: str, rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str]
) -> rich.table.Table:
    """A table of the keys in `formats`, each shown by its format; None shows as a dash.

    Args:
      title: says what the numbers are and what they were measured on.
      rows: one mapping a row.
      formats: key -> format specification such as ".1f" ("" for text).
    """
    shown = rich.table.Table(title=title, title_justify="left", title_style="bold")
    for key, spec in formats.items():
        shown.add_column(key.replace("_", " "), justify="right" if spec else "left")
    for row in rows:
        cells = (
            "-" if row[key] is None else format(row[key], spec) for key, spec in formats.items()
        )
        shown.add_row(*cells)
    return shown


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
