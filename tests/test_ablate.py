"""experiments.ablate: what it compares, the numbers of its rows, and the program itself."""

import itertools
import json
import types

import numpy as np
import pytest

from acceptmoe_jax import report_page
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.journal import Journal
from acceptmoe_jax.offload.loads import Loads
from acceptmoe_jax.offload.residency import Counts
from acceptmoe_jax.offload.transfers import Traffic
from acceptmoe_jax.pocket.records import Record
from acceptmoe_jax.runtime.requests import Generation
from acceptmoe_jax.runtime.statistics import DecodeStatistics, summarise
from acceptmoe_jax.selection import SelectorConfig
from acceptmoe_jax.traces import Trace
from acceptmoe_jax.traces.replay import replay_trace
from experiments import ablation_report, ablation_rows, ablation_sets
from experiments.ablation_run import Ablation
from experiments.ablation_variants import GROUPS, VARIANTS, chosen, planned
from tests import pocket, trace_cases

KEYS = {
    *("target", "policy", "budget", "used", "recall_on_accepted_path"),
    *("agreement", "kl", "accuracy", "samples"),
}

# --- What is compared ----------------------------------------------------------------------------


def test_no_two_variants_are_the_same():
    configs = {
        name: (SelectorConfig(top_k=4, budget=24, **v.method.settings), v.per_node)
        for name, v in VARIANTS.items()
    }
    assert len(set(configs.values())) == len(configs)


def test_a_self_sizing_variant_ranks_as_its_curve_does():
    for variant in VARIANTS.values():
        if variant.group == "self_sizing":
            sized, curve = (
                {k: v for k, v in each.method.settings.items() if k not in ("policy", "size_rule")}
                for each in (variant, VARIANTS[variant.line])
            )
            assert sized == curve


def test_policies_are_chosen_by_name_and_by_group():
    assert chosen(["moe_spec", "native"], offloaded=False) == ["native", "moe_spec"]
    curves = chosen(["curves"], offloaded=False)
    assert set(curves) == {name for name, v in VARIANTS.items() if v.method.budgeted}
    assert set(chosen(None, offloaded=True)) == set(VARIANTS)
    assert {VARIANTS[name].group for name in chosen(None, offloaded=False)} == set(GROUPS[:-1])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["magic"], "--policies: 'magic' is not one of"),
        (["offloading"], "acceptmoe_no_pruning is of use with --expert_slots only"),
        ([], "--policies names no policy"),
    ],
)
def test_a_policy_that_cannot_run_is_refused(names, message):
    with pytest.raises(UserError, match=message):
        chosen(names, offloaded=False)


def test_budgets_are_brought_to_what_a_layer_has():
    plan = planned(["native", "moe_spec"], [64, 2, 12, 3, 90], top_k=4, num_experts=64)
    assert plan == [("native", None), ("moe_spec", 4), ("moe_spec", 12), ("moe_spec", 64)]


# --- The numbers of a row ------------------------------------------------------------------------


def test_a_ratio_is_of_sums_and_lies_in_its_interval():
    row = ablation_rows.measured({"x": ([3, 0, 5], [4, 0, 6]), "empty": ([0, 0], [0, 0])})
    low, high = row["intervals"]["x"]
    assert row["x"] == 0.8 and 0.75 <= low <= row["x"] <= high <= 5 / 6
    assert row["empty"] is None and row["intervals"]["empty"] is None


def answered(rng, family: str, answer: str, text: str) -> tuple[Record, Generation]:
    """A task and a made-up decoding of it, with loads."""
    statistics = DecodeStatistics(num_layers=3, max_depth=4)
    for _ in range(rng.integers(1, 6)):
        union, eligible, used = np.sort(rng.integers(2, 20, (3, 3)), axis=0)[::-1]
        counts = types.SimpleNamespace(natural_union=union, eligible=eligible, used=used)
        hits, misses, waves = map(int, rng.integers(1, 9, 3))
        loads = Loads(Counts(hits, misses, waves, misses), Traffic(bytes=misses * 70))
        length = int(rng.integers(1, 6))
        statistics.add_forward(length, counts, np.array([0, 1, 1, 2]), 0.1, loads)
        statistics.add_audit(length, length - 1, float(rng.random()), length)
    ids = tuple(range(int(rng.integers(3, 12))))
    generation = Generation((1,), ids, text, "", "stop", statistics)
    return Record(family, "?", answer, answer), generation


