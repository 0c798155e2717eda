"""Everything that only a GPU can tell, in eight minutes, without a network or a checkpoint.

    python -m experiments.gpu_check --output_dir=runs/gpu_check

Parity of every kernel with its float32 reference; the kernels' times and shares of the memory
bandwidth for 8 to 128 used experts, next to plain XLA; copies from pinned host memory and what of
them compute hides; the whole verification step of the published targets, with random weights made
on the device, at imposed natural and AcceptMoE sets; layers with experts in host memory, on a
seeded trace of routing; the pocket models' texts, against the CPU's.

Writes `summary.json` and `report.md`, both anew after each section, so that whatever ends the
program leaves what was measured. Each section has a process and a time of its own; one that fails
or takes too long is reported and the rest goes on. The fastest implementation of each op is for the
table in `pallas_kernels/implementations.py`. `--rehearse` runs all of it at small shapes on a CPU
with the kernels in interpret mode, some three minutes on two cores: its numbers mean nothing.
"""

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Mapping, Sequence

from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_atomically, write_json
from experiments import gpu_kernels, gpu_offload, gpu_pocket, gpu_steps
from experiments.gpu_findings import Finding, findings
from experiments.gpu_plan import Outcome, Plan, Row, Section, run_section
from pallas_kernels import speed
from pallas_kernels.compat import HAS_MOSAIC
from pallas_kernels.implementations import KERNELS

_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the files go.", required=True)
_MINUTES = flags.DEFINE_float("minutes", 8.0, "What is left then is not run.", lower_bound=0)
_REHEARSE = flags.DEFINE_bool("rehearse", False, "Small, on the CPU, to see that it runs.")
_SECTIONS = flags.DEFINE_list("sections", None, "Those to run; default: all.")

_KINDS = ("triton", *(("mosaic",) if HAS_MOSAIC else ()))
_SIZES = (8, 16, 28, 48, 64, 96, 120, 128)
# What the program itself takes, and the end of a section that is out of time.
_SPARE_SECONDS = 10.0


def main() -> None:
    sections, plan = _chosen_sections(), _plan()
    if plan.rehearsal:
        os.environ["JAX_PLATFORMS"] = "cpu"
    # The largest targets take nearly all of a device, of which jax would take three quarters.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    begin = time.monotonic()
    outcomes = {section.name: Outcome() for section in sections}
    for place, section in enumerate(sections):
        left = 60 * _MINUTES.value - _SPARE_SECONDS - (time.monotonic() - begin)
        seconds = min(left, max(left - _kept(sections[place + 1 :]), _kept([section])))
        if seconds > 0:
            outcomes[section.name] = _run(section, plan, seconds)
        _show(section, outcomes[section.name], plan)
        _write(sections, outcomes, plan, time.monotonic() - begin)
    for finding in _found(outcomes):
        reporting.print_table(_title(finding.title, plan), finding.rows, finding.columns)
    print(f"Written: {pathlib.Path(_OUTPUT_DIR.value) / 'report.md'}")


def _found(outcomes: Mapping[str, Outcome]) -> list[Finding]:
    return findings([row for outcome in outcomes.values() for row in outcome.rows])


def _kept(sections: Sequence[Section]) -> float:
    """Seconds that are kept for these."""
    return sum(section.seconds for section in sections) * _MINUTES.value / 8


def _run(section: Section, plan: Plan, seconds: float) -> Outcome:
    def on_device(device: Mapping[str, str]) -> None:
        if device["platform"] != "gpu" and not plan.rehearsal:
            raise UserError(
                f"gpu_check needs a GPU; jax sees only {device['description']}; --rehearse runs "
                "it small on the CPU"
            )

    with reporting.progress("{task.fields[item]}") as bar:
        task = bar.add_task(section.name, total=None, item="")
        return run_section(
            section, plan, seconds, on_device, lambda item: bar.update(task, advance=1, item=item)
        )


