"""experiments.evaluate: its numbers against hand and loops, a run that is killed, its report."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from acceptmoe_jax import bootstrap, report_page, reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation import benchmarks, comparison, samples
from acceptmoe_jax.evaluation.comparison import Pair
from acceptmoe_jax.evaluation.tasks import Score
from acceptmoe_jax.offload.loads import Loads
from acceptmoe_jax.offload.residency import Counts
from acceptmoe_jax.offload.transfers import Traffic
from acceptmoe_jax.pocket import families
from acceptmoe_jax.runtime.requests import Generation
from acceptmoe_jax.runtime.statistics import DecodeStatistics, summarise
from acceptmoe_jax.weights.fingerprint import fingerprint
from experiments import evaluation_report
from experiments.evaluation_axes import Model, paired_models, task_names
from experiments.evaluation_run import Cell, Grid, summarised
from tests import pocket

LAYERS, STEPS = 3, 4
METHODS = ("native", "moe_spec", "acceptmoe")
WHERE = "measured on a toaster"


def generation(decoded=4, seconds=0.5, lengths=(3, 2), used=(5, 7, 9), moved=0, text="12"):
    """An answer of as many tokens after the first, with audits that all agree but for one."""
    statistics = DecodeStatistics(LAYERS, STEPS)
    for length in lengths:
        counts = types.SimpleNamespace(
            natural_union=np.array(used) + 2, eligible=np.array(used) + 1, used=np.array(used)
        )
        loads = Loads(Counts(2, 3, 1, 3), Traffic(3, moved, 1, 0.01)) if moved else Loads()
        statistics.add_forward(
            length, counts, np.array([0, 1, 1, 2]), seconds / len(lengths), loads
        )
        statistics.add_audit(length, length - 1, 0.25, length)
    return Generation((1, 2), tuple(range(decoded + 1)), text, "", "stop", statistics)


def sample(correct=True, **of_generation):
    score = Score(correct, "12", "the answer is 12")
    return json.loads(json.dumps(samples.to_json(generation(**of_generation), score)))


# --- Numbers and intervals -----------------------------------------------------------------------


def test_a_sample_is_read_back_as_it_was_counted():
    made = generation(moved=700)
    read = samples.statistics_of(sample(moved=700))
    assert vars(read).keys() == vars(made.statistics).keys()
    for name, value in vars(made.statistics).items():
        np.testing.assert_array_equal(getattr(read, name), value, err_msg=name)


def test_the_bootstrap_over_strata_is_that_of_loops():
    rng = np.random.default_rng(0)
    strata = [rng.random((count, 4)) for count in (3, 5)]
    found = bootstrap.interval(strata, bootstrap.ratio_of_ratios, level=0.8, resamples=200, seed=7)
    rng, means = np.random.default_rng(7), np.zeros(200)
    for table in strata:
        for at, drawn in enumerate(rng.integers(0, len(table), (200, len(table)))):
            a, b, c, d = (sum(table[row][column] for row in drawn) for column in range(4))
            means[at] += (a / b) / (c / d) / 2
    np.testing.assert_allclose(found, np.percentile(means, [10, 90]), rtol=1e-12)


def test_strata_without_requests_are_refused():
    for strata in ([], [np.ones((2, 2)), np.ones((0, 2))]):
        with pytest.raises(ValueError, match="a request in each"):
            bootstrap.interval(strata)


def test_differences_from_standard_sd_are_paired():
    """Two prompts. Drawn again, they are both the first, both the second, or one of each, with
    probabilities of 1/4, 1/4 and 1/2: so the ends of the intervals are those of one prompt."""
    native = {"a": sample(True, decoded=8, seconds=2.0), "b": sample(True, decoded=30, seconds=3.0)}
    method = {"a": sample(True, decoded=6, seconds=1.0), "b": sample(False, decoded=24, seconds=2)}
    row = comparison.row(method, native)
    assert row["accuracy_against_native"] == -0.5  # (1 - 1 + 0 - 1) / 2
    assert row["intervals"]["accuracy_against_native"] == (-1, 0)
    assert row["speed_against_native"] == pytest.approx((30 / 3) / (38 / 5))
    assert row["intervals"]["speed_against_native"] == pytest.approx((12 / 10, 6 / 4))
    # Prompts are paired by their ids, not by their places.
    assert comparison.row(method, dict(reversed(native.items()))) == row
    with pytest.raises(ValueError, match="different problems"):
        comparison.row({"a": method["a"]}, native)


def test_standard_sd_against_itself_is_no_difference():
    native = {"a": sample(True, seconds=2.0), "b": sample(False, decoded=30)}
    row = comparison.row(native, native)
    assert row["intervals"]["accuracy_against_native"] == (0, 0)
    assert (
        row["intervals"]["speed_against_native"] == (1, 1) and "traffic_against_native" not in row
    )


def test_a_row_says_what_the_summary_of_a_method_says():
    held = {
        "a": sample(decoded=5, lengths=(3, 3), moved=50),
        "b": sample(False, decoded=9, lengths=(4, 1, 5), used=(1, 2, 4), moved=90),
        "c": sample(decoded=1, lengths=(2,), moved=10),
    }
    statistics = [samples.statistics_of(each) for each in held.values()]
    row = comparison.row(held, None)
    for name, value in summarise(statistics, tokens=18).items():
        assert row[name] == value, name
        if name in row["intervals"]:
            low, high = row["intervals"][name]
            assert low <= value <= high, name
    moved = {"h2d_bytes_per_token", "hit_rate", "wait_share", "waves"}
    assert moved <= row["intervals"].keys()
    assert row["accuracy"] == 2 / 3 and row["correct"] == 2 and row["samples"] == 3
    low, high = row["intervals"]["accuracy"]  # Wilson's, by a table
    assert (low, high) == pytest.approx((0.2077, 0.9385), abs=1e-4)
    assert row["by_layer"]["used"] == pytest.approx(
        np.array([5 * 3 + 3, 7 * 3 + 6, 9 * 3 + 12]) / 6
    )
    assert sum(row["phat_by_depth"]) == pytest.approx(row["accepted_length"])
    assert row["phat_by_depth"][3] == 2 / 6  # accepted lengths above 3


def test_means_weigh_every_pair_the_same_and_name_the_worst():
    native = {Pair("m", task): {"a": sample(), "b": sample()} for task in ("x", "y")}
    method = {
        Pair("m", "x"): {"a": sample(decoded=8), "b": sample(False, decoded=8)},
        Pair("m", "y"): {"a": sample(), "b": sample()},
    }
    means = comparison.mean_row(method, native)
    assert means["pairs"] == 2 and means["samples"] == 4
    assert means["accuracy"] == 0.75 and means["accuracy_against_native"] == -0.25
    assert means["speed_against_native"] == 1.5  # of 2 and 1
    assert means["worst_accuracy_against_native"] == -0.5 and means["worst_pair"] == "m, x"
    assert "worst_pair" not in comparison.mean_row(method, None)


# --- The run -------------------------------------------------------------------------------------


class Engine:
    """Answers from the prompt alone; acceptmoe's mean set size is 6.5 or more."""

    def __init__(self, stops_after=None):
        self.calls = []
        self.max_length = 500
        self.tokenizer = types.SimpleNamespace(has_chat_template=False)
        target = types.SimpleNamespace(top_k=4, num_experts=13)
        self.model = types.SimpleNamespace(setup=types.SimpleNamespace(target=target))
        self._stops_after = stops_after

    def selector(self, config):
        return config

    def encode(self, prompt, chat, chat_variables):
        return tuple(prompt.encode())

    def generate(self, prompts, *, selector, seed, chat, stop_strings, **options):
        [prompt] = prompts
        if len(self.calls) == self._stops_after:
            raise KeyboardInterrupt
        self.calls.append((selector.policy, selector.budget, prompt, seed))
        made = generation(len(prompt) % 7 + 1, 0.1, (2,), (len(prompt) % 5 + 4, 6, 9))
        # The first run of a policy compiles, and is slow.
        if (selector.policy, selector.budget) not in [call[:2] for call in self.calls[:-1]]:
            made.statistics.compile_seconds = 1.0
            made.statistics.decode_seconds = 9.0
        return [made]


