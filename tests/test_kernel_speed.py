"""experiments.kernel_speed and what it measures with: timing, slopes, and the ops' operands."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import measure, speed
from pallas_kernels.devices import DEVICES
from pallas_kernels.ops import OPS
from tests import pocket

# --- Measuring ---------------------------------------------------------------------------------


class Clock:
    """In place of `time.perf_counter`: time passes when a run says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def run(self, *seconds):
        """A run whose calls take so long; from then on as long as the last."""
        left = list(seconds)

        def run():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_a_median_leaves_out_the_call_that_compiles_and_the_one_that_was_disturbed(monkeypatch):
    run = Clock(monkeypatch).run(60, 1, 1, 30, 1)
    assert measure.median_seconds({"": run}, rounds=3) == {"": 1}


def test_all_variants_are_visited_in_every_round(monkeypatch):
    clock, visited, done = Clock(monkeypatch), [], []

    def variant(name):
        wait = clock.run(1)
        return lambda: visited.append(name) or wait()

    runs = {name: variant(name) for name in "abc"}
    measure.median_seconds(runs, rounds=2, on_visit=lambda: done.append(None))
    assert visited == [*"aabbcc", *"abc", *"abc"]
    assert len(done) == 3 * (2 + 1)


def test_short_calls_are_timed_many_at_a_time(monkeypatch):
    clock, calls = Clock(monkeypatch), []
    wait = clock.run(0.001)
    seconds = measure.median_seconds({"": lambda: calls.append(None) or wait()}, rounds=2)
    assert seconds[""] == pytest.approx(0.001)
    assert len(calls) == 2 + 2 * 20


def test_layers_take_turns_in_one_program_and_a_failure_stays_its_own():
    traced = []

    def good(x, y):
        traced.append(None)
        return x + y

    def bad(x, y):
        raise ValueError("no such kernel\nand more")

    layers = [(jnp.float32(at), jnp.float32(1)) for at in range(3)]
    variants = {("good", 1): (good, layers), ("good", 2): (good, layers), "bad": (bad, layers)}
    seconds, errors = measure.layered_seconds(variants, rounds=1)
    assert seconds.keys() == {("good", 1), ("good", 2)}
    assert errors == {"bad": "ValueError: no such kernel"}
    assert len(traced) == 3


def test_the_slope_is_that_of_the_least_squares():
    assert measure.slope([8, 28, 128], [50, 110, 410]) == pytest.approx((3, 26))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    ],
)
def test_a_device_is_known_by_its_kind(kind, name):
    assert measure.device_of(kind) is DEVICES[name]


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA GeForce RTX 4090"])
def test_of_other_devices_nothing_is_claimed(kind):
    assert measure.device_of(kind) is None


# --- Operands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_every_op_runs_plain_on_its_operands(op):
    bench = speed.bench(op, "awkward")
    rows = speed.speed_rows(bench, speed.plain(op, bench.dtype), 1, DEVICES["h200"])
    assert {row["implementation"] for row in rows} == set(speed.plain(op, bench.dtype))
    for row in rows:
        assert row["error"] is None
        assert row["microseconds"] > 0
        assert row["floor_microseconds"] >= row["megabytes"] * 1e6 / 4.8e12 * 1e6
        assert row["share_of_bandwidth"] > 0


def test_experts_are_measured_at_every_size_against_the_first_implementation():
    bench = speed.bench("masked_expert_gemm", "awkward", sizes=(3, 6))
    rows = speed.speed_rows(bench, ("blocks", "unheard-of"), 1, None)
    assert [(row["used"], row["implementation"]) for row in rows] == [
        (3, "blocks"),
        (3, "unheard-of"),
        (6, "blocks"),
        (6, "unheard-of"),
    ]
    assert [row["ratio_to_first"] for row in rows] == [1, None, 1, None]
    assert all("unheard-of" in row["error"] for row in rows[1::2])
    assert rows[2]["megabytes"] > 1.5 * rows[0]["megabytes"]
    assert rows[0]["share_of_bandwidth"] is None


def test_the_dense_baseline_computes_what_the_op_does():
    bench = speed.bench("masked_expert_gemm", "awkward", "float32")
    (arguments,) = bench.loads[0].layers
    expected = bench.function("reference")(*arguments)
    ours = bench.function(speed.DENSE)(*arguments)
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())


# --- The program -------------------------------------------------------------------------------


def test_kernel_speed_writes_what_it_shows(tmp_path):
    done = pocket.run_program(
        "kernel_speed",
        *("--op=masked_expert_gemm", "--shape=awkward", "--used=4,6", "--rounds=1"),
        f"--output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert [(row["used"], row["implementation"]) for row in rows] == [
        (4, "blocks"),
        (4, "dense"),
        (6, "blocks"),
        (6, "dense"),
    ]
    assert "Measured on cpu" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shape=gpt-oss-20b"], "error: --shape: 'gpt-oss-20b' is not one of qwen3-30b-a3b"),
        (["--implementations=triton"], "error: --implementations: triton needs a GPU"),
    ],
)
def test_what_cannot_run_here_is_refused(tmp_path, flags, message):
    output = tmp_path / "out"
    done = pocket.run_program(
        "kernel_speed", "--op=commitment_select", *flags, f"--output_dir={output}"
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert not output.exists()
