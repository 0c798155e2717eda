"""What every program of `experiments/` shares: how it ends, what it says it ran on, tables."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console
import rich.progress
import rich.table
from absl import app, logging

from acceptmoe_jax.errors import UserError

_VERSIONED = ("jax", "jaxlib", "flax", "numpy", "tokenizers")


def run_program(main: Callable[[], None]) -> None:
    """Parses flags and runs `main`; a user's mistake is one line on stderr and exit status 1."""

    def guarded(argv: Sequence[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # jax tells of every backend that is not there
        try:
            if len(argv) > 1:
                raise UserError(f"unexpected argument {argv[1]!r}; flags begin with --")
            main()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    app.run(guarded)


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
        speed_estimate_period=600,  # seconds; a single step may well take more than rich's 30
        disable=not sys.stderr.isatty(),
    )


def device_description() -> str:
    """The device that numbers were measured on, in words, such as "cpu: x86_64, 2 cores"."""
    import jax  # here, because programs without a model start faster without it

    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{device.platform}: {device.device_kind}"
    return f"cpu: {platform.machine()}, {_cpu_count()} cores"


def versions(*more: str) -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers, `more` among them."""
    packages = {name: importlib.metadata.version(name) for name in (*_VERSIONED, *more)}
    return {"python": platform.python_version()} | packages


def print_table(title: str, rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str]) -> None:
    """Prints a table of the keys in `formats`, each in its format; None shows as a dash.

    Args:
      title: says what the numbers are and what they were measured on.
      rows: one mapping a row.
      formats: key -> format specification such as ".1f" ("" for text).
    """
    # Where the output is no terminal, wide enough for every table here.
    width = None if sys.stdout.isatty() else 140
    console = rich.console.Console(width=width, highlight=False)
    table = rich.table.Table()
    for key, spec in formats.items():
        # Numbers have room to spare under their titles, and text has not.
        justify = "right" if spec else "left"
        table.add_column(key.replace("_", " "), justify=justify, no_wrap=not spec)
    for row in rows:
        table.add_row(*cells(row, formats))
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table)


def markdown_table(rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str]) -> str:
    """The table that `print_table` prints, in Markdown and without its title."""
    lines = [
        [key.replace("_", " ") for key in formats],
        ["---:" if spec else "---" for spec in formats.values()],
        *([cell.replace("|", r"\|") for cell in cells(row, formats)] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(row: Mapping[str, Any], formats: Mapping[str, str]) -> list[str]:
    """A row's cells as text, by `formats`; see `print_table`."""
    values = ((row[key], spec) for key, spec in formats.items())
    return ["-" if value is None else format(value, spec) for value, spec in values]


def with_interval(
    value: float | None,
    interval: Sequence[float] | None,
    decimals: int,
    scale: float = 1.0,
) -> str | None:
    """A number as text, with the ends of its interval if it has one: "1.25 [1.20, 1.31]".

    None stays None.
    """
    if value is None:
        return None
    text = f"{value * scale:.{decimals}f}"
    if interval is None:
        return text
    low, high = (f"{end * scale:.{decimals}f}" for end in interval)
    return f"{text} [{low}, {high}]"


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