def _sections() -> list[Section]:
    """In the order of what is worth knowing first; the seconds are parts of eight minutes."""
    parity = [
        Section(
            f"parity_{kind}",
            f"Parity of the {kind} kernels with float32; errors over the largest number",
            functools.partial(gpu_kernels.parity, kernels=kind),
            gpu_kernels.PARITY_COLUMNS,
            seconds=45,
        )
        for kind in _KINDS
    ]
    kernels = [
        Section(
            f"speed_{kind}",
            f"One layer, {kind} kernels next to plain XLA",
            functools.partial(gpu_kernels.kernel_speed, kernels=kind),
            speed.COLUMNS,
            seconds=45,
        )
        for kind in _KINDS
    ]
    return [
        *parity[:1],
        *kernels[:1],
        Section(
            "transfers",
            "Memory, and the link to the host",
            gpu_kernels.transfers,
            gpu_kernels.TRANSFER_COLUMNS,
            seconds=20,
        ),
        Section(
            "overlap",
            "Copies from the host while experts run",
            gpu_kernels.overlap,
            gpu_kernels.OVERLAP_COLUMNS,
            seconds=20,
        ),
        Section(
            "steps",
            "The verification step of a tree, with random weights and imposed sets",
            gpu_steps.steps,
            gpu_steps.COLUMNS,
            seconds=120,
        ),
        Section(
            "offload",
            f"Experts in host memory: a verification of {gpu_offload.LAYERS} layers with "
            f"{gpu_offload.SLOTS} slots each",
            gpu_offload.offload,
            gpu_offload.COLUMNS,
            seconds=50,
        ),
        Section(
            "pocket",
            "Texts of the pocket checkpoints, against the CPU's in float32",
            gpu_pocket.pocket,
            gpu_pocket.COLUMNS,
            seconds=80,
        ),
        *parity[1:],
        *kernels[1:],
    ]


def _plan() -> Plan:
    kernels = {kind: KERNELS[kind] for kind in _KINDS}
    if not _REHEARSE.value:
        return Plan(
            rehearsal=False,
            kernels=kernels,
            rounds=7,
            sizes=_SIZES,
            cached=4096,
            prompts=12,
            new_tokens=32,
        )
    interpreted = {
        name: dataclasses.replace(chosen, interpret=True) for name, chosen in kernels.items()
    }
    return Plan(
        rehearsal=True,
        kernels=interpreted,
        rounds=1,
        sizes=(4, 6),
        cached=32,
        prompts=1,
        new_tokens=4,
    )


def _chosen_sections() -> list[Section]:
    sections = {section.name: section for section in _sections()}
    names = list(sections) if _SECTIONS.value is None else _SECTIONS.value
    unknown = [name for name in names if name not in sections]
    if unknown or not names:
        raise UserError(f"--sections: {unknown} are not among {', '.join(sections)}")
    return [section for name, section in sections.items() if name in names]


def _title(title: str, plan: Plan) -> str:
    return f"Rehearsal, the numbers mean nothing: {title}" if plan.rehearsal else title


def _how(outcome: Outcome) -> str:
    error = "" if outcome.error is None else f": {outcome.error}"
    return f"{outcome.status} ({outcome.seconds:.0f} s){error}"


def _table(section: Section, outcome: Outcome) -> tuple[list[Row], dict[str, str]]:
    """The rows and columns to print: a failed item has no numbers, and few have an error."""
    failed = any(row.get("error") for row in outcome.rows)
    columns = {key: spec for key, spec in section.columns.items() if failed or key != "error"}
    return [{key: row.get(key) for key in columns} for row in outcome.rows], columns


def _show(section: Section, outcome: Outcome, plan: Plan) -> None:
    if outcome.rows:
        reporting.print_table(_title(section.title, plan), *_table(section, outcome))
    print(f"{section.name}: {_how(outcome)}")


def _write(
    sections: Sequence[Section], outcomes: Mapping[str, Outcome], plan: Plan, seconds: float
) -> None:
    devices = [outcome.device["description"] for outcome in outcomes.values() if outcome.device]
    device = devices[0] if devices else None
    found = _found(outcomes)
    parts = [f"# {_title(f'gpu_check on {device}', plan)}\n"]
    for section in sections:
        outcome = outcomes[section.name]
        parts.append(f"## {_title(section.title, plan)}\n\n{_how(outcome)}\n")
        if outcome.rows:
            parts.append(reporting.markdown_table(*_table(section, outcome)))
    for finding in found:
        parts.append(f"## {_title(finding.title, plan)}\n")
        parts.append(reporting.markdown_table(finding.rows, finding.columns))
    summary = {
        "device": device,
        "rehearsal": plan.rehearsal,
        "seconds": seconds,
        "versions": reporting.versions(),
        "sections": {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()},
        "findings": {finding.name: finding.rows for finding in found},
    }
    output = pathlib.Path(_OUTPUT_DIR.value)
    write_json(output / "summary.json", summary)
    write_atomically(output / "report.md", "\n".join(parts))


if __name__ == "__main__":
    reporting.run_program(main)
