"""Offloading as a user runs it: the flags, and the published comparison on a pocket checkpoint."""

import json

import pytest

from acceptmoe_jax import Engine
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.runtime import cost_model, offload_model
from pallas_kernels.devices import DEVICES
from tests import pocket

POCKETS = {
    "qwen3-moe": (pocket.TARGET, pocket.HEAD),
    "gpt-oss": (pocket.GPT_OSS_TARGET, pocket.GPT_OSS_HEAD),
}
KEYS = {
    "tokens_per_second",
    "accepted_length",
    "h2d_bytes_per_token",
    "hit_rate",
    "wait_share",
    "waves",
    "eligible",
    "used",
    "agreement_with_native",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POCKETS)
def test_a_pocket_model_answers_native_as_with_all_experts_resident(name):
    target, head = POCKETS[name]
    prompts = pocket.prompts(each=1)
    offloaded = Engine.from_pretrained(
        str(target), str(head), dtype="float32", offload=OffloadConfig(slots=24)
    )
    answers = [
        engine.generate(prompts, selector="native", max_new_tokens=24)
        for engine in (offloaded, pocket.engine(target, head))
    ]
    for ours, theirs in zip(*answers, strict=True):
        assert ours.token_ids == theirs.token_ids
    loads = answers[0][0].statistics.loads
    assert loads.table.waves > 0 and loads.traffic.bytes > 0
    assert answers[1][0].statistics.loads.table.waves == 0


@pytest.mark.slow
def test_the_published_comparison_runs_on_a_pocket_checkpoint(tmp_path):
    target, head = POCKETS["gpt-oss"]
    done = pocket.run_program(
        "offload",
        f"--target={target}",
        f"--draft={head}",
        "--dtype=float32",
        "--link_gbps=0.2",
        "--tasks=1",
        "--max_new_tokens=24",
        f"--output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    methods = summary["methods"]
    assert list(methods) == ["native", "moe_spec", "acceptmoe_no_pruning", "acceptmoe"]
    for numbers in methods.values():
        assert KEYS <= set(numbers)
        assert 0 <= numbers["wait_share"] <= 1 and 0 <= numbers["hit_rate"] <= 1
    assert methods["native"]["agreement_with_native"] == 1
    traffic = {name: numbers["h2d_bytes_per_token"] for name, numbers in methods.items()}
    assert traffic["acceptmoe"] < traffic["acceptmoe_no_pruning"] < traffic["native"]
    assert (summary["slots"], summary["experts"]) == (48, 128)
    assert summary["link_simulated"] and "simulated" in summary["link"]
    assert "simulated" in done.stdout and "Modelled, not measured" in done.stdout
    for plot in ("traffic.png", "residency.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--link_gbps=5"], "--link_gbps is of use with --expert_slots only"),
        (["--expert_slots=16", "--link_gbps=-1"], "--link_gbps: a link moves more than"),
        (["--expert_slots=2"], "slots must lie between top_k = 4 and the layer's 128 experts"),
        (["--expert_slots=200"], "128 experts, got 200"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_is_read(tmp_path, flags, message):
    target, head = POCKETS["gpt-oss"]
    done = pocket.run_program(
        "generate",
        f"--target={target}",
        f"--draft={head}",
        "--prompt=What is 2 + 3?",
        f"--output_dir={tmp_path / 'out'}",
        *flags,
    )
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


# --- The cost model against the paper ----------------------------------------------------------


def test_standard_sd_moves_what_the_paper_says():
    moved = [
        offload_model.predict(run, 0.7).transfer_milliseconds
        for run in offload_model.PUBLISHED_RUNS
    ]
    assert moved == pytest.approx([44.9, 37.9, 23.2], abs=0.06)


def test_a_prediction_worked_by_hand():
    run = offload_model.PUBLISHED_RUNS[0]
    prediction = offload_model.predict(run, 0.65)
    native = 44.896e-3 / 0.65
    reading = 48 * 9_437_184 / 1.79e12 / 4.39  # an expert in every layer, a token
    rest = native - 44.896e-3 - 62 * reading
    wait = 633 * 2**20 / 56e9
    total = rest + wait + 28.5 * reading
    assert prediction.rest_milliseconds == pytest.approx(1e3 * rest, rel=1e-3)
    assert prediction.wait_share == pytest.approx(wait / total, rel=1e-3)
    assert prediction.speed_ratio == pytest.approx(native / total, rel=1e-3)


def test_full_size_speed_adds_drafting_reading_and_loading():
    target, head = cost_model.QWEN3_30B_A3B, cost_model.QWEN3_30B_A3B_EAGLE3
    loads = offload_model.MeasuredLoads(28 / 128, 6 / 128, 1.0, 4.39)
    device = DEVICES["rtx-5090"]
    speed, waiting = offload_model.tokens_per_second(loads, target, head, device)
    reading = (target.dense_bytes + 28 * 48 * 9_437_184 + head.round_bytes()) / 1.79e12
    loading = 6 * 48 * 9_437_184 / 57e9
    assert speed == pytest.approx(4.39 / (reading + loading))
    assert waiting == pytest.approx(loading / (reading + loading))


def test_at_the_low_end_of_the_published_waiting_the_paper_is_predicted_unseen():
    low, high = offload_model.NATIVE_WAIT_SHARES
    at_low, at_high = (
        [offload_model.predict(run, share) for run in offload_model.PUBLISHED_RUNS]
        for share in (low, high)
    )
    for prediction in at_low:
        assert abs(prediction.speed_ratio_miss) < 0.1
        assert prediction.wait_share_miss == 0
    # At the other end it misses, and says by how much.
    for prediction in at_high:
        assert prediction.speed_ratio_miss > 0.2 and prediction.wait_share_miss > 0.1
