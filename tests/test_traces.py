"""Traces on disk: what was recorded comes back, interrupted or not, and damage is named."""

import copy
import dataclasses
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.selection import PathTable, SelectorConfig
from acceptmoe_jax.speculation import TreeConfig
from acceptmoe_jax.traces import Trace, TraceWriter
from acceptmoe_jax.traces.recording import record, trace_settings
from acceptmoe_jax.weights.safetensors_io import SafetensorsFile, save_file
from tests import pocket, trace_cases
from tests.trace_cases import SETTINGS, requests, token_ids, write

REQUESTS = requests(0, (3, 0, 2))


def contents(directory):
    """Bytes of every file that is no leftover, by name."""
    files = [path for path in directory.iterdir() if not path.name.startswith(".")]
    return {path.name: path.read_bytes() for path in files}


def rewrite(path, change):
    """Writes a shard again after `change(tensors, metadata)`."""
    file = SafetensorsFile(path)
    tensors = {name: file.read(name) for name in file.entries}
    change(tensors, file.metadata)
    save_file(path, tensors, file.metadata)


def test_what_was_recorded_comes_back(tmp_path):
    write(tmp_path, REQUESTS)
    read = dict(Trace.open(tmp_path).requests())
    assert list(read) == list(REQUESTS)
    for prompt_id, verifications in REQUESTS.items():
        assert len(read[prompt_id]) == len(verifications)
        for field in dataclasses.fields(read[prompt_id]):
            back = getattr(read[prompt_id], field.name)
            for row, verification in zip(back, verifications, strict=True):
                np.testing.assert_array_equal(row, getattr(verification, field.name))


def test_shards_have_the_documented_types_and_shapes(tmp_path):
    write(tmp_path, REQUESTS)
    file = SafetensorsFile(tmp_path / "trace-00000.safetensors")
    assert {name: (str(e.dtype), e.shape) for name, e in file.entries.items()} == {
        "logits": ("float32", (3, 2, 9, 12)),
        "tokens": ("int32", (3, 9)),
        "parent": ("int32", (3, 9)),
        "depth": ("int32", (3, 9)),
        "score": ("float32", (3, 9)),
        "valid": ("bool", (3, 9)),
        "path": ("int32", (3, 5)),
        "length": ("int32", (3,)),
        "eligible": ("bool", (3, 2, 12)),
        "used": ("bool", (3, 2, 12)),
    }
    assert file.metadata == {"prompt_id": "p0"}


def test_the_index_says_what_was_recorded(tmp_path):
    path = PathTable(((0.0,), (-2.5, -0.5)), ((1.0,), (0.25, 0.75)))
    write(tmp_path, REQUESTS, path=path, phat=(1.0, 0.7))
    trace = Trace.open(tmp_path)
    assert trace.settings == dataclasses.replace(SETTINGS, path=path, phat=(1.0, 0.7))
    np.testing.assert_array_equal(trace.settings.commitment().phat, np.float32([1, 0.7]))
    np.testing.assert_array_equal(trace.settings.commitment().path.rates, [[1, 1], [0.25, 0.75]])
    assert [shard.verifications for shard in trace.shards] == [3, 0, 2]
    assert trace.verifications == 5


def test_one_tensor_of_all_requests_is_read_alone(tmp_path):
    write(tmp_path, REQUESTS)
    expected = [v.length for verifications in REQUESTS.values() for v in verifications]
    np.testing.assert_array_equal(Trace.open(tmp_path).tensor("length"), expected)


def test_an_empty_trace_has_empty_tensors(tmp_path):
    write(tmp_path, {})
    assert Trace.open(tmp_path).tensor("used").shape == (0, 2, 12)


def test_a_request_is_read_only_when_it_is_its_turn(tmp_path):
    write(tmp_path, REQUESTS)
    reading = Trace.open(tmp_path).requests()
    assert next(reading)[0] == "p0"
    (tmp_path / "trace-00002.safetensors").unlink()
    assert next(reading)[0] == "p1"
    with pytest.raises(UserError, match="trace-00002.safetensors does not exist"):
        next(reading)


