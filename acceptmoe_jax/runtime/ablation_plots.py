"""Figures of an ablation, as PNG: quality against experts and traffic, memberships, phat."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from acceptmoe_jax.figures import png

Row = Mapping[str, Any]

_STARS = "*PXDspv<>"


def quality_by(x: str, label: str, rows: Sequence[Row], where: str, scale: float = 1.0) -> bytes:
    """Accuracy, agreement with native routing and recall against what a policy takes.

    Rows of a `line` over budgets or settings are joined; those of the group "self_sizing" are
    marks in the colour of the line whose ranking they size. Standard SD is the dotted line.

    Args:
      x: the rows' key of the axis.
      label: of it.
      rows: with "policy", "group", "line", "accuracy", "agreement", "recall_on_accepted_path" and
        "intervals"; those without a value, or without a line, are left out.
      where: what it was measured on.
      scale: of x.
    """
    panels = {
        "accuracy": "accuracy",
        "agreement": "agreement with native routing",
        "recall_on_accepted_path": "recall on the accepted path",
    }
    lines = [row["line"] for row in rows if row["group"] != "self_sizing"]
    lines = [line for line in dict.fromkeys(lines) if line is not None]
    colours = {line: f"C{at % 10}" for at, line in enumerate(lines)}
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    for axes, (y, name) in zip(figure.subplots(1, len(panels)), panels.items()):
        _panel(axes, rows, x, y, scale, colours)
        axes.set(xlabel=label, ylabel=name)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(where, fontsize="small")
    return png(figure)


def _panel(axes: Axes, rows, x: str, y: str, scale: float, colours: Mapping[str, str]) -> None:
    shown = [row for row in rows if None not in (row.get(x), row.get(y))]
    for line, colour in colours.items():
        points = [row for row in shown if row["line"] == line and row["group"] != "self_sizing"]
        style = {"color": colour, "marker": ".", "linewidth": 1.2, "capsize": 2}
        if points:
            points.sort(key=lambda row: row[x])
            _points(axes, points, x, y, scale, label=line, **style)
    marks = [row for row in shown if row["group"] == "self_sizing"]
    for mark, row in zip(_STARS * len(marks), marks):
        style = {"color": colours.get(row["line"], "black"), "marker": mark, "linestyle": "none"}
        style |= {"markersize": 9, "markeredgecolor": "black", "markeredgewidth": 0.7, "zorder": 5}
        _points(axes, [row], x, y, scale, label=row["policy"], **style)
    for row in shown:
        if row["policy"] == "native":
            axes.axhline(row[y], color="gray", linestyle=":")
            axes.plot(row[x] * scale, row[y], "o", color="gray", label="native (Standard SD)")


def _points(axes: Axes, rows: Sequence[Row], x: str, y: str, scale: float, **style: Any) -> None:
    values = np.array([row[y] for row in rows])
    ends = [row["intervals"].get(y) or (row[y], row[y]) for row in rows]
    low, high = np.array(ends).T
    error = np.maximum([values - low, high - values], 0)
    axes.errorbar([row[x] * scale for row in rows], values, yerr=error, elinewidth=0.7, **style)


def commitment_by_depth(depths: Sequence[Row], where: str) -> bytes:
    """Commitment probability by depth: measured here, and the calibrated table's.

    Args:
      depths: rows with "depth", "phat", "phat_of_a_node", "table" and "intervals".
      where: what it was measured on.
    """
    figure = Figure(figsize=(6.5, 3.8), layout="constrained")
    axes = figure.subplots()
    kinds = {"phat": "measured, of a depth", "phat_of_a_node": "measured, of a node"}
    for name, label in kinds.items():
        known = [row for row in depths if row[name] is not None]
        _points(axes, known, "depth", name, 1.0, label=label, marker="o", capsize=3)
    table = [(row["depth"], row["table"]) for row in depths if row["table"] is not None]
    if table:
        axes.plot(*zip(*table), "x--", color="black", label="commitment table, of a depth")
    axes.set(xlabel="depth", ylabel="probability of commitment", ylim=(0, 1.05))
    axes.set_title(where, fontsize="small", wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return png(figure)


def overlap_maps(overlaps: Mapping[int, Sequence[Row]], where: str) -> bytes:
    """Mean Jaccard index of each two policies' sets, a map for each budget.

    Args:
      overlaps: by budget, rows with "a", "b" and "jaccard".
      where: what it was measured on.
    """
    names = list(dict.fromkeys(row[end] for row in next(iter(overlaps.values())) for end in "ab"))
    columns = min(3, len(overlaps))
    lines = -(-len(overlaps) // columns)
    size = (2.2 + 3.4 * columns, 1.6 + 3.2 * lines)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (budget, rows) in zip(panels, overlaps.items()):
        table = np.eye(len(names))
        for row in rows:
            at = names.index(row["a"]), names.index(row["b"])
            table[at] = table[at[::-1]] = row["jaccard"]
        axes.imshow(table, vmin=0, vmax=1, cmap="Blues")
        for (i, j), value in np.ndenumerate(table):
            colour = "white" if value > 0.6 else "black"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7)
        axes.set_title(f"{budget} experts a layer", fontsize="small")
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize="small")
        axes.set_yticks(range(len(names)), names, fontsize="small")
    for axes in panels[len(overlaps) :]:
        axes.remove()
    figure.suptitle(where, fontsize="small")
    return png(figure)
