"""Compiles every kernel, and whole decoding steps, for GPUs that need not be there.

    python -m experiments.kernel_report --output_dir=runs/kernel_report

For each kernel, shape and device: registers, spilled bytes, shared memory and tensor-core
instructions of what the compiler made, and the least time that its bytes take at the device's
bandwidth. For each published target: the whole speculative round (all layers, a tree of 64 nodes
behind 4096 cached positions, the kernels inside), its memory, and the bytes that XLA's own kernels
move in each stage. Nothing is run, so nothing is timed but the compiler: `experiments.gpu_check`
measures where there is a GPU. Writes `report.md` and `summary.json`.

It takes jax's CUDA plugin and ptxas, which `make test` installs beside its environment; some four
minutes on two cores, one with --everyday, which compiles what `make test` looks at.
"""

import multiprocessing
import os
import pathlib
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax.numpy as jnp
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_atomically, write_json
from acceptmoe_jax.models.published import PUBLISHED
from acceptmoe_jax.runtime import abstract
from acceptmoe_jax.selection import SelectorConfig
from pallas_kernels import deviceless
from pallas_kernels.case import KernelCase
from pallas_kernels.commitment_select import cases as commitment_select
from pallas_kernels.compat import HAS_MOSAIC
from pallas_kernels.devices import DEVICES, Device
from pallas_kernels.hlo_bytes import bytes_by_stage
from pallas_kernels.implementations import KERNELS
from pallas_kernels.masked_expert_gemm import cases as masked_expert_gemm
from pallas_kernels.tree_attention import cases as tree_attention

_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the files go.", required=True)
_DEVICES = flags.DEFINE_list("devices", list(DEVICES), "GPUs to compile the kernels for.")
_STEP_DEVICES = flags.DEFINE_list(
    "step_devices", ["rtx-pro-6000", "h200"], "GPUs to compile whole rounds for."
)
_OPS = flags.DEFINE_list("ops", None, "Ops to compile; default: all.")
_TARGETS = flags.DEFINE_list("targets", list(PUBLISHED), "Published targets to compile.")
_STEP_KERNELS = flags.DEFINE_enum("step_kernels", "triton", list(KERNELS), "Kernels of the rounds.")
_EVERYDAY = flags.DEFINE_bool("everyday", False, "Only the kernels that matter most.")

_MODULES = {
    "commitment_select": commitment_select,
    "masked_expert_gemm": masked_expert_gemm,
    "tree_attention": tree_attention,
}
_WORKERS = os.cpu_count() or 1
_IMPLEMENTATIONS = ("triton", *(("mosaic", "mosaic_wgmma") if HAS_MOSAIC else ()))
CACHED = 4096  # positions before the tree

# By the name stack of the round; the first that fits.
_STAGES = {
    "draft": r"/(draft|draft_extend)/",
    "attention": r"/attention/",
    "experts": r"/experts/",
    "unembedding": r"unembed",
    "norms and residuals": r"/verify/",
    "accept and compact": r"/accept/",
}

_KERNEL_COLUMNS = {
    "op": "",
    "implementation": "",
    "shape": "",
    "dtype": "",
    "device": "",
    "registers": "d",
    "spills": "d",
    "shared_bytes": "d",
    "tensor_core_instructions": "d",
    "bytes": "d",
    "floor_microseconds": ".1f",
    "compile_seconds": ".1f",
}
_STEP_COLUMNS = {
    "target": "",
    "device": "",
    "kernels": "",
    "launches": "d",
    "weights_and_caches_gib": ".2f",
    "temporary_gib": ".2f",
    "device_gib": ".1f",
    "compile_seconds": ".1f",
}


def main() -> None:
    try:
        deviceless.enable()
    except RuntimeError as error:
        raise UserError(str(error)) from None
    cases = _cases()
    devices = _chosen("devices", _DEVICES.value, DEVICES)
    step_devices = _chosen("step_devices", _STEP_DEVICES.value, DEVICES)
    targets = _chosen("targets", _TARGETS.value, PUBLISHED)
    summary: dict[str, Any] = {"kernels": [], "steps": [], "versions": reporting.versions()}
    archs = list(dict.fromkeys(device.arch for device in devices))
    inspections = [
        (key, arch) for key, case in cases.items() for arch in archs if arch in case.archs
    ]
    spawn = multiprocessing.get_context("spawn")
    with (
        reporting.progress("{task.fields[now]}") as bar,
        # A process an inspection (see `inspect`).
        ProcessPoolExecutor(_WORKERS, mp_context=spawn, max_tasks_per_child=1) as pool,
    ):
        total = len(inspections) + len(targets) * len(step_devices)
        task = bar.add_task("kernel_report", total=total, now="kernels")
        running = [pool.submit(_inspect, *key, arch) for key, arch in inspections]
        for (key, arch), figures in zip(inspections, running):
            summary["kernels"] += _kernel_rows(cases[key], arch, devices, *figures.result())
            bar.advance(task)
        for target in targets:
            for device in step_devices:
                bar.update(task, now=f"{target.name} on {device.name}")
                summary["steps"].append(_step_row(target, device))
                bar.advance(task)
    _write(summary)