def test_a_live_row_says_what_the_summary_of_a_method_says():
    rng = np.random.default_rng(5)
    cases = [("word_problems", "12", "so #### 12"), ("word_problems", "7", "#### 8")]
    cases = [(f, a, t) for f, a, t in cases + [("mathematics", "3", r"\boxed{3}")]]
    records, generations = zip(*(answered(rng, *case) for case in cases))
    row = ablation_rows.live(records, generations)
    tokens = sum(len(generation.token_ids) for generation in generations)
    summary = summarise([generation.statistics for generation in generations], tokens)
    same = {"agreement": "agreement_with_native", "kl": "kl_on_accepted_rows"}
    for name in ("used", "eligible", "accepted_length", "h2d_bytes_per_token", "hit_rate", "waves"):
        same[name] = name
    for ours, theirs in same.items():
        assert row[ours] == pytest.approx(summary[theirs]), ours
        assert row["intervals"][ours][0] <= row[ours] <= row["intervals"][ours][1]
    assert row["accuracy"] == 2 / 3 and row["samples"] == 3
    assert row["accuracy_by_family"] == {"word_problems": 0.5, "mathematics": 1.0}
    assert row["correct"] == [1, 0, 1]


def test_the_difference_from_native_is_taken_pair_by_pair():
    row, native = {"correct": [1, 0, 0, 1]}, {"correct": [1, 1, 1, 1]}
    pairs = ablation_rows.against_native(row, native)
    assert pairs["accuracy_against_native"] == -0.5
    same = ablation_rows.against_native(row, row)
    assert same["intervals"]["accuracy_against_native"] == [0, 0]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Requests of several sizes, one without a verification."""
    directory = tmp_path_factory.mktemp("trace")
    trace_cases.write(directory, trace_cases.requests(7, (3, 0, 5)))
    return Trace.open(directory)


def natural_picks(logits, top_k):
    """Of each row of [T, E], its best experts."""
    return [set(np.argsort(-row, kind="stable")[:top_k].tolist()) for row in logits]


def test_a_replayed_row_counts_what_loops_count(trace):
    config = SelectorConfig(policy="moe_spec", top_k=3, budget=4)
    commitment = trace.settings.commitment()
    results = list(replay_trace(trace, commitment, config, 6, sets=True))
    lengths = [int(v.length.sum()) for _, v in trace.requests()]
    row = ablation_rows.replayed(results, lengths, expert_bytes=700)
    kept = picks = used = misses = 0
    for (_, v), result in zip(trace.requests(), results, strict=True):
        misses += int(result.misses.sum())
        for n, layer in itertools.product(range(len(v)), range(trace.settings.num_layers)):
            eligible = set(np.flatnonzero(result.eligible_set[n, layer]).tolist())
            chosen_by = natural_picks(v.logits[n, layer], 3)
            for node in v.path[n][: v.length[n]]:
                kept += len(chosen_by[node] & eligible)
                picks += 3
            used += int(result.used_set[n, layer].sum())
    assert 0 < kept < picks
    assert row["recall_on_accepted_path"] == pytest.approx(kept / picks)
    assert row["replayed_used"] == pytest.approx(used / (trace.verifications * 2))
    assert row["replayed_h2d_bytes_per_token"] == pytest.approx(misses * 700 / sum(lengths))


def test_overlaps_are_those_of_python_sets():
    rng = np.random.default_rng(2)
    sets = {name: rng.random((5, 2, 7)) < 0.4 for name in "abc"}
    sets["a"][1, 0] = sets["b"][1, 0] = False  # two empty sets are equal
    rows = ablation_sets.overlaps(sets, counts=[3, 0, 2])
    assert [(row["a"], row["b"]) for row in rows] == [("a", "b"), ("a", "c"), ("b", "c")]
    for row in rows:
        indices = []
        for n, layer in itertools.product(range(5), range(2)):
            a, b = (set(np.flatnonzero(sets[row[end]][n, layer])) for end in "ab")
            indices.append(len(a & b) / len(a | b) if a | b else 1)
        assert row["jaccard"] == pytest.approx(np.mean(indices))


def test_natural_ranks_order_experts_by_their_assignments(trace):
    ranks = ablation_sets.natural_ranks(trace, top_k=3)
    expected = []
    for _, v in trace.requests():
        for n, layer in itertools.product(range(len(v)), range(trace.settings.num_layers)):
            picks = itertools.compress(natural_picks(v.logits[n, layer], 3), v.valid[n])
            counts = np.bincount([e for row in picks for e in row], minlength=12)
            order = sorted(range(12), key=lambda expert: (-counts[expert], expert))
            expected.append([order.index(expert) for expert in range(12)])
    assert ranks.reshape(-1, 12).tolist() == expected


def test_phat_by_depth_sums_to_the_mean_accepted_length(trace):
    rows = ablation_sets.commitment_by_depth(trace, None)
    lengths = [int(length) for _, v in trace.requests() for length in v.length]
    assert [row["depth"] for row in rows] == [0, 1, 2, 3, 4] and rows[0]["phat"] == 1
    assert sum(row["phat"] for row in rows) == pytest.approx(np.mean(lengths))
    nodes = sum(int(((v.depth == 2) & v.valid).sum()) for _, v in trace.requests())
    reached = sum(length > 2 for length in lengths)
    assert rows[2]["phat_of_a_node"] == pytest.approx(reached / nodes)


# --- The run and the report ----------------------------------------------------------------------


def test_finished_rows_are_not_measured_again(tmp_path, trace):
    plan = [("native", None), ("moe_spec", 12)]
    journal = Journal(tmp_path / "rows.jsonl", {})
    journal.add("native", {"used": 1})
    journal.add("moe_spec 12", {"used": 2})
    journal.add("overlap 12: moe_spec", [{"a": "natural", "b": "moe_spec"}])
    ablation = Ablation(None, [], trace, Journal(tmp_path / "rows.jsonl", {}), {})
    assert ablation.rows(plan) == [{"used": 1}, {"used": 2}]
    assert ablation.overlaps(plan) == [{"budget": 12, "a": "natural", "b": "moe_spec"}]


def made_up(rng, name: str, budget: int | None, moved: bool) -> dict:
    """A row of the summary."""
    variant = VARIANTS[name]
    row = {
        "policy": name,
        "budget": budget,
        "group": variant.group,
        "line": variant.line,
        "samples": 8,
        "used": budget or 30.0,
    }
    numbers = ("agreement", "kl", "accuracy", "accepted_length", "recall_on_accepted_path")
    row |= {number: float(rng.random()) for number in numbers}
    if moved:
        row |= {"h2d_bytes_per_token": 1e6 * float(rng.random()), "hit_rate": 0.5, "waves": 1.0}
    row["intervals"] = {number: [0.0, 1.0] for number in numbers}
    return row


@pytest.mark.parametrize("moved", [False, True])
def test_a_report_shows_every_row_and_says_what_it_was_measured_on(trace, moved):
    rng = np.random.default_rng(4)
    plan = planned(chosen(None, moved), [12, 24], top_k=4, num_experts=64)
    rows = [made_up(rng, *each, moved) for each in plan]
    rows[0]["accuracy"] = rows[0]["intervals"]["accuracy"] = None  # as of no tasks
    overlaps = [
        {"budget": budget, "a": "natural", "b": "moe_spec", "jaccard": 0.25} for budget in (12, 24)
    ]
    summary = {
        "rows": rows,
        "overlaps": overlaps,
        "phat_by_depth": ablation_sets.commitment_by_depth(trace, None),
        "verifications": trace.verifications,
    }
    tables = ablation_report.tables(summary, "measured on a toaster")
    pictures = ablation_report.figures(summary, "measured on a toaster")
    names = {"experts.png", "commitment.png", "overlap.png"} | ({"traffic.png"} if moved else set())
    assert set(pictures) == names
    assert all("measured on a toaster" in picture.caption for picture in pictures.values())
    assert all("measured on a toaster" in table.title for table in tables)
    shown = [(row["policy"], row["budget"]) for table in tables[:2] for row in table.rows]
    assert sorted(shown, key=str) == sorted(plan, key=str)
    page = report_page.render("title", ablation_report.page(tables, pictures, ["words"]))
    assert page.count("<img") == len(pictures) and page.count("<table") == len(tables)
    assert "acceptmoe_gamma_1" in page and "lossy" in page


@pytest.mark.slow
def test_a_pocket_model_is_taken_apart_and_a_second_run_goes_on(tmp_path):
    arguments = [
        f"--target={pocket.TARGET}",
        f"--draft={pocket.HEAD}",
        "--dtype=float32",
        "--max_new_tokens=24",
        "--budgets=16",
        f"--output_dir={tmp_path}",
    ]
    first = pocket.run_program(
        "ablate", *arguments, "--records=1", "--policies=native,acceptmoe_fix"
    )
    assert first.returncode == 0, first.stderr
    held = (tmp_path / "rows.jsonl").read_text()
    policies = ("native", "acceptmoe_fix", "moe_spec", "acceptmoe_per_node")
    arguments.append(f"--policies={','.join(policies)}")
    done = pocket.run_program("ablate", *arguments, "--records=1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rows.jsonl").read_text().startswith(held)
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = {row["policy"]: row for row in summary["rows"]}
    assert set(rows) == set(policies)
    for row in rows.values():
        assert KEYS <= set(row) and row["samples"] == 4
        assert row["target"] == "pocket-qwen3-moe" and "correct" not in row
        assert None not in [row[key] for key in KEYS - {"budget"}]
    native = rows["native"]
    assert native["recall_on_accepted_path"] == native["agreement"] == 1 and native["kl"] < 1e-9
    for policy in ("acceptmoe_fix", "moe_spec"):
        assert rows[policy]["budget"] == 16 and rows[policy]["used"] <= 16
        assert rows[policy]["recall_on_accepted_path"] < 1
    assert len(summary["overlaps"]) == 3
    for name in ("experts.png", "commitment.png", "overlap.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert "http" not in page and "4 held-out tasks" in page
    other = pocket.run_program("ablate", *arguments, "--records=2")
    assert other.returncode == 1 and "Traceback" not in other.stderr
    assert "is of other settings: records is 1, not 2" in other.stderr
