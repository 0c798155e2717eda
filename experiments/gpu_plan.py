"""How `experiments.gpu_check` measures: in items, a section at a time, each in its own process.

A kernel that was never on hardware may take its process down with it, or hang. So each section
runs in a process of its own, which is ended when its time is up and whose rows are kept until
then; the parent never touches the device, and a device's memory is free again for the next one.
"""

import dataclasses
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from acceptmoe_jax import reporting
from pallas_kernels.implementations import Implementations
from pallas_kernels.measure import one_line

Row = dict[str, Any]

ROOT = pathlib.Path(__file__).parents[1]
POCKETS = ("pocket-qwen3-moe", "pocket-gpt-oss")


def pocket_pair(name: str) -> tuple[str, str]:
    """Where a pocket target and its head lie."""
    target = ROOT / "checkpoints" / name
    return str(target), f"{target}-eagle3"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured, and how thoroughly.

    Attributes:
      rehearsal: small shapes on the CPU, kernels in interpret mode: the numbers mean nothing.
      kernels: what runs beside plain XLA, by name.
      rounds: of each timing.
      sizes: numbers of used experts.
      cached: positions before a verification's tree.
      prompts, new_tokens: of each pocket model.
    """

    rehearsal: bool
    kernels: Mapping[str, Implementations]
    rounds: int
    sizes: tuple[int, ...]
    cached: int
    prompts: int
    new_tokens: int

    @property
    def kernels_of_models(self) -> tuple[str, ...]:
        """Those that whole models run with; interpreting a model's Mosaic kernels takes minutes."""
        return tuple(self.kernels)[: 1 if self.rehearsal else None]


@dataclasses.dataclass(frozen=True)
class Item:
    """A part of a section: what its rows have in common, and what makes them."""

    labels: Row
    measure: Callable[[], list[Row]]


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of the report.

    Attributes:
      name: in summary.json.
      title: of the table.
      items: makes the items of a plan, one after the other, in the section's process.
      columns: of the table, as `reporting.print_table` takes them.
      seconds: kept for it; it may take longer if those before it took less.
    """

    name: str
    title: str
    items: Callable[[Plan], Iterator[Item]]
    columns: Mapping[str, str]
    seconds: float


@dataclasses.dataclass
class Outcome:
    """What came of a section.

    Attributes:
      status: "done", "failed" (see `error`), "out of time" or "not run".
      rows: those of a failed item have an `error`.
      device: as the section's process saw it; None if it did not come so far.
    """

    status: str = "not run"
    seconds: float = 0.0
    error: str | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    device: dict[str, str] | None = None


def run_section(
    section: Section,
    plan: Plan,
    seconds: float,
    on_device: Callable[[Mapping[str, str]], None],
    on_item: Callable[[str], None],
) -> Outcome:
    """Runs a section in a process of its own, for so many seconds at most.

    Args:
      on_device: called with the `platform` and `description` of its device; what it raises ends
        the section.
      on_item: called with a name when an item begins.
    """
    outcome = Outcome()
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(section, plan, sender))
    process.start()
    sender.close()
    try:
        while outcome.status == "not run":
            left = begin + seconds - time.monotonic()
            if not receiver.poll(max(left, 0)):
                outcome.status = "out of time"
                break
            kind, value = receiver.recv()
            if kind == "device":
                outcome.device = value
                on_device(value)
            elif kind == "item":
                on_item(value)
            elif kind == "rows":
                outcome.rows += value
            else:
                outcome.status, outcome.error = kind, value
    except EOFError:
        process.join()
        outcome.status, outcome.error = "failed", f"its process ended with {process.exitcode}"
    finally:
        _end(process)
    outcome.seconds = time.monotonic() - begin
    return outcome


def _work(section: Section, plan: Plan, sender) -> None:
    """In the section's process: sends what is measured, as it is measured."""
    os.setpgid(0, 0)  # with the programs that it starts, to be ended together
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        device = jax.devices()[0]
        sender.send(
            (
                "device",
                {"platform": device.platform, "description": reporting.device_description()},
            )
        )
        for item in section.items(plan):
            sender.send(("item", ", ".join(str(label) for label in item.labels.values())))
            try:
                rows = [item.labels | row for row in item.measure()]
            except Exception as error:  # the other items go on
                rows = [item.labels | {"error": one_line(error)}]
            sender.send(("rows", rows))
        sender.send(("done", None))
    except Exception as error:
        sender.send(("failed", one_line(error)))


def _end_with_parent() -> None:
    """Whoever kills the program does not know of this process."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _end(process: multiprocessing.Process) -> None:
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not made its group yet
            process.kill()
    process.join()
