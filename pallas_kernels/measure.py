"""Times what a device does.

A kernel of a few microseconds is shorter than its dispatch, so a measurement enqueues a program
that runs an op once a layer, several times over, and waits once. The layers have operands of their
own: eight experts of a Qwen3-30B-A3B layer would stay in the L2 of a large GPU, whose memory would
then seem faster than it is.
"""

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from pallas_kernels.devices import DEVICES, Device

Key = TypeVar("Key", bound=Hashable)

# What a marketing name in jax's `device_kind` stands for; the first that is part of it.
_BY_KIND = (
    ("H200", "h200"),
    ("H100", "h100"),
    ("RTX 5090", "rtx-5090"),
    ("RTX PRO 6000", "rtx-pro-6000"),
)
_LARGEST_L2 = max(device.l2 for device in DEVICES.values())
_VISIT_SECONDS = 0.02
_MOST_CALLS = 50  # in flight at once: each holds its results
_LONGEST_ERROR = 200


def device_of(kind: str) -> Device | None:
    """The data sheet of a `device_kind`; None for a CPU and for what we know nothing of."""
    return next((DEVICES[name] for part, name in _BY_KIND if part in kind), None)


def layers_past_cache(bytes_a_layer: float) -> int:
    """How many layers in turn read twice what any GPU's L2 holds, 4 to 32; one on a CPU."""
    if jax.default_backend() == "cpu":
        return 1
    return int(np.clip(np.ceil(2 * _LARGEST_L2 / bytes_a_layer), 4, 32))


def median_seconds(
    runs: Mapping[Key, Callable[[], Any]],
    rounds: int,
    on_visit: Callable[[], None] = lambda: None,
) -> dict[Key, float]:
    """Seconds a call of each of `runs`: medians over rounds that visit all of them in turn.

    So a noisy machine disturbs all alike. A visit enqueues as many calls as take about 20 ms, and
    waits for the last one.

    Args:
      runs: each enqueues its work and returns the arrays to wait for; the first call may compile.
      rounds: visits of each that count.
      on_visit: called after each of the `rounds + 1` visits, of which the first warms up.
    """
    calls, seconds = {}, {key: [] for key in runs}
    for key, run in runs.items():
        jax.block_until_ready(run())
        calls[key] = int(np.clip(_VISIT_SECONDS / _seconds(run, 1), 1, _MOST_CALLS))
        on_visit()
    for _ in range(rounds):
        for key, run in runs.items():
            seconds[key].append(_seconds(run, calls[key]) / calls[key])
            on_visit()
    return {key: statistics.median(times) for key, times in seconds.items()}


def layered_seconds(
    variants: Mapping[Key, tuple[Callable[..., Any], Sequence[tuple]]],
    rounds: int,
    on_visit: Callable[[], None] = lambda: None,
) -> tuple[dict[Key, float], dict[Key, str]]:
    """Seconds a layer of each variant, as `median_seconds` measures them.

    Args:
      variants: a function and its arguments in each layer. Variants of one function and one
        number of layers share a program.

    Returns:
      The seconds of those that ran, and what went wrong with the others.
    """
    programs, runs, errors = {}, {}, {}
    for key, (function, layers) in variants.items():
        program = programs.setdefault(function, jax.jit(_in_turn(function)))
        run = functools.partial(program, layers)
        try:
            jax.block_until_ready(run())
            runs[key] = run
        except Exception as error:  # a kernel that does not compile or run is a result too
            errors[key] = one_line(error)
            for _ in range(rounds + 1):
                on_visit()
    seconds = median_seconds(runs, rounds, on_visit)
    return {key: time_ / len(variants[key][1]) for key, time_ in seconds.items()}, errors


def one_line(error: BaseException) -> str:
    """An error as a table shows it."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(slope, intercept) of the line with the least squares through at least two points."""
    slope_, intercept = np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)
    return float(slope_), float(intercept)


def _in_turn(function: Callable[..., Any]) -> Callable[[Sequence[tuple]], list[Any]]:
    return lambda layers: [function(*arguments) for arguments in layers]


def _seconds(run: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return time.perf_counter() - begin
