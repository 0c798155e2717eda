"""experiments.gpu_check without a GPU: its rehearsal, and how it lives with kernels that fail."""

import functools
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.models.published import PUBLISHED
from acceptmoe_jax.offload import Counts, ResidencyTable
from acceptmoe_jax.runtime import abstract
from acceptmoe_jax.runtime.random_weights import random_weights
from acceptmoe_jax.selection import SelectorConfig, select
from experiments import gpu_offload, gpu_pocket, gpu_steps
from experiments.gpu_findings import findings
from experiments.gpu_plan import Item, Plan, Section, run_section
from pallas_kernels import parity
from pallas_kernels.compat import HAS_MOSAIC
from pallas_kernels.masked_expert_gemm import numbers
from tests import pocket, tiny_models

PLAN = Plan(rehearsal=True, kernels={}, rounds=1, sizes=(), cached=0, prompts=0, new_tokens=0)


# --- Sections ----------------------------------------------------------------------------------
# Their items are made in another process, which imports this file.


def _good():
    return [{"milliseconds": 1.5}]


def _raises():
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS\nand a stack")


def _dies():
    os._exit(7)


def _hangs():
    time.sleep(1000)


def _items_that_fail(plan):
    for name, measure in {"a": _good, "b": _raises, "c": _good, "d": _dies, "e": _good}.items():
        yield Item({"kernel": name}, measure)


def _items_that_hang(plan):
    yield Item({"kernel": "a"}, _hangs)


def _items_that_are_not_made(plan):
    raise ValueError("no such shape")
    yield


def _run(items, seconds=100.0, on_device=lambda device: None):
    section = Section("section", "A section", items, {"kernel": ""}, seconds=1)
    seen = []
    return run_section(section, PLAN, seconds, on_device, seen.append), seen


def test_a_failing_kernel_costs_its_own_row_and_a_dying_one_those_after_it():
    outcome, seen = _run(_items_that_fail)
    assert outcome.rows == [
        {"kernel": "a", "milliseconds": 1.5},
        {"kernel": "b", "error": "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"},
        {"kernel": "c", "milliseconds": 1.5},
    ]
    assert seen == ["a", "b", "c", "d"]
    assert (outcome.status, outcome.error) == ("failed", "its process ended with 7")
    assert outcome.device["platform"] == "cpu"


def test_a_hanging_section_is_ended_in_time():
    outcome, _ = _run(_items_that_hang, seconds=1.0)
    assert outcome.status == "out of time"


def test_a_section_whose_items_cannot_be_made_has_failed():
    outcome, _ = _run(_items_that_are_not_made)
    assert (outcome.status, outcome.error) == ("failed", "ValueError: no such shape")


# --- Findings ----------------------------------------------------------------------------------


def _speed(op, implementation, used, microseconds, **more):
    row = {"op": op, "shape": "qwen3-30b-a3b", "dtype": "bfloat16", "error": None}
    row |= {"implementation": implementation, "used": used, "microseconds": microseconds}
    return row | {"megabytes": 9.0 * (used or 0)} | more


def _step(method, milliseconds):
    row = {"target": "Qwen3-30B-A3B", "kernels": "triton", "moe_layers": 48, "method": method}
    return row | {"milliseconds": milliseconds, "ratio_to_native": 1.0}


ROWS = [
    *(_speed("masked_expert_gemm", "triton", used, 5.0 * used + 20) for used in (8, 28, 128)),
    *(_speed("masked_expert_gemm", "mosaic", used, 4.5 * used + 90) for used in (8, 28, 128)),
    _speed("masked_expert_gemm", "blocks", 8, None, error="RuntimeError: out of memory"),
    _speed("commitment_select", "triton", None, 10.0),
    _step("native", 12.0),
    _step("acceptmoe", 9.6),
    {"op": "tree_attention", "error": "NotImplementedError"},
]


