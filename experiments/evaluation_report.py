"""How an evaluation's summary is shown: tables, figures, the HTML page and its Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from acceptmoe_jax import reporting
from acceptmoe_jax.evaluation import plots
from acceptmoe_jax.evaluation.comparison import STANDARD_SD
from acceptmoe_jax.report_page import Heading, Paragraph, Part, Picture, Table

LOSSY = (
    "native is Standard SD. Every other policy that restricts experts is lossy: accepted tokens "
    "are exact for the restricted target only, so speed is to be read beside accuracy. Agreement "
    "(of the top-1) and KL compare audited rows with native routing, outside the timed seconds."
)
INTERVALS = (
    "Brackets and bars are 95 % intervals: Wilson's for the accuracy of a task, else percentiles "
    "of 2000 bootstrap drawings of prompts within their model and task (seed 0). Comparisons with "
    "Standard SD are paired, prompt by prompt. Where all prompts agree a bootstrapped interval "
    "shrinks to a point, without the certainty that this suggests."
)
QUANTITIES = (
    "Throughput is of decoded tokens over the wall time of verifications, without prefill and "
    "compilation; accepted length counts the bonus token, before cuts; set sizes are means a layer "
    "and verification; Mean rows weigh every model and task the same."
)
NO_NATIVE = "native (Standard SD) was not run, so there are no differences from it."

# Quantity -> (key, decimals, scale).
_QUANTITIES = {
    "accuracy %": ("accuracy", 1, 100),
    "accuracy - Standard SD": ("accuracy_against_native", 1, 100),
    "accepted length": ("accepted_length", 2, 1),
    "tokens/s": ("tokens_per_second", 1, 1),
    "speed / Standard SD": ("speed_against_native", 2, 1),
    "eligible": ("eligible", 1, 1),
    "used": ("used", 1, 1),
    "natural union": ("natural_union", 1, 1),
    "agreement %": ("agreement_with_native", 1, 100),
    "KL": ("kl_on_accepted_rows", 4, 1),
    "MB a token": ("h2d_bytes_per_token", 3, 1e-6),
    "traffic / Standard SD": ("traffic_against_native", 2, 1),
    "hit rate %": ("hit_rate", 1, 100),
    "waiting %": ("wait_share", 1, 100),
    "waves": ("waves", 2, 1),
    "budget": ("budget", 0, 1),
    "samples": ("samples", 0, 1),
}
_MEAN = "Mean"
_LONG = ("eligible", "natural union", "KL", "waves", "samples")  # left out on a terminal


def published_table(summary: Mapping[str, Any], where: str) -> Table:
    """Every quantity of every model and task, and the means over them, a column a method.

    Args:
      summary: as it is written.
      where: what it was measured on.
    """
    methods = summary["methods"]
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in summary["rows"]:
        groups.setdefault((row["model"], row["task"]), {})[row["method"]] = row
    pairs = len(groups)
    groups[_MEAN, f"{pairs} pairs"] = {row["method"]: row for row in summary["means"]}
    rows = []
    for (model, task), by_method in groups.items():
        for quantity, shown in _QUANTITIES.items():
            cells = {name: _cell(by_method[name], *shown) for name in methods}
            if any(cell is not None for cell in cells.values()):
                rows.append({"model": model, "task": task, "quantity": quantity} | cells)
    formats = {"model": "", "task": "", "quantity": ""} | dict.fromkeys(methods, ">")
    return Table(f"By model and task; {where}", rows, formats)


def mean_table(summary: Mapping[str, Any], where: str, brief: bool = False) -> Table:
    """Means over models and tasks, a row a method; see `published_table`.

    Args:
      brief: for a terminal's width.
    """
    shown = {
        quantity: each
        for quantity, each in _QUANTITIES.items()
        if any(row.get(each[0]) is not None for row in summary["means"])
        and not (brief and quantity in _LONG)
    }
    against = ("accuracy_against_native", "speed_against_native")
    rows = []
    for row in summary["means"]:
        kept = {name: row["intervals"].get(name) for name in against}
        row = row | {"intervals": kept if brief else row["intervals"]}
        cells = {quantity: _cell(row, *each) for quantity, each in shown.items()}
        rows.append({"method": row["method"]} | cells)
    pairs = summary["means"][0]["pairs"]
    title = f"Means over {pairs} pairs of model and task; {where}"
    return Table(title, rows, {"method": ""} | dict.fromkeys(shown, ">"))


def figures(summary: Mapping[str, Any], where: str) -> dict[str, Picture]:
    """The figures, by file name; arguments as of `published_table`."""
    rows = summary["rows"]
    pictures = {
        "throughput.png": Picture(
            plots.bars("tokens_per_second", "tokens a second", rows, where),
            f"Throughput, with 95 % intervals. {where}.",
        ),
        "accuracy.png": Picture(
            plots.accuracy_by_experts(rows, where),
            f"Accuracy against used experts: methods by colour, tasks by mark. {where}.",
        ),
        "layers.png": Picture(
            plots.sizes_by_layer(rows, where), f"Experts used by layer, means over tasks. {where}."
        ),
        "commitment.png": Picture(
            plots.commitment_by_depth(rows, where),
            f"Share of verifications whose accepted path reaches each depth (phat). {where}.",
        ),
    }
    if any(row.get("h2d_bytes_per_token") is not None for row in rows):
        pictures["traffic.png"] = Picture(
            plots.bars("h2d_bytes_per_token", "MB from host to device, a token", rows, where, 1e-6),
            f"Bytes over the link, with 95 % intervals. {where}.",
        )
    return pictures


def words(summary: Mapping[str, Any], where: str) -> list[str]:
    """What has to be said beside the numbers, a paragraph each."""
    said = [f"Measured on {where}.", *_worst(summary), LOSSY, QUANTITIES, INTERVALS]
    if STANDARD_SD not in summary["methods"]:
        said.insert(1, NO_NATIVE)
    if summary.get("link_simulated"):
        said.insert(1, f"The link is simulated: {summary['link']}, on top of the real one.")
    return said


def page(
    summary: Mapping[str, Any], where: str, pictures: Mapping[str, Picture]
) -> tuple[list[Part], str]:
    """The parts of the HTML report, and the same words and tables in Markdown."""
    tables = [mean_table(summary, where), published_table(summary, where)]
    text = words(summary, where)
    parts = [*map(Paragraph, text), Heading("Means"), tables[0]]
    parts += [Heading("Figures"), *pictures.values(), Heading("Models and tasks"), tables[1]]
    pieces = [f"{words}\n" for words in text]
    for table in tables:
        body = reporting.markdown_table(table.rows, table.formats)
        pieces.append(f"## {table.title}\n\n{body}")
    pieces += [f"![{name}]({name})\n" for name in pictures]
    return parts, "# Evaluation\n\n" + "\n".join(pieces)


def _worst(summary: Mapping[str, Any]) -> Sequence[str]:
    found = [
        f"{row['method']} {100 * row['worst_accuracy_against_native']:+.1f} points "
        f"({row['worst_pair']})"
        for row in summary["means"]
        if row["method"] != STANDARD_SD and "worst_pair" in row
    ]
    return [f"Worst accuracy against Standard SD of any pair: {'; '.join(found)}."] if found else []


def _cell(row: Mapping[str, Any], name: str, decimals: int, scale: float) -> str | None:
    return reporting.with_interval(row.get(name), row["intervals"].get(name), decimals, scale)