@pytest.fixture(autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["generate", "--target=x", "--output_dir=x"], known_only=True)
    with flagsaver.flagsaver():
        yield


@pytest.fixture
def grid(tmp_path):
    """A small one: two models, two tasks, three methods, four problems."""
    models = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        models.append(Model(name, str(tmp_path / name), None))
    tasks = [benchmarks.load_task(name, count=4) for name in ("word_problems", "mathematics")]

    def make(folder="out", engine=None, **changes):
        settings = {"dtype": "float32"}
        fields = {"models": models, "tasks": tasks, "methods": METHODS, "samples": 4, "seed": 0}
        fields |= {"style": None, "allow_code_execution": False, "settings": settings}
        fields |= {"folder": tmp_path / folder, "load": lambda model: engine}
        return Grid(**fields | changes)

    return make


def contents(folder: pathlib.Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.jsonl"))
    }


def test_a_run_that_was_stopped_anywhere_ends_as_one_that_was_not(grid, tmp_path):
    whole = Engine()
    cells = grid("whole", whole).run()
    assert len(whole.calls) > 48
    assert len(contents(tmp_path / "whole")) == 2 * 2 * 3
    for stops_after in (0, 5, 11, 12, 17, 30, 50):
        folder = f"stopped-{stops_after}"
        with pytest.raises(KeyboardInterrupt):
            grid(folder, Engine(stops_after)).run()
        again = Engine()
        assert grid(folder, again).run() == cells
        assert contents(tmp_path / folder) == contents(tmp_path / "whole")
        missing = len(whole.calls) - stops_after
        # What compiles is decoded twice, in each process.
        assert missing <= len(again.calls) <= missing + 8