def test_findings_are_the_slope_the_fastest_and_the_share_of_selection():
    found = {finding.name: finding for finding in findings(ROWS)}
    for finding in found.values():
        assert all(finding.columns.keys() <= row.keys() for row in finding.rows)
    mosaic, triton = found["slopes"].rows
    assert (triton["implementation"], mosaic["implementation"]) == ("triton", "mosaic")
    assert triton["microseconds_an_expert"] == pytest.approx(5)
    assert triton["fixed_microseconds"] == pytest.approx(20)
    assert triton["gigabytes_per_second"] == pytest.approx(1800)  # 9 MB in 5 us
    fastest = {row["op"]: row for row in found["fastest"].rows}
    assert fastest["masked_expert_gemm"]["fastest"] == "triton"
    assert fastest["masked_expert_gemm"]["next"] == "mosaic"
    assert fastest["commitment_select"]["next"] is None
    (share,) = found["selection_share"].rows
    assert share["share"] == pytest.approx(48 * 0.010 / 9.6)


def test_nothing_follows_from_nothing():
    assert findings([]) == []


# --- Parity ------------------------------------------------------------------------------------


def test_parity_counts_wrong_decisions_and_finds_wrong_and_missing_numbers():
    expected = {"weights": jnp.asarray([1.0, -4.0, 2.0]), "ids": jnp.asarray([3, 5])}
    same = parity.differences(expected, expected)
    assert same["largest_error"] == same["decisions_that_differ"] == 0
    off = dict(expected, weights=jnp.asarray([1.0, -4.0, 2.1]), ids=jnp.asarray([5, 3]))
    row = parity.differences(off, expected)
    assert row["largest_error"] == pytest.approx(0.1 / 4)
    assert row["decisions_that_differ"] == 2
    unwritten = dict(expected, weights=jnp.asarray([1.0, jnp.nan, 2.0]))
    assert parity.differences(unwritten, expected)["largest_error"] > 1e30


# --- Random weights ----------------------------------------------------------------------------


def test_random_weights_fill_every_leaf_with_numbers_of_the_size_of_trained_ones():
    setup = tiny_models.setup(tiny_models.GPT_OSS)
    shapes = abstract.abstract_weights(setup, jnp.bfloat16, mxfp4=True)
    some = {name: shapes.target[name] for name in ("lm_head", "norm")}  # each shape is compiled
    shapes = shapes.replace(target=some, head=None)
    weights = random_weights(shapes)
    assert jax.tree.structure(weights) == jax.tree.structure(shapes)
    for leaf, of in zip(jax.tree.leaves(weights), jax.tree.leaves(shapes)):
        assert (leaf.shape, leaf.dtype) == (of.shape, of.dtype)
    for matrix in (weights.banks[1].gate, weights.target["lm_head"]["weight"]):
        assert 0.01 < np.std(np.asarray(numbers(matrix), np.float32)) < 0.04
    np.testing.assert_array_equal(weights.banks[2].slot_of, np.arange(13))
    assert np.all(np.asarray(weights.target["norm"]["weight"]) == 1)
    first, second = (np.asarray(bank.up.blocks) for bank in weights.banks[:2])
    assert np.mean(first == second) < 0.1, "layers share their numbers"


# --- Offload -----------------------------------------------------------------------------------


def _replayed(setup, trace, method):
    """(used experts, loads) a layer and verification, the residency pruned by as it is."""
    config = SelectorConfig(policy=method, top_k=setup.target.top_k)
    depth = gpu_steps.random_tree(setup).depth
    phat = jnp.asarray(gpu_offload.PHAT)
    run = jax.jit(functools.partial(select, config=config))
    counts, verifications = Counts(), 0
    for layer in range(setup.target.num_layers):
        table = ResidencyTable(setup.target.num_experts, gpu_offload.SLOTS)
        for index, logits in enumerate(trace[:, layer]):
            if index == gpu_offload.FILLING:
                filled = table.counts
            chosen = run(logits, depth, jnp.ones(len(depth), bool), phat, table.resident)
            used = np.asarray(chosen.used_ids)[: int(chosen.used_count)]
            for wave in table.plan(used):
                table.begin(wave)
                table.finish_loads(wave)
                table.end(wave)
        counts += table.counts - filled
        verifications += len(trace) - gpu_offload.FILLING
    return (counts.hits + counts.misses) / verifications, counts.misses / verifications


