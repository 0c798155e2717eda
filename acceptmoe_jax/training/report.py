"""What a training run leaves beside its weights: `training.json` and `loss.png`."""

import os
import pathlib
from typing import Any

from matplotlib.figure import Figure

from acceptmoe_jax import reporting
from acceptmoe_jax.figures import png
from acceptmoe_jax.files import write_atomically, write_json


def write_report(
    directory: str | os.PathLike, facts: dict[str, Any], records: list[dict[str, Any]]
) -> None:
    """Writes both files.

    Args:
      directory: the checkpoint's.
      facts: what identifies the run: seed, data, sizes, settings.
      records: the lines of `metrics.jsonl`.
    """
    directory = pathlib.Path(directory)
    final: dict[str, Any] = {}
    for record in records:
        final |= record
    report = facts | {"final": final, "versions": reporting.versions("optax", "orbax-checkpoint")}
    write_json(directory / "training.json", report)
    write_atomically(directory / "loss.png", loss_curve(records))


def loss_curve(records: list[dict[str, Any]]) -> bytes:
    """Training and held-out loss over steps, as a PNG."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("held_out_loss", "held out")):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points), label=label, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats)", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return png(figure)
