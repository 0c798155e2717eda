"""experiments.compare_torch against the torch and transformers installed here.

Collected only where both are installed (see conftest.py); `make check` runs it there.
"""

import json

import numpy as np
import pytest
import torch

from acceptmoe_jax.comparison.passes import visible_rows
from acceptmoe_jax.comparison.torch_target import TorchTarget
from tests import pocket
from tests.reference_cases import CHECKPOINTS, TARGET_TOLERANCE, block_name, read_case

pytestmark = pytest.mark.torch

PAIRS = {
    "qwen3_moe": (pocket.TARGET, pocket.HEAD),
    "gpt_oss": (pocket.GPT_OSS_TARGET, pocket.GPT_OSS_HEAD),
}
every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("restricted", [False, True], ids=["natural", "restricted"])
def test_a_block_is_the_one_that_was_recorded(data_dir, name, restricted):
    case = read_case(data_dir, block_name(name))
    prefix = len(case["prefix_ids"])
    theirs = TorchTarget(data_dir / name)
    sets = {layer: case["allowed"][layer] for layer in theirs.routers} if restricted else None
    done = theirs.forward(
        [*case["prefix_ids"].tolist(), *case["block_ids"].tolist()],
        np.concatenate([np.arange(prefix), prefix + case["depth"]]),
        visible_rows(prefix, case["parents"]),
        sets,
        prefix,
    )
    title = "restricted" if restricted else "natural"
    apart = np.abs(done.logits[prefix:] - case[f"{title}/logits"]).max()
    assert apart < TARGET_TOLERANCE
    for layer, logits in done.router_logits.items():
        recorded = case[f"{title}/router_logits/{layer}"]
        np.testing.assert_allclose(logits[prefix:], recorded, atol=TARGET_TOLERANCE)


@every_pair
def test_greedy_decoding_is_that_of_generate(pair):
    theirs = TorchTarget(pair[0], experts="grouped_mm")
    ids = pocket.engine(*pair).encode(pocket.prompts(1)[0])
    stops = pocket.engine(*pair).tokenizer.stop_ids
    done = theirs.decode(ids, 24, stops)
    options = dict(do_sample=False, max_new_tokens=24, eos_token_id=sorted(stops), pad_token_id=0)
    prompt = torch.tensor([ids])
    expected = theirs.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert list(done.token_ids) == expected[0, len(ids) :].tolist()


@every_pair
def test_a_pocket_model_is_the_same_here_and_in_transformers(tmp_path, pair):
    done = pocket.run_program(
        "compare_torch",
        f"--target={pair[0]}",
        f"--draft={pair[1]}",
        "--selector=acceptmoe",
        "--tasks=1",
        "--max_new_tokens=24",
        "--torch_threads=1",
        f"--output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["dtype"] == "float32"
    assert len(summary["logits"]) == len(summary["blocks"]) == summary["greedy"]["answers"] == 4
    for row in summary["logits"] + summary["blocks"]:
        assert len(row["by_position"]) == row["positions"]
        assert max(row["by_position"]) == row["max_difference"] < 1e-3
        assert row["same_top_token"] == 1
    assert min(row["same_experts"] for row in summary["routers"] + summary["blocks"]) > 0.99
    assert max(row["eligible"] for row in summary["blocks"]) < 64  # of 128: it was restricted
    assert summary["greedy"]["divergences"] == []
    ours, theirs = summary["speeds"]
    assert ours["tokens"] == theirs["tokens"] > 0
    assert min(ours["tokens_per_second"], theirs["tokens_per_second"]) > 0
    assert "torch" in done.stdout and "cpu" in done.stdout