def test_the_trace_uses_and_loads_about_as_many_experts_as_was_published():
    setup = abstract.published_setup(PUBLISHED["qwen3-30b-a3b"])
    setup = abstract.with_layers(setup, gpu_offload.LAYERS)
    trace = gpu_offload.logits_trace(setup, gpu_offload.FILLING + gpu_offload.COUNTED)
    assert _replayed(setup, trace, "native") == pytest.approx((62, 24.4), rel=0.15)
    assert _replayed(setup, trace, "acceptmoe") == pytest.approx((28.5, 6.4), rel=0.15)


# --- The program -------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    output = tmp_path / "out"
    done = pocket.run_program("gpu_check", f"--output_dir={output}", JAX_PLATFORMS="cpu")
    assert done.returncode == 1
    assert "error: gpu_check needs a GPU; jax sees only cpu" in done.stderr
    assert "--rehearse" in done.stderr
    assert not output.exists()


def test_what_the_time_does_not_allow_is_listed_as_not_run(tmp_path):
    done = pocket.run_program(
        "gpu_check", "--rehearse", "--minutes=0.01", f"--output_dir={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {outcome["status"] for outcome in summary["sections"].values()} == {"not run"}
    assert "transfers: not run" in done.stdout


@pytest.mark.slow
def test_the_logits_behind_a_margin_are_those_that_decoding_chose_by():
    engine = pocket.engine()
    [answer] = engine.generate(pocket.prompts(1)[:1], selector="autoregressive", max_new_tokens=9)
    for place in (0, 1, 8):
        context = answer.prompt_ids + answer.token_ids[:place]
        logits = gpu_pocket.next_logits("pocket-qwen3-moe", context)
        assert int(jnp.argmax(logits)) == answer.token_ids[place]


@pytest.mark.slow
def test_the_rehearsal_runs_every_section(tmp_path):
    done = pocket.run_program("gpu_check", "--rehearse", "--minutes=30", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rehearsal"]
    kinds = ["triton", *(["mosaic"] if HAS_MOSAIC else [])]
    assert summary["sections"].keys() == {
        *("transfers", "overlap", "steps", "offload", "pocket"),
        *(f"{what}_{kind}" for what in ("parity", "speed") for kind in kinds),
    }
    for name, outcome in summary["sections"].items():
        assert outcome["status"] == "done", (name, outcome)
        assert outcome["rows"], name
        assert not [row for row in outcome["rows"] if row.get("error")], name
    for kind in kinds:
        parities = summary["sections"][f"parity_{kind}"]["rows"]
        assert {row["op"] for row in parities} == {
            *("masked_expert_gemm", "commitment_select", "tree_attention"),
        }
        assert {row["within"] for row in parities} == {"yes"}
    for row in summary["sections"]["steps"]["rows"]:
        assert row["used"] == pytest.approx(row["imposed"], rel=0.05)
    native, acceptmoe = summary["sections"]["offload"]["rows"]
    assert (native["method"], acceptmoe["method"]) == ("native", "acceptmoe")
    assert native["waves"] > acceptmoe["waves"] >= 1
    assert native["megabytes"] > acceptmoe["megabytes"] > 0
    for row in (native, acceptmoe):
        assert row["hit_rate"] == pytest.approx(1 - row["loads"] / row["used"])
        assert 0 < row["wait_share"] < 1
    for row in summary["sections"]["pocket"]["rows"]:
        assert row["prompts_equal_to_cpu"] == row["prompts"] > 0
    assert summary["findings"].keys() >= {"slopes", "fastest"}
    report = (tmp_path / "report.md").read_text()
    titles = [line for line in report.splitlines() if line.startswith("#")]
    assert titles and all("the numbers mean nothing" in title for title in titles)