def test_a_finished_run_needs_no_engine_and_more_methods_are_added(grid):
    grid(engine=Engine(), methods=("native", "acceptmoe")).run()
    added = Engine()
    grid(engine=added).run()
    assert {call[0] for call in added.calls} == {"moe_spec"}
    grid(engine=None).run()


def test_a_fresh_programs_first_run_is_not_what_is_kept(grid):
    cells = grid(engine=Engine()).run()
    kept = [
        each["statistics"]
        for by_method in cells.values()
        for cell in by_method.values()
        for each in cell.samples.values()
    ]
    assert len(kept) == 48 and {each["compile_seconds"] for each in kept} == {0.0}
    assert {each["decode_seconds"] for each in kept} == {0.1}


def test_the_budget_is_acceptmoes_mean_on_the_same_model_and_task(grid, tmp_path):
    cells = grid(engine=Engine()).run()
    budgets = set()
    for (model, task), by_method in cells.items():
        sizes = [
            size
            for each in by_method["acceptmoe"].samples.values()
            for size in each["statistics"]["eligible"]
        ]
        budget = round(np.mean(sizes))
        assert by_method["moe_spec"].budget == budget and by_method["native"].budget is None
        first = (tmp_path / "out" / model / task / "moe_spec.jsonl").read_text().splitlines()[0]
        assert json.loads(first)["settings"]["budget"] == budget
        budgets.add(budget)
    assert budgets <= set(range(4, 14))


def test_a_budget_that_is_given_lets_all_methods_take_turns(grid):
    engine = Engine()
    with flagsaver.flagsaver(budget=5):
        cells = grid(engine=engine).run()
    assert {cell["moe_spec"].budget for cell in cells.values()} == {5}
    assert {call[0] for call in engine.calls[-3:]} == set(METHODS)


def test_every_method_draws_with_the_seed_of_its_problem(grid):
    engine = Engine()
    grid(engine=engine).run()
    seeds = {}
    for _, _, prompt, seed in engine.calls:
        seeds.setdefault(prompt, set()).add(seed)
    assert all(len(each) == 1 for each in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"dtype": "bfloat16"}}, 'dtype is "float32", not "bfloat16"'),
        ({"samples": 3}, "samples is 4, not 3"),
        ({"style": "chat"}, 'style is null, not "chat"'),
    ],
)
def test_samples_of_other_settings_are_refused_by_name(grid, changes, message):
    grid(engine=Engine()).run()
    with pytest.raises(UserError, match=f"native.jsonl is of other settings: .*{message}"):
        grid(engine=Engine(), **changes).run()


