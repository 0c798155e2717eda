"""Figures of an offloaded run, as PNG."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from acceptmoe_jax.figures import png


def traffic_bars(summaries: Mapping[str, Mapping[str, Any]], where: str) -> bytes:
    """Bytes over the link a decoded token, by method.

    Args:
      summaries: of `summarise`, by method.
      where: what it was measured on.
    """
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    moved = [summary["h2d_bytes_per_token"] / 1e6 for summary in summaries.values()]
    bars = axes.bar(list(summaries), moved, color="tab:blue")
    axes.bar_label(bars, fmt="%.2f")
    axes.set(ylabel="MB from host to device, a token", title=where)
    axes.title.set_fontsize("small")
    return png(figure)


def residency_timeline(
    owners: Mapping[str, Sequence[Sequence[int]]], slots: int, where: str, most: int = 60
) -> bytes:
    """Which expert is in each slot of a layer after each verification, a colour an expert.

    Args:
      owners: by method, the expert of each slot (-1: none) after each verification.
      slots: C.
      where: what it was measured on.
      most: verifications shown.
    """
    figure = Figure(figsize=(8, 1.2 + 1.6 * len(owners)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(owners), 1, sharex=True))
    for axis, (method, rounds) in zip(axes, owners.items()):
        table = np.ma.masked_less(np.array(rounds[:most]).T, 0)
        axis.imshow(table, aspect="auto", interpolation="nearest", cmap="nipy_spectral")
        axis.set(ylabel="slot", ylim=(slots - 0.5, -0.5))
        axis.set_title(method, fontsize="small", loc="left")
    axes[-1].set_xlabel("verification")
    figure.suptitle(f"Experts in the slots of the middle layer; {where}", fontsize="small")
    return png(figure)