def _chosen(flag: str, names: list[str], known: dict[str, Any]) -> list[Any]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"--{flag}: {', '.join(unknown)} is not one of {', '.join(known)}")
    return [known[name] for name in names]


def _cases() -> dict[tuple[str, str, int], KernelCase]:
    """The cases asked for, by (op, implementation, place among that implementation's)."""
    ops = list(_MODULES) if _OPS.value is None else _OPS.value
    _chosen("ops", ops, _MODULES)
    return {
        (op, implementation, place): case
        for op in ops
        for implementation in _IMPLEMENTATIONS
        for place, case in enumerate(_MODULES[op].kernel_cases(implementation))
        if case.everyday or not _EVERYDAY.value
    }


def _inspect(
    op: str, implementation: str, place: int, arch: str
) -> tuple[list[deviceless.Launch], float]:
    """In a process of its own: the launches of a case for a device of an architecture."""
    deviceless.enable()
    case = _MODULES[op].kernel_cases(implementation)[place]
    device = next(device for device in DEVICES.values() if device.arch == arch)
    launches, seconds = deviceless.inspect(device, case.function, *case.arguments)
    return [launch for launch in launches if launch.name.startswith(op)], seconds


def _kernel_rows(
    case: KernelCase,
    arch: str,
    devices: list[Device],
    own: list[deviceless.Launch],
    seconds: float,
) -> list[dict[str, Any]]:
    """A row a device. Devices of one architecture run the same code, which is compiled once."""
    rows = []
    for device in devices:
        if device.arch != arch:
            continue
        rows.append(
            {
                "op": case.op,
                "implementation": case.implementation,
                "shape": case.shape,
                "dtype": case.dtype,
                "device": device.name,
                "registers": max(launch.registers for launch in own),
                "spills": sum(launch.spills for launch in own),
                "shared_bytes": max(launch.shared_bytes for launch in own),
                "tensor_core_instructions": sum(launch.tensor_core_instructions for launch in own),
                "compile_seconds": seconds,
                "bytes": case.bytes,
                "floor_microseconds": 1e6 * device.floor_seconds(case.bytes),
                "arithmetic_microseconds": 1e6 * device.floor_seconds(0, case.flops),
                "shared_limit": device.shared_per_block,
                "needs_tensor_cores": case.tensor_cores,
                "launches": [vars(launch) for launch in own],
            }
        )
    return rows


def _step_row(target, device: Device) -> dict[str, Any]:
    setup = abstract.published_setup(target, KERNELS[_STEP_KERNELS.value])
    weights = abstract.abstract_weights(setup, jnp.bfloat16, mxfp4=target.mxfp4)
    selector = SelectorConfig(policy="acceptmoe", top_k=setup.target.top_k)
    run, arguments = abstract.abstract_round(setup, weights, CACHED, jnp.bfloat16, selector)
    begin = time.perf_counter()
    compiled = deviceless.compile_for(device, run, *arguments, donate_argnums=1)
    seconds = time.perf_counter() - begin
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "target": target.name,
        "device": device.name,
        "kernels": _STEP_KERNELS.value,
        "layers": setup.target.num_layers,
        "nodes": setup.tree.nodes,
        "cached_positions": CACHED,
        "launches": hlo.count("custom-call("),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "total_bytes": total,
        "device_bytes": device.memory,
        "fits": total <= device.memory,
        "compile_seconds": seconds,
        "xla_bytes_by_stage": bytes_by_stage(hlo, _STAGES),
    }


def _write(summary: dict[str, Any]) -> None:
    steps = [
        row
        | {
            "weights_and_caches_gib": row["argument_bytes"] / 2**30,
            "temporary_gib": row["temporary_bytes"] / 2**30,
            "device_gib": row["device_bytes"] / 2**30,
        }
        for row in summary["steps"]
    ]
    stages = [
        {"target": row["target"], "device": row["device"], "stage": stage, "megabytes": moved / 1e6}
        for row in summary["steps"]
        for stage, moved in sorted(row["xla_bytes_by_stage"].items())
    ]
    tables = {
        "Compiled, not run: kernels": (summary["kernels"], _KERNEL_COLUMNS),
        f"Compiled, not run: a whole round behind {CACHED} positions": (steps, _STEP_COLUMNS),
        "By the compiled round: bytes of XLA's own kernels": (
            stages,
            {"target": "", "device": "", "stage": "", "megabytes": ".1f"},
        ),
    }
    output = pathlib.Path(_OUTPUT_DIR.value)
    write_json(output / "summary.json", summary)
    parts = []
    for title, (rows, columns) in tables.items():
        if rows:
            reporting.print_table(title, rows, columns)
            parts.append(f"## {title}\n\n{reporting.markdown_table(rows, columns)}")
    write_atomically(output / "report.md", "\n\n".join(parts) + "\n")
    print(f"Written: {output / 'report.md'}")


if __name__ == "__main__":
    reporting.run_program(main)
