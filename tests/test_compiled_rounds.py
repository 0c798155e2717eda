"""Whole rounds of the published targets, kernels inside, compiled for GPUs that are not here."""

import json

import pytest

from acceptmoe_jax.models.published import PUBLISHED
from tests import pocket


# One of them is enough for every day.
@pytest.mark.parametrize(
    "target",
    [
        name if place == 0 else pytest.param(name, marks=pytest.mark.slow)
        for place, name in enumerate(PUBLISHED)
    ],
)
def test_a_whole_round_with_its_kernels_fits_the_gpus_it_is_meant_for(tmp_path, target):
    done = pocket.run_program(
        "kernel_report", f"--output_dir={tmp_path}", "--ops=", f"--targets={target}"
    )
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert {row["device"] for row in steps} == {"RTX PRO 6000 Blackwell", "H200 SXM"}
    for row in steps:
        label = (row["target"], row["device"])
        assert row["fits"] and row["total_bytes"] <= row["device_bytes"], label
        assert row["aliased_bytes"] > 0, "the caches are copied"
        assert row["temporary_bytes"] < 2**30, label
        # A selection, two expert products and an attention a layer, at least.
        assert row["launches"] >= 4 * row["layers"], label
    assert "GiB" in done.stdout or "gib" in done.stdout, "the memory is printed"