def test_samples_of_another_checkpoint_are_refused(grid, tmp_path):
    grid(engine=Engine()).run()
    (tmp_path / "two" / "config.json").write_text("too")
    with pytest.raises(UserError, match="two/.*native.jsonl is of other settings: checkpoint is"):
        grid(engine=Engine()).run()


def test_another_budget_is_refused(grid):
    grid(engine=Engine()).run()
    message = "moe_spec.jsonl is of other settings: budget is .*, not 5"
    with flagsaver.flagsaver(budget=5), pytest.raises(UserError, match=message):
        grid(engine=Engine()).run()


def test_a_prompt_that_does_not_fit_is_refused_before_decoding(grid):
    engine = Engine()
    engine.max_length = 300
    with pytest.raises(UserError, match="word_problems, problem 0: its prompt has .* tokens"):
        grid(engine=engine).run()
    assert not engine.calls


def test_a_fingerprint_tells_checkpoints_apart(tmp_path):
    large = bytes(200_000)
    for name, data in {"a": large, "b": large, "c": large[:-1] + b"x"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
    prints = [fingerprint(str(tmp_path / name)) for name in "abc"]
    assert prints[0] == prints[1] != prints[2]
    (tmp_path / "b" / "notes.txt").write_text("nothing that a model is made of")
    assert fingerprint(str(tmp_path / "b")) == prints[0]


# --- The axes and the report ---------------------------------------------------------------------


def test_every_target_gets_the_draft_of_its_place():
    models = paired_models(["hub/a", "dir/b/"], ["c", "d"])
    assert models == [Model("a", "hub/a", "c"), Model("b", "dir/b/", "d")]
    assert paired_models(["a"], []) == [Model("a", "a", None)]


@pytest.mark.parametrize(
    ("targets", "drafts", "message"),
    [
        (["a", "b"], ["c"], "--drafts .* in their order: there are 2 targets and 1 drafts"),
        (["x/a", "y/a"], ["c", "d"], "--targets: two are named a"),
        ([], [], "--targets names no model"),
    ],
)
def test_models_that_do_not_pair_up_are_refused(targets, drafts, message):
    with pytest.raises(UserError, match=message):
        paired_models(targets, drafts)


def test_pocket_is_all_families():
    assert task_names(["gsm8k", "pocket", "gsm8k"]) == ["gsm8k", *families.FAMILIES]
    with pytest.raises(UserError, match="--tasks: 'chess' is not one of gsm8k, .*, pocket"):
        task_names(["gsm8k", "chess"])


def summary_of(methods, moved=0):
    cells = {
        Pair(model, task): {
            name: Cell({str(i): sample(i < 2, moved=moved) for i in range(3)}, budget)
            for name, budget in {"native": None, "moe_spec": 6, "acceptmoe": None}.items()
            if name in methods
        }
        for model in ("one", "two")
        for task in ("gsm8k", "mbpp")
    }
    return json.loads(json.dumps(summarised(cells, methods)))


@pytest.mark.parametrize("moved", [0, 2_000_000])
def test_the_table_has_the_published_shape(moved):
    table = evaluation_report.published_table(summary_of(METHODS, moved), WHERE)
    assert list(table.formats) == ["model", "task", "quantity", *METHODS] and WHERE in table.title
    groups = list(dict.fromkeys((row["model"], row["task"]) for row in table.rows))
    pairs = [(model, task) for model in ("one", "two") for task in ("gsm8k", "mbpp")]
    assert groups == [*pairs, ("Mean", "4 pairs")]
    shown = {row["quantity"]: row for row in table.rows if row["task"] == "gsm8k"}
    assert shown["accuracy %"]["native"].startswith("66.7 [20.8, 93.9]")
    assert shown["accuracy - Standard SD"]["acceptmoe"] == "0.0 [0.0, 0.0]"
    assert shown["speed / Standard SD"]["moe_spec"] == "1.00 [1.00, 1.00]"
    assert {row["moe_spec"] for row in table.rows if row["quantity"] == "samples"} == {"3", "12"}
    assert shown["budget"] == {**shown["budget"], "moe_spec": "6", "acceptmoe": None}
    traffic = {"MB a token", "traffic / Standard SD", "hit rate %", "waiting %", "waves"}
    assert traffic & shown.keys() == (traffic if moved else set())


@pytest.mark.parametrize("moved", [0, 2_000_000])
def test_the_report_holds_every_figure_and_says_what_it_was_measured_on(moved):
    summary = summary_of(METHODS, moved)
    if moved:
        summary |= {"link": "0.5 GB/s (simulated)", "link_simulated": True}
    pictures = evaluation_report.figures(summary, WHERE)
    assert set(pictures) == {"throughput.png", "accuracy.png", "layers.png", "commitment.png"} | (
        {"traffic.png"} if moved else set()
    )
    assert all(WHERE in picture.caption for picture in pictures.values())
    parts, markdown = evaluation_report.page(summary, WHERE, pictures)
    page = report_page.render("Evaluation", parts)
    assert page.count("<img") == len(pictures) and page.count("<table") == 2
    for text in (page, markdown):
        assert "lossy" in text and "samples" in text and WHERE in text
        assert ("The link is simulated: 0.5 GB/s" in text) == bool(moved)
        assert evaluation_report.NO_NATIVE not in text
    table = evaluation_report.published_table(summary, WHERE)
    assert reporting.markdown_table(table.rows, table.formats) in markdown


def test_without_standard_sd_differences_are_left_out_and_that_is_said():
    summary = summary_of(("moe_spec", "acceptmoe"))
    table = evaluation_report.published_table(summary, WHERE)
    assert not [row for row in table.rows if "Standard SD" in row["quantity"]]
    _, markdown = evaluation_report.page(summary, WHERE, {})
    assert evaluation_report.NO_NATIVE in markdown and "Worst" not in markdown


def test_a_flag_that_would_make_samples_depend_on_each_other_is_refused(tmp_path):
    done = pocket.run_program(
        "evaluate",
        "--targets=a",
        "--tasks=pocket",
        "--keep_residency",
        f"--output_dir={tmp_path / 'out'}",
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: --keep_residency is of no use here" in done.stderr
    assert not (tmp_path / "out").exists()


# --- The program itself --------------------------------------------------------------------------


def without_times(folder: pathlib.Path) -> dict[str, str]:
    return {
        name: re.sub(r'"\w+_seconds": [^,}]+', "", text)
        for name, text in contents(folder / "samples").items()
    }


@pytest.mark.slow
def test_a_killed_evaluation_of_both_pocket_models_goes_on(tmp_path):
    arguments = [
        f"--targets={pocket.TARGET},{pocket.GPT_OSS_TARGET}",
        f"--drafts={pocket.HEAD},{pocket.GPT_OSS_HEAD}",
        "--tasks=pocket",
        "--selectors=native,acceptmoe",
        "--samples=1",
        "--max_new_tokens=32",
        "--dtype=float32",
        "--allow_code_execution",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [sys.executable, "-m", "experiments.evaluate", *arguments]
    process = subprocess.Popen([*command, f"--output_dir={killed}"], cwd=pocket.ROOT)
    while len(list(killed.rglob("*.jsonl"))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "summary.json").exists()
    before = without_times(killed)
    for folder in (killed, whole):
        done = pocket.run_program("evaluate", *arguments, f"--output_dir={folder}")
        assert done.returncode == 0, done.stderr
    after = without_times(killed)
    assert before and all(after[name].startswith(text) for name, text in before.items())
    assert after == without_times(whole) and len(after) == 2 * 4 * 2
    summary = json.loads((killed / "summary.json").read_text())
    assert len(summary["rows"]) == 16 and {row["samples"] for row in summary["rows"]} == {1}
    for row in summary["means"]:
        assert row["pairs"] == 4 * 2 and row["speed_against_native"] > 0
    page = (killed / "report.html").read_text()
    assert page.count("<img") == 4 and "http" not in page and "samples a task: 1" in page
    other = pocket.run_program("evaluate", *arguments, "--seed=1", f"--output_dir={killed}")
    assert other.returncode == 1 and "Traceback" not in other.stderr
    assert "is of other settings: problems is" in other.stderr
