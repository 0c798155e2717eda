"""How an ablation's summary is shown: tables for the terminal, figures, and the HTML page."""

from collections.abc import Mapping, Sequence
from typing import Any

from acceptmoe_jax.report_page import Heading, Paragraph, Part, Picture, Table
from acceptmoe_jax.runtime import ablation_plots

INTERVALS = (
    "Brackets and bars are 95 % percentile intervals of 2000 bootstrap drawings of prompts (seed "
    "0). With few prompts they are wide, and where every prompt agrees they shrink to a point "
    "without certainty that goes with it."
)
LOSSY = (
    "Every policy but native is lossy: accepted tokens are exact for the restricted target only. "
    "Agreement (of the top-1) and KL compare each accepted row with native routing; accuracy is "
    "of answers to held-out generated tasks, where code counts as right only if it is the "
    "reference's syntax tree."
)
RECALL = (
    "Recall is the share of the accepted rows' natural picks whose expert was eligible, for the "
    "policy replayed on the same trace of Standard SD; everything else is of live runs. "
    "Cache-conditional routing has no recall: it leaves every expert eligible, and moves picks."
)

# Column -> (key, decimals, scale) of numbers with intervals.
_NUMBERS = {
    "used": ("used", 1, 1),
    "recall %": ("recall_on_accepted_path", 1, 100),
    "agreement %": ("agreement", 1, 100),
    "KL": ("kl", 3, 1),
    "accuracy %": ("accuracy", 1, 100),
    "accepted length": ("accepted_length", 2, 1),
}
_TRAFFIC = {
    "MB a token": ("h2d_bytes_per_token", 3, 1e-6),
    "hit rate %": ("hit_rate", 1, 100),
    "waves": ("waves", 2, 1),
    "used": ("used", 1, 1),
    "agreement %": ("agreement", 1, 100),
    "accuracy %": ("accuracy", 1, 100),
}
_AGAINST = {"accuracy - native": ("accuracy_against_native", 1, 100)}
_BRIEFLY = ("used", "KL", "accepted length", "waves")


def tables(summary: Mapping[str, Any], where: str, brief: bool = False) -> list[Table]:
    """The tables: the sweep, the ablations, with slots the traffic, and phat by depth.

    Args:
      summary: as it is written.
      where: what it was measured on.
      brief: leave out intervals of what hardly varies, for a terminal's width.
    """
    rows = summary["rows"]
    swept = [row for row in rows if row["budget"] is not None]
    others = [row for row in rows if row["budget"] is None]
    moving = [row for row in rows if row.get("h2d_bytes_per_token") is not None]
    shown = []
    if swept:
        shown.append(_table(f"Policies over budgets; {where}", swept, _NUMBERS, brief, True))
    if others:
        title = f"Standard SD, self-sizing policies and ablations; {where}"
        shown.append(_table(title, others, _NUMBERS | _AGAINST, brief))
    if moving:
        title = f"What moves from host to device; {where}"
        shown.append(_table(title, moving, _TRAFFIC, brief, True))
    columns = {"phat": ("phat", 4, 1), "of a node": ("phat_of_a_node", 4, 1)}
    title = f"Commitment by depth, natural routing, {summary['verifications']} verifications"
    rows = [
        {"depth": row["depth"], "table": row["table"]} | _cells(row, columns)
        for row in summary["phat_by_depth"]
    ]
    formats = {"depth": "d"} | dict.fromkeys(columns, ">") | {"table": ".4f"}
    shown.append(Table(f"{title}; {where}", rows, formats))
    return shown


def figures(summary: Mapping[str, Any], where: str) -> dict[str, Picture]:
    """The figures, by file name.

    Args:
      summary: as it is written.
      where: what it was measured on.
    """
    rows = summary["rows"]
    pictures = {
        "experts.png": Picture(
            ablation_plots.quality_by("used", "experts used a layer", rows, where),
            "Quality against used experts: curves over budgets, marks where a policy sizes its set "
            f"itself in the colour of the curve it ranks by, dots Standard SD. {where}.",
        )
    }
    if any(row.get("h2d_bytes_per_token") is not None for row in rows):
        label = "MB from host to device, a token"
        pictures["traffic.png"] = Picture(
            ablation_plots.quality_by("h2d_bytes_per_token", label, rows, where, 1e-6),
            f"Quality against traffic. {where}.",
        )
    pictures["commitment.png"] = Picture(
        ablation_plots.commitment_by_depth(summary["phat_by_depth"], where),
        f"How often a depth, and a node of it, was committed under Standard SD, beside the table "
        f"that policies weigh by (fitted on training prompts). {where}.",
    )
    overlaps: dict[int, list] = {}
    for row in summary["overlaps"]:
        overlaps.setdefault(row["budget"], []).append(row)
    if overlaps:
        pictures["overlap.png"] = Picture(
            ablation_plots.overlap_maps(overlaps, where),
            "Membership overlap of sets of one budget, replayed on the trace of Standard SD with "
            "all experts resident: the mean Jaccard index over verifications and layers. natural "
            f"is the experts with most natural assignments. {where}.",
        )
    return pictures


def page(
    tables: Sequence[Table], pictures: Mapping[str, Picture], words: Sequence[str]
) -> list[Part]:
    """The parts of the report.

    Args:
      tables: of `tables`.
      pictures: of `figures`.
      words: what was run, a paragraph each.
    """
    text = [Paragraph(words) for words in (*words, LOSSY, RECALL, INTERVALS)]
    return [*text, Heading("Figures"), *pictures.values(), Heading("Tables"), *tables]


def _table(title, rows, columns, brief: bool, budget: bool = False) -> Table:
    shown = [
        {"policy": row["policy"], "budget": row["budget"], "samples": row["samples"]}
        | _cells(row, columns, _BRIEFLY if brief else ())
        for row in rows
    ]
    formats = {"policy": ""} | ({"budget": "d"} if budget else {}) | dict.fromkeys(columns, ">")
    return Table(title, shown, formats if brief else formats | {"samples": "d"})


def _cells(row, columns, alone=()) -> dict[str, str | None]:
    """Numbers as text with their intervals, but for the columns whose numbers stand alone."""
    cells: dict[str, str | None] = {}
    for column, (name, decimals, scale) in columns.items():
        value, interval = row.get(name), row["intervals"].get(name)
        cells[column] = None if value is None else f"{value * scale:.{decimals}f}"
        if interval is not None and column not in alone:
            low, high = (f"{end * scale:.{decimals - 1}f}" for end in interval)
            cells[column] += f" [{low}, {high}]"
    return cells
