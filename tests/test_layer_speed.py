"""experiments.layer_speed, run for real at the published dimensions."""

import json

import pytest

from tests import pocket


@pytest.mark.slow
def test_layer_speed_times_every_set_size_of_the_real_layer(tmp_path):
    done = pocket.run_program(
        "layer_speed", "--used=8,120", "--rounds=1", f"--output_dir={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == {"rows", "device", "dtype"}
    assert {(row["used"], row["implementation"]) for row in summary["rows"]} == {
        (8, "blocks"),
        (120, "blocks"),
        (120, "dense"),
    }
    assert all(row["milliseconds"] > 0 for row in summary["rows"])


def test_an_impossible_set_size_is_refused(tmp_path):
    done = pocket.run_program("layer_speed", "--used=4", f"--output_dir={tmp_path / 'out'}")
    assert done.returncode == 1
    assert "error: --used" in done.stderr
    assert not (tmp_path / "out").exists()