@pytest.mark.parametrize("held", range(4))
def test_a_continued_trace_is_that_of_one_run(tmp_path, held):
    write(tmp_path / "whole", REQUESTS)
    write(tmp_path / "parts", dict(list(REQUESTS.items())[:held]))
    write(tmp_path / "parts", REQUESTS)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_what_a_killed_run_left_behind_plays_no_part(tmp_path):
    write(tmp_path / "whole", REQUESTS)
    parts = tmp_path / "parts"
    write(parts, {"p0": REQUESTS["p0"]})
    (parts / "trace-00001.safetensors").write_bytes(b"whole, but not in the index yet")
    (parts / ".trace-00002.safetensors.77.tmp").write_bytes(b"half")
    (parts / ".index.json.77.tmp").write_bytes(b"half")
    assert Trace.open(parts).verifications == 3
    write(parts, REQUESTS)
    assert contents(parts) == contents(tmp_path / "whole")


def test_a_shard_that_could_not_be_written_leaves_the_trace_as_it_was(tmp_path, monkeypatch):
    writer = write(tmp_path, {"p0": REQUESTS["p0"]})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path, *args, **options):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.numpy.save_file", lambda _, path, **options: full(path))
    with pytest.raises(OSError, match="no space left"):
        writer.add("p2", token_ids("p2"), REQUESTS["p2"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'float32', not 'bfloat16'"),
        (
            {"selector": SelectorConfig(policy="moe_spec", top_k=3, budget=7)},
            "selector.policy is 'native', not 'moe_spec'; selector.budget is None, not 7",
        ),
        ({"tree": TreeConfig(4, 2, 10)}, "tree.nodes is 9, not 10"),
        ({"phat": (1.0, 0.5)}, "phat is"),
        ({"offload": None}, "offload.slots is 6, not None"),
        ({"max_new_tokens": 31}, "max_new_tokens is 32, not 31"),
    ],
)
def test_a_trace_of_other_settings_is_not_continued(tmp_path, change, message):
    write(tmp_path, REQUESTS)
    before = contents(tmp_path)
    with pytest.raises(UserError, match="other settings") as caught:
        TraceWriter(tmp_path, dataclasses.replace(SETTINGS, **change))
    assert message in str(caught.value)
    assert contents(tmp_path) == before


def test_an_id_stands_for_one_prompt(tmp_path):
    writer = write(tmp_path, REQUESTS)
    with pytest.raises(UserError, match="another prompt with the id 'p1'"):
        writer.holds("p1", [5, 6])
    with pytest.raises(ValueError, match="'p1' has been recorded already"):
        writer.add("p1", token_ids("p1"), [])


def test_verifications_of_other_shapes_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    other = dataclasses.replace(SETTINGS, num_experts=13)
    writer = TraceWriter(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=r"logits must have shape \(2, 9, 12\), got \(2, 9, 13\)"):
        writer.add("p0", [1], [trace_cases.verification(rng, other)])
    unrecorded = dataclasses.replace(REQUESTS["p0"][0], logits=None)
    with pytest.raises(ValueError, match="logits must have shape"):
        writer.add("p0", [1], [unrecorded])


SHARD = "trace-00002.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), f"{SHARD} does not exist"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), f"{SHARD} is truncated"),
        (lambda path: path.write_bytes(b"\0"), f"{SHARD} is truncated"),
        (
            lambda path: rewrite(path, lambda tensors, _: tensors.pop("valid")),
            f"{SHARD} holds no tensor valid",
        ),
        (
            lambda path: rewrite(path, lambda tensors, _: tensors.update(depth=np.zeros((2, 9)))),
            f"{SHARD}: depth is float64",
        ),
        (
            lambda path: rewrite(
                path, lambda tensors, _: tensors.update(length=np.ones(4, np.int32))
            ),
            rf"{SHARD}: length is int32\[4\], but index.json says int32\[2\]",
        ),
        (
            lambda path: rewrite(path, lambda _, metadata: metadata.update(prompt_id="p9")),
            f"{SHARD} is of the prompt 'p9', but index.json says 'p2'",
        ),
    ],
)
def test_a_damaged_shard_is_named(tmp_path, damage, message):
    write(tmp_path, REQUESTS)
    damage(tmp_path / SHARD)
    with pytest.raises(UserError, match=message):
        Trace.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=2), "no trace of version 1"),
        (lambda index: index["settings"].pop("dtype"), "settings that are not understood.*dtype"),
        (lambda index: index["settings"].update(colour=1), "not understood.*colour"),
        (lambda index: index["settings"]["tree"].update(steps=0), "not understood.*steps"),
        (lambda index: index.pop("shards"), "list of shards"),
        (lambda index: index["shards"][1].pop("file"), "malformed shard entry"),
    ],
)
def test_a_bad_index_is_named(tmp_path, change, message):
    write(tmp_path, REQUESTS)
    index = json.loads((tmp_path / "index.json").read_text())
    change(index)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"index\.json.*{message}"):
        Trace.open(tmp_path)


