"""Every kernel, compiled for GPUs that are not here."""

import json

import pytest

from pallas_kernels.compat import HAS_MOSAIC
from pallas_kernels.devices import DEVICES
from tests import pocket

FIELDS = {
    "op": str,
    "implementation": str,
    "shape": str,
    "dtype": str,
    "device": str,
    "registers": int,
    "spills": int,
    "shared_bytes": int,
    "tensor_core_instructions": int,
    "compile_seconds": float,
    "bytes": int,
    "floor_microseconds": float,
}
NAMES = {device.name: device for device in DEVICES.values()}
IMPLEMENTATIONS = {"triton", *(["mosaic"] if HAS_MOSAIC else [])}


def report(folder, *flags):
    done = pocket.run_program("kernel_report", f"--output_dir={folder}", *flags)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    written = (folder / "report.md").read_text()
    return summary, written


def check_kernels(rows):
    """No spill, shared memory that fits, and tensor cores where there are products."""
    for row in rows:
        assert {name: type(row[name]) for name in FIELDS} == FIELDS
        label = [row[name] for name in ("op", "implementation", "shape", "device")]
        device = NAMES[row["device"]]
        assert row["spills"] == 0, label
        assert 0 < row["registers"] <= 255, label
        assert row["shared_bytes"] <= device.shared_per_block, label
        assert bool(row["tensor_core_instructions"]) == row["needs_tensor_cores"], label
        assert row["floor_microseconds"] == pytest.approx(
            1e6 * row["bytes"] / device.memory_bandwidth
        )


def test_the_kernels_that_matter_compile_for_every_gpu_without_spills(tmp_path):
    summary, written = report(tmp_path, "--everyday", "--targets=")
    rows = summary["kernels"]
    check_kernels(rows)
    assert {row["device"] for row in rows} == set(NAMES)
    ops = {"commitment_select", "masked_expert_gemm", "tree_attention"}
    assert {(row["op"], row["implementation"]) for row in rows} >= {
        (op, implementation) for op in ops for implementation in IMPLEMENTATIONS
    }
    assert {row["dtype"] for row in rows} >= {"bfloat16", "mxfp4"}
    assert written.count("\n|") > len(rows)


@pytest.mark.slow
def test_every_kernel_compiles_for_every_gpu_without_spills(tmp_path):
    summary, _ = report(tmp_path, "--targets=")
    check_kernels(summary["kernels"])
    assert {row["device"] for row in summary["kernels"]} == set(NAMES)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--devices=h900", "--devices: h900 is not one of h100, h200, rtx-5090, rtx-pro-6000"),
        ("--ops=softmax", "--ops: softmax is not one of"),
        ("--targets=gpt-5", "--targets: gpt-5 is not one of qwen3-30b-a3b, gpt-oss-120b"),
    ],
)
def test_an_unknown_name_is_refused_before_anything_compiles(tmp_path, flag, message):
    done = pocket.run_program("kernel_report", f"--output_dir={tmp_path / 'out'}", flag)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
