"""What each part of the method is worth: policies over budgets, and AcceptMoE taken apart.

    python -m experiments.ablate \
        --target=checkpoints/pocket-qwen3-moe --draft=checkpoints/pocket-qwen3-moe-eagle3 \
        --dtype=float32 --records=25 --output_dir=runs/ablate

Decodes held-out pocket tasks once natively, with a trace (`OUTPUT_DIR/trace`), and then under every
policy, each verification audited. The trace gives recall, membership overlap and commitment by
depth by replay, the live runs give agreement, KL and accuracy. With --expert_slots also traffic,
and the variants that go by what is on the device. --policies chooses variants, or groups of them:
curves (policies over --budgets), self_sizing, ablations and offloading (experiments/
ablation_variants.py lists them).

A finished row is kept in `rows.jsonl`; the same command goes on where it was interrupted. Writes
`summary.json`, `report.html` (all in one file) and its figures as PNG. The command above takes half
an hour on two CPU cores: half a minute for each of 48 rows, and thrice that with --expert_slots.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from acceptmoe_jax import report_page, reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_atomically, write_json
from acceptmoe_jax.journal import Journal
from acceptmoe_jax.pocket import families
from acceptmoe_jax.pocket.records import Record
from acceptmoe_jax.runtime.engine import Engine
from acceptmoe_jax.traces import Trace
from acceptmoe_jax.traces.recording import record, trace_settings
from experiments import (
    ablation_report,
    ablation_rows,
    ablation_sets,
    ablation_variants,
    engine_flags,
    model_flags,
)
from experiments.ablation_run import Ablation
from experiments.ablation_variants import VARIANTS, Planned

_RECORDS = flags.DEFINE_integer("records", 25, "Test tasks of each family.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the choice of tasks.")
_POLICIES = flags.DEFINE_list(
    "policies",
    None,
    f"Variants, or groups ({', '.join(ablation_variants.GROUPS)}); default: all that apply.",
)
_BUDGETS = flags.DEFINE_list(
    "budgets", ["12", "16", "24", "32", "48", "64"], "Experts a layer of the curves."
)
_COMMITMENT = flags.DEFINE_string(
    "commitment", None, "Commitment table; default: commitment.json beside the head or the target."
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the files go.", required=True)
flags.set_default(engine_flags.MAX_NEW_TOKENS, 64)  # a pocket task's answer is shorter


def main() -> None:
    if model_flags.DRAFT.value is None:
        raise UserError("--draft is needed: without a draft tree nothing is verified")
    budgets = _budgets()
    engine = model_flags.load_engine(_COMMITMENT.value)
    if engine.offload is not None and engine.offload.eviction != "lru":
        raise UserError(f"--eviction={engine.offload.eviction}: only lru can be replayed")
    target = engine.model.setup.target
    names = ablation_variants.chosen(_POLICIES.value, engine.offload is not None)
    plan = ablation_variants.planned(names, budgets, target.top_k, target.num_experts)
    for planned in plan:
        ablation_variants.selector(engine, *planned)  # refused now rather than at its turn
    records = {
        f"{family}/{index}": task
        for family in families.FAMILIES
        for index, task in enumerate(families.generate(family, "test", _SEED.value, _RECORDS.value))
    }
    output = pathlib.Path(_OUTPUT_DIR.value)
    options = {"max_new_tokens": engine_flags.MAX_NEW_TOKENS.value, **engine_flags.chat_options()}
    journal = Journal(output / "rows.jsonl", _settings(engine, options))
    trace = _record(engine, output / "trace", records, options)
    ablation = Ablation(engine, list(records.values()), trace, journal, options)
    rows = _named(plan, ablation.rows(plan))
    overlaps = ablation.overlaps(plan)
    _write(engine, journal, trace, rows, overlaps, output)


def _budgets() -> list[int]:
    try:
        return [int(budget) for budget in _BUDGETS.value]
    except ValueError:
        raise UserError(
            f"--budgets holds numbers of experts, not {','.join(_BUDGETS.value)}"
        ) from None


def _settings(engine: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """What all rows depend on."""
    traced = trace_settings(engine, "native", engine_flags.MAX_NEW_TOKENS.value)
    chosen = {"records": _RECORDS.value, "seed": _SEED.value}
    return dataclasses.asdict(traced) | chosen | options


def _record(engine, directory, records: Mapping[str, Record], options) -> Trace:
    with reporting.progress() as bar:
        task = bar.add_task("trace", total=len(records))
        return record(
            engine,
            directory,
            {name: each.prompt for name, each in records.items()},
            on_request=lambda held: bar.update(task, completed=held),
            **options,
        )


def _named(plan: Sequence[Planned], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as the summary holds them: with what they are of, and against native where that ran."""
    native = next((row for (name, _), row in zip(plan, rows) if name == "native"), None)
    named = []
    for (name, budget), row in zip(plan, rows, strict=True):
        variant = VARIANTS[name]
        what = {
            "target": pathlib.Path(model_flags.TARGET.value).name,
            "policy": name,
            "budget": budget,
            "group": variant.group,
            "line": variant.line,
        }
        paired = {} if native is None else ablation_rows.against_native(row, native)
        row = ablation_rows.joined(what, row, paired)
        del row["correct"]
        named.append(row)
    return named


def _write(engine, journal, trace, rows, overlaps, output: pathlib.Path) -> None:
    """The files, and the tables on the terminal."""
    summary = {
        "rows": rows,
        "overlaps": overlaps,
        "phat_by_depth": ablation_sets.commitment_by_depth(trace, engine.commitment),
        "verifications": trace.verifications,
        "settings": journal.settings,
        "device": reporting.device_description(),
        "dtype": engine_flags.DTYPE.value,
        "target": model_flags.TARGET.value,
        "draft": model_flags.DRAFT.value,
        "versions": reporting.versions(),
    } | engine_flags.offload_facts(engine)
    name = pathlib.Path(model_flags.TARGET.value).name
    where = (
        f"{name}, measured on {engine_flags.measured_on(engine)}, {len(trace.shards)} held-out "
        f"tasks (seed {_SEED.value})"
    )
    pictures = ablation_report.figures(summary, where)
    tables = ablation_report.tables(summary, where)
    parts = ablation_report.page(tables, pictures, [f"{where}, {_RECORDS.value} of each family."])
    write_json(output / "summary.json", summary)
    for file, picture in pictures.items():
        write_atomically(output / file, picture.png)
    title = f"What expert selection costs and keeps: {name}"
    write_atomically(output / "report.html", report_page.render(title, parts))
    for table in ablation_report.tables(summary, where, brief=True):
        reporting.print_table(table.title, table.rows, table.formats)
    print(f"{ablation_report.LOSSY} {ablation_report.RECALL} {ablation_report.INTERVALS}")
    print(f"Written: {output / 'report.html'}")


if __name__ == "__main__":
    reporting.run_program(main)
