"""experiments.score, as its users run it: a predictions file in, a scores file out."""

import json
import os
import subprocess
import sys

import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation import benchmarks, intervals
from acceptmoe_jax.evaluation.predictions import read_predictions
from tests import evaluation_data, source_tree


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return evaluation_data.write_stand_in(tmp_path_factory.mktemp("data"))


def predict(path, *pairs):
    path.write_text(evaluation_data.lines([{"id": id, "completion": text} for id, text in pairs]))
    return str(path)


def run_program(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "experiments.score", *arguments],
        cwd=source_tree.ROOT,
        env=os.environ | {"COLUMNS": "140"},
        capture_output=True,
        text=True,
    )


def scores(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_out_for_each_line_in_and_a_table(data_dir, tmp_path):
    predictions = predict(
        tmp_path / "p.jsonl",
        (1, "so -5"), ("0", "#### 70,000"), (1, "#### 5"), (2, "no idea"),
    )  # fmt: skip
    done = run_program(
        "--task=gsm8k",
        f"--predictions={predictions}",
        f"--data_dir={data_dir}",
        f"--output={tmp_path / 'deep' / 'scores.jsonl'}",
    )
    assert done.returncode == 0, done.stderr
    assert scores(tmp_path / "deep" / "scores.jsonl") == [
        {"id": 1, "correct": True, "extracted": "-5", "reason": "the answer is -5"},
        {"id": "0", "correct": True, "extracted": "70000", "reason": "the answer is 70000"},
        {"id": 1, "correct": False, "extracted": "5", "reason": "the answer is -5"},
        {"id": 2, "correct": False, "extracted": None, "reason": "no answer found"},
    ]
    assert os.listdir(tmp_path / "deep") == ["scores.jsonl"]
    for shown in ("samples", "4", "problems", "3", "accuracy", "50.00%"):
        assert shown in done.stdout


def test_it_starts_without_jax(data_dir, tmp_path):
    """A scorer of text should not wait for XLA."""
    program = (
        "import sys\n"
        "from experiments import score\n"
        "from acceptmoe_jax import reporting\n"
        "sys.argv += ['--task=gsm8k', *sys.argv.pop().split()]\n"
        "try: reporting.run_program(score.main)\n"
        "finally: print('jax' in sys.modules)\n"
    )
    predictions = predict(tmp_path / "p.jsonl", (0, "70000"))
    flag_text = f"--predictions={predictions} --data_dir={data_dir} --output={tmp_path / 's.jsonl'}"
    done = subprocess.run(
        [sys.executable, "-c", program, flag_text],
        cwd=source_tree.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.endswith("False\n"), done.stderr
    assert scores(tmp_path / "s.jsonl")[0]["correct"]


@pytest.mark.parametrize(
    ("task", "id", "right", "wrong"),
    [
        ("math500", "test/algebra/1.json", r"\boxed{0.5}", r"\boxed{5}"),
        ("humaneval", "HumanEval/1", "    return ''.join(chr(ord(c) - 1) for c in s)", "    pass"),
        ("mbpp", 3, "def add_3(x): return x + 3", "def add_3(x): return 4"),
        ("mbpp_sanitized", "11", "halve = lambda x: x / 2", "halve = lambda x: x"),
    ],
)
def test_every_benchmark_is_scored_by_its_published_ids(task, id, right, wrong, data_dir, tmp_path):
    path = predict(tmp_path / "p.jsonl", (id, wrong), (id, right))
    done = run_program(
        f"--task={task}",
        f"--predictions={path}",
        f"--data_dir={data_dir}",
        f"--output={tmp_path / 'scores.jsonl'}",
        "--jobs=1",
        "--allow_code_execution",
    )
    assert done.returncode == 0, done.stderr
    found = scores(tmp_path / "scores.jsonl")
    assert [(line["id"], line["correct"]) for line in found] == [(id, False), (id, True)]
    assert all(line["extracted"] and line["reason"] for line in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "humaneval"}, "--allow_code_execution"),
        ({"task": "mbpp"}, "--allow_code_execution"),
        ({"predictions": "no/such/file"}, "--predictions: no/such/file cannot be read"),
        ({"data_dir": "no/such/folder"}, "--data_dir: no/such/folder/gsm8k"),
        ({"output": "tests"}, "--output: tests is a directory"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_what_was_there(changes, message, data_dir, tmp_path):
    old = tmp_path / "scores.jsonl"
    old.write_text("old")
    flags = {
        "task": "gsm8k",
        "predictions": predict(tmp_path / "p.jsonl", (0, "70000"), (7, "70000")),
        "data_dir": data_dir,
        "output": old,
    }
    done = run_program(*(f"--{name}={value}" for name, value in (flags | changes).items()))
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert old.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl", "scores.jsonl"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--predictions: .*holds no prediction"),
        ("nope\n", "p.jsonl, line 1: not valid JSON"),
        ('{"id": 0, "completion": "5"}\n\n[1]\n', "p.jsonl, line 3: not a JSON object"),
        ('{"completion": "5"}\n', "line 1: no id"),
        ('{"id": 1.5, "completion": "5"}\n', "line 1: no id"),
        ('{"id": true, "completion": "5"}\n', "line 1: no id"),
        ('{"id": 0}\n', "line 1: no completion"),
        ('{"id": 0, "completion": ["5"]}\n', "line 1: no completion"),
        ('{"id": 0, "completion": "5"}\n{"id": 3, "completion": "5"}\n', "line 2: .*the id 3"),
        ('{"id": -1, "completion": "5"}\n', "line 1: .*the id -1"),
        ('{"id": "00", "completion": "5"}\n', "line 1: .*the id '00'"),
    ],
)
def test_a_bad_predictions_file_is_refused_by_line(text, message, data_dir, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    problems = benchmarks.load_task("gsm8k", data_dir).problems("test")
    with pytest.raises(UserError, match=message):
        read_predictions(path, "--predictions", {problem.id: problem for problem in problems})


# The interval.


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Wilson's interval from Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_of_independent_answers_is_the_published_one(right, count, low, high):
    found = intervals.share([True] * right + [False] * (count - right), range(count))
    assert found.value == right / count
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def test_asking_the_same_again_makes_nothing_surer():
    once = intervals.share([True, False, True, True, False], range(5))
    repeated = intervals.share([True, False, True, True, False] * 4, [*range(5)] * 4)
    assert repeated == pytest.approx(once)
    alike = intervals.share([True] * 8, [0, 0, 0, 0, 1, 1, 1, 1])
    assert alike == intervals.share([True] * 2, range(2))
