"""The profile of the host: what is rehearsed is what ran, and every moment counts once."""

import json

import numpy as np
import pytest

from acceptmoe_jax.runtime.compiled import CompiledPrograms
from experiments.host_times import EXPERTS, PARTS, READ, ROUTE, STAGE, TABLE, WAIT, WRITE, watched
from experiments.rehearsal import Recording, Rehearsal
from tests import pocket, tiny_models
from tests.test_offloaded import NATIVE, decode, offloaded

LAYERS = len(tiny_models.TARGET.moe_layers)
ROUNDS = 3


@pytest.fixture(scope="module")
def recorded():
    """(recording, runner, its table's counts) of one request."""
    recording, runner = Recording(), offloaded(slots=7)
    with recording.listening():
        decode(runner, NATIVE, rounds=ROUNDS)
    return recording, runner


@pytest.fixture(scope="module")
def rehearsal(recorded):
    recording, runner = recorded
    return Rehearsal(recording, runner, tiny_models.weights())


def test_a_recording_has_what_every_layer_of_every_round_told(recorded):
    (request,) = recorded[0].requests
    assert request.rounds == ROUNDS
    assert len(request.told) == ROUNDS * LAYERS


def test_a_rehearsal_asks_the_tables_and_the_link_for_the_same(recorded, rehearsal):
    _, runner = recorded
    before = rehearsal.runner.loads
    rehearsal.run()
    again = rehearsal.runner.loads - before
    assert again.table == runner.loads.table
    assert again.traffic.loads == runner.loads.traffic.loads > 0
    assert again.traffic.flushes == runner.loads.traffic.flushes


def test_a_rehearsal_calls_the_programs_of_the_rounds_and_no_others(
    monkeypatch, recorded, rehearsal
):
    _, runner = recorded
    run, calls = CompiledPrograms.run, []

    def noted(programs, key, *args, **options):
        calls.append(key)
        return run(programs, key, *args, **options)

    monkeypatch.setattr(CompiledPrograms, "run", noted)
    rehearsal.run()
    rehearsed = calls.copy()
    calls.clear()
    decode(runner, NATIVE, rounds=ROUNDS)
    assert calls[-len(rehearsed) :] == rehearsed


def test_every_moment_of_a_round_counts_for_one_part(rehearsal):
    with watched() as layers:
        rehearsal.run()
    assert len(layers.samples) == ROUNDS * LAYERS
    assert len(layers.forwards) == len(layers.loads) == ROUNDS
    assert set().union(*layers.samples) == set(PARTS)
    by_round = np.reshape([sum(sample.values()) for sample in layers.samples], (ROUNDS, LAYERS))
    np.testing.assert_allclose(by_round.sum(1), layers.forwards, rtol=1e-6)
    assert all(sample[part] > 0 for sample in layers.samples for part in (ROUTE, READ, EXPERTS))
    first = layers.samples[0]  # loads, since its table was empty
    assert all(first[part] > 0 for part in (TABLE, STAGE, WAIT, WRITE))


def test_what_is_watched_is_as_before_afterwards(rehearsal):
    before = vars(CompiledPrograms)["run"]
    with watched():
        assert vars(CompiledPrograms)["run"] is not before
    assert vars(CompiledPrograms)["run"] is before


def test_without_a_draft_there_is_nothing_to_profile(tmp_path):
    done = pocket.run_program(
        "offload_profile", f"--target={pocket.GPT_OSS_TARGET}", f"--output_dir={tmp_path}"
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: --draft is needed")


@pytest.mark.slow
def test_the_profile_of_a_pocket_checkpoint(tmp_path):
    done = pocket.run_program(
        "offload_profile",
        f"--target={pocket.GPT_OSS_TARGET}",
        f"--draft={pocket.GPT_OSS_HEAD}",
        "--dtype=float32",
        "--tasks=1",
        "--passes=2",
        "--max_new_tokens=12",
        f"--output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["methods"]) == ["native", "acceptmoe"]
    for profile in summary["methods"].values():
        assert [row["part"] for row in profile["parts"]] == [*PARTS, "sum"]
        assert profile["whole"]["host_ms"] <= profile["whole"]["host_ms_90th"]
        assert profile["whole"]["loads"] > 0
    assert (summary["slots"], summary["link_simulated"]) == (48, False)
    assert (tmp_path / "profile.md").read_text().count("## ") == 3
