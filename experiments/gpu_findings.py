"""What follows from the rows of `experiments.gpu_check`."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pallas_kernels.implementations import KERNELS
from pallas_kernels.measure import slope

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A table of the report; columns as `reporting.print_table` takes them."""

    name: str
    title: str
    rows: list[Row]
    columns: Mapping[str, str]


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Those that the rows allow, of any of the sections and in any order."""
    speeds = [row for row in rows if row.get("microseconds") is not None]
    steps = [row for row in rows if "ratio_to_native" in row]
    found = [_slopes(speeds), _fastest(speeds), _selection_share(speeds, steps)]
    return [finding for finding in found if finding.rows]


def _slopes(speeds: Sequence[Row]) -> Finding:
    rows = []
    for (op, shape, dtype, implementation), group in _by(
        speeds, "op", "shape", "dtype", "implementation"
    ):
        if len({row["used"] for row in group}) < 2:
            continue
        used = [row["used"] for row in group]
        microseconds, fixed = slope(used, [row["microseconds"] for row in group])
        megabytes, _ = slope(used, [row["megabytes"] for row in group])
        rows.append(
            {
                "op": op,
                "shape": shape,
                "dtype": dtype,
                "implementation": implementation,
                "microseconds_an_expert": microseconds,
                "fixed_microseconds": fixed,
                "megabytes_an_expert": megabytes,
                "gigabytes_per_second": 1e3 * megabytes / microseconds,
            }
        )
    columns = {
        "op": "",
        "shape": "",
        "dtype": "",
        "implementation": "",
        "microseconds_an_expert": ".2f",
        "fixed_microseconds": ".1f",
        "megabytes_an_expert": ".2f",
        "gigabytes_per_second": ".0f",
    }
    return Finding("slopes", "Time of a layer per used expert, by least squares", rows, columns)


def _fastest(speeds: Sequence[Row]) -> Finding:
    rows = []
    for (op, shape, dtype), group in _by(speeds, "op", "shape", "dtype"):
        mean = {
            implementation: statistics.fmean(row["microseconds"] for row in own)
            for (implementation,), own in _by(group, "implementation")
        }
        fastest, *others = sorted(mean, key=mean.get)
        rows.append(
            {
                "op": op,
                "shape": shape,
                "dtype": dtype,
                "fastest": fastest,
                "microseconds": mean[fastest],
                "next": others[0] if others else None,
                "next_takes": mean[others[0]] / mean[fastest] if others else None,
            }
        )
    columns = {
        "op": "",
        "shape": "",
        "dtype": "",
        "fastest": "",
        "microseconds": ".1f",
        "next": "",
        "next_takes": ".2f",
    }
    title = "The fastest implementation, by the mean over all set sizes"
    return Finding("fastest", title, rows, columns)


def _selection_share(speeds: Sequence[Row], steps: Sequence[Row]) -> Finding:
    """Of the step at AcceptMoE's sets: one selection a MoE layer."""
    selection = {
        (row["shape"], row["implementation"]): row["microseconds"]
        for row in speeds
        if row["op"] == "commitment_select"
    }
    rows = []
    for row in steps:
        kernels = KERNELS[row["kernels"]].selection
        once = selection.get((row["target"].lower(), kernels))
        if row["method"] != "acceptmoe" or once is None:
            continue
        milliseconds = 1e-3 * once * row["moe_layers"]
        rows.append(
            {
                "target": row["target"],
                "kernels": row["kernels"],
                "selection_milliseconds": milliseconds,
                "step_milliseconds": row["milliseconds"],
                "share": milliseconds / row["milliseconds"],
            }
        )
    columns = {
        "target": "",
        "kernels": "",
        "selection_milliseconds": ".3f",
        "step_milliseconds": ".3f",
        "share": ".1%",
    }
    return Finding("selection_share", "Selection's share of the step", rows, columns)


def _by(rows: Sequence[Row], *keys: str) -> Iterator[tuple[tuple, list[Row]]]:
    """The rows by their values of some keys, in order."""

    def value(row: Row) -> tuple:
        return tuple(row[key] for key in keys)

    for group, own in itertools.groupby(sorted(rows, key=value), key=value):
        yield group, list(own)
