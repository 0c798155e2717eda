"""Figures of a grid of models, tasks and methods, as PNG."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from acceptmoe_jax.figures import png

# Rows of a summary: what `comparison.row` gives, with "model", "task" and "method".
Row = Mapping[str, Any]

_MARKERS = "os^DvP*X<>hp"


def bars(name: str, label: str, rows: Sequence[Row], where: str, scale: float = 1.0) -> bytes:
    """A quantity of every model and task, a bar a method, with 95 % intervals.

    Args:
      name: of the rows' key; rows without a value have no bar.
      label: of the axis.
      rows: of the summary.
      where: what it was measured on.
      scale: of the values.
    """
    pairs = list(dict.fromkeys((row["model"], row["task"]) for row in rows))
    colours = _colours(rows)
    figure = Figure(figsize=(max(7, 1.5 + 1.3 * len(pairs)), 4.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(colours)
    for at, (method, colour) in enumerate(colours.items()):
        shown = [row for row in rows if row["method"] == method and row.get(name) is not None]
        places = [pairs.index((row["model"], row["task"])) + at * width - 0.4 for row in shown]
        heights = np.array([row[name] for row in shown]) * scale
        error = _error(shown, name) * scale
        style = {"align": "edge", "color": colour, "label": method, "capsize": 2}
        axes.bar(places, heights, width, yerr=error, error_kw={"elinewidth": 0.8}, **style)
    labels = [f"{task.replace('_', ' ')}\n{model}" for model, task in pairs]
    axes.set_xticks(range(len(pairs)), labels, fontsize="x-small", rotation=20)
    axes.set(ylabel=label)
    axes.grid(alpha=0.3, axis="y")
    return _finished(figure, where)


def accuracy_by_experts(rows: Sequence[Row], where: str) -> bytes:
    """Accuracy against used experts, a panel a model: methods by colour, tasks by marker.

    Args:
      rows, where: see `bars`.
    """
    colours, tasks = _colours(rows), list(dict.fromkeys(row["task"] for row in rows))
    figure, panels = _panels(rows)
    for axes, (model, held) in zip(panels, _by_model(rows).items()):
        for row in held:
            if row["used"] is None:
                continue
            marker = _MARKERS[tasks.index(row["task"]) % len(_MARKERS)]
            error = _error([row], "accuracy")
            style = {"color": colours[row["method"]], "marker": marker, "capsize": 2}
            style |= {"elinewidth": 0.8, "linestyle": "none"}
            axes.errorbar([row["used"]], [row["accuracy"]], yerr=error, **style)
        axes.set(xlabel="experts used a layer", ylabel="accuracy", title=model)
        axes.yaxis.set_major_formatter("{x:.0%}")
    for method, colour in colours.items():
        panels[0].plot([], [], "s", color=colour, label=method)
    for at, task in enumerate(tasks):
        panels[0].plot([], [], _MARKERS[at % len(_MARKERS)], color="gray", label=task)
    return _finished(figure, where)


def sizes_by_layer(rows: Sequence[Row], where: str) -> bytes:
    """Experts used of each MoE layer, a mean over verifications and tasks, a panel a model.

    Args:
      rows, where: see `bars`.
    """
    figure, panels = _panels(rows)
    for axes, (model, held) in zip(panels, _by_model(rows).items()):
        for method, colour in _colours(rows).items():
            layers = [r["by_layer"] for r in held if r["method"] == method and r["by_layer"]]
            if not layers:
                continue
            used = np.mean([each["used"] for each in layers], axis=0)
            axes.plot(used, marker=".", color=colour, label=method)
        axes.set(xlabel="MoE layer", ylabel="experts used", title=model, ylim=(0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
    return _finished(figure, where)


def commitment_by_depth(rows: Sequence[Row], where: str) -> bytes:
    """Share of verifications whose accepted path reaches each depth, a panel a model.

    Args:
      rows, where: see `bars`. Of all verifications of a model's tasks.
    """
    figure, panels = _panels(rows)
    for axes, (model, held) in zip(panels, _by_model(rows).items()):
        for method, colour in _colours(rows).items():
            reached = [r for r in held if r["method"] == method and r["phat_by_depth"]]
            if not reached:
                continue
            phat = [row["phat_by_depth"] for row in reached]
            weights = [row["verifications"] for row in reached]
            phat = np.average(phat, axis=0, weights=weights)
            axes.plot(phat, marker="o", markersize=4, color=colour, label=method)
        axes.set(xlabel="depth", ylabel="probability of commitment", title=model, ylim=(0, 1.05))
    return _finished(figure, where)


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    methods = dict.fromkeys(row["method"] for row in rows)
    return {method: f"C{at % 10}" for at, method in enumerate(methods)}


def _by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    held: dict[str, list[Row]] = {}
    for row in rows:
        held.setdefault(row["model"], []).append(row)
    return held


def _panels(rows: Sequence[Row]) -> tuple[Figure, np.ndarray]:
    count = len(_by_model(rows))
    figure = Figure(figsize=(1 + 5 * count, 4.6), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _error(rows: Sequence[Row], name: str) -> np.ndarray:
    """[2, rows]: how far the ends of intervals lie from their values."""
    values = np.array([row[name] for row in rows], float)
    ends = [row["intervals"].get(name) or (row[name], row[name]) for row in rows]
    low, high = np.array(ends, float).reshape(-1, 2).T
    return np.maximum([values - low, high - values], 0)


def _finished(figure: Figure, where: str) -> bytes:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = max(2, int(figure.get_figwidth() // 2))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
    figure.suptitle(where, fontsize="small", wrap=True)
    return png(figure)