def test_a_folder_without_a_trace_is_named(tmp_path):
    with pytest.raises(UserError, match="index.json does not exist"):
        Trace.open(tmp_path)


def test_an_interrupted_recording_continues_as_if_it_had_not_been(tmp_path):
    engine = pocket.engine()
    prompts = {f"p{i}": prompt for i, prompt in enumerate(pocket.prompts(1)[:3])}
    options = {"selector": "acceptmoe", "max_new_tokens": 18}
    whole = record(engine, tmp_path / "whole", prompts, **options)
    assert len(whole.shards) == 3 and whole.verifications > 3

    def stop(held):
        if held == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(engine, tmp_path / "parts", prompts, **options, on_request=stop)
    assert len(Trace.open(tmp_path / "parts").shards) == 2
    record(engine, tmp_path / "parts", prompts, **options)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_trace_whose_requests_depend_on_each_other_is_not_continued(tmp_path):
    engine = copy.copy(pocket.engine())
    engine.offload = OffloadConfig(24, keep_residency=True)
    prompts = {f"p{i}": prompt for i, prompt in enumerate(pocket.prompts(1)[:2])}
    writer = TraceWriter(tmp_path, trace_settings(engine, "acceptmoe", 18))
    writer.add("p0", engine.encode(prompts["p0"]), [])
    with pytest.raises(UserError, match="keep_residency .* cannot be continued"):
        record(engine, tmp_path, prompts, selector="acceptmoe", max_new_tokens=18)


def test_a_recording_holds_what_the_engine_counted(tmp_path):
    engine = pocket.engine()
    prompt = pocket.prompts(1)[0]
    options = {"selector": "acceptmoe", "max_new_tokens": 18}
    trace = record(engine, tmp_path, {"only": prompt}, **options)
    [generation] = engine.generate([prompt], **options, record=True)
    [(_, verifications)] = trace.requests()
    assert verifications.length.tolist() == generation.statistics.accepted_lengths
    np.testing.assert_array_equal(verifications.used.sum((0, 2)), generation.statistics.used)
    emitted = generation.token_ids
    roots = np.cumsum([0, *verifications.length[:-1]])
    assert verifications.tokens[:, 0].tolist() == [emitted[at] for at in roots]


def test_settings_name_the_pair_and_its_experts():
    engine = pocket.engine()
    settings = trace_settings(engine, "acceptmoe", 7)
    assert (settings.target_hash, settings.head_hash) == engine.model.hashes
    assert (settings.target, settings.family) == ("pocket-qwen3-moe", "qwen3_moe")
    assert settings.expert_bytes == 3 * 192 * 32 * 4  # gate, up and down in float32
    assert settings.phat == engine.commitment.phat
    assert settings.offload is None and not settings.keeps_residency


def test_without_prompts_nothing_is_recorded(tmp_path):
    done = pocket.run_program(
        "record_traces", "--target=x", "--draft=y", f"--output_dir={tmp_path}"
    )
    assert done.returncode == 1
    assert "error: give either --prompts or --pocket_prompts" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_program_started_again_writes_the_trace_of_one_run(tmp_path):
    def arguments(name):
        return (
            *(f"--target={pocket.TARGET}", f"--draft={pocket.HEAD}", "--dtype=float32"),
            *("--pocket_prompts=12", "--max_new_tokens=40", f"--output_dir={tmp_path / name}"),
        )

    whole = pocket.run_program("record_traces", *arguments("whole"))
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "experiments.record_traces", *arguments("parts")]
    killed = subprocess.Popen(command, cwd=pocket.ROOT, stderr=subprocess.DEVNULL)
    while killed.poll() is None and not (tmp_path / "parts" / "trace-00003.safetensors").exists():
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(Trace.open(tmp_path / "parts").shards) < 12
    again = pocket.run_program("record_traces", *arguments("parts"))
    assert again.returncode == 0, again.stderr
    assert "Written" in again.stdout
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
