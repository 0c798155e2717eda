"""Tasks: where records come from, and what a model is asked."""

import gzip
import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation import benchmarks
from acceptmoe_jax.evaluation.datasets import read_records
from tests import evaluation_data

FIELDS = {
    "gsm8k": evaluation_data.GSM8K["test"],
    "math500": evaluation_data.MATH500,
    "humaneval": evaluation_data.HUMANEVAL,
    "mbpp": evaluation_data.MBPP,
    "mbpp_sanitized": evaluation_data.SANITIZED,
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return evaluation_data.write_stand_in(tmp_path_factory.mktemp("data"))


def everything(task):
    return task.problems("all" if "all" in task.splits else "test")


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_local_files_are_read_as_published(name, data_dir):
    problems = everything(benchmarks.load_task(name, data_dir))
    assert [problem.fields for problem in problems] == FIELDS[name]


def test_ids_are_those_that_predictions_use(data_dir):
    ids = {
        name: [problem.id for problem in everything(benchmarks.load_task(name, data_dir))]
        for name in benchmarks.BENCHMARKS
    }
    assert ids == {
        "gsm8k": ["0", "1", "2"],
        "math500": ["test/algebra/1.json", "test/geometry/2.json"],
        "humaneval": ["HumanEval/0", "HumanEval/1"],
        "mbpp": ["2", "3", "4", "126", "601"],
        "mbpp_sanitized": ["11"],
    }


def test_the_splits_of_mbpp_are_those_of_its_ids(data_dir):
    task = benchmarks.load_task("mbpp", data_dir)
    ids = {split: [problem.id for problem in task.problems(split)] for split in task.splits[:-1]}
    assert ids == {"prompt": ["2", "3", "4"], "test": ["126"], "validation": [], "train": ["601"]}


# As the hub lays its Parquet files out.
PARQUET = {
    "gsm8k": "gsm8k/main/test-00000-of-00001.parquet",
    "math500": "math500/data/test-00000-of-00001.parquet",
    "humaneval": "humaneval/openai_humaneval/test-00000-of-00001.parquet",
    "mbpp": "mbpp/full/test-00000-of-00001.parquet",
    "mbpp_sanitized": "mbpp/sanitized/test-00000-of-00001.parquet",
}


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_the_hubs_parquet_holds_the_same(name, tmp_path):
    path = tmp_path / PARQUET[name]
    path.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(FIELDS[name]), path)
    problems = everything(benchmarks.load_task(name, tmp_path))
    assert [problem.fields for problem in problems] == FIELDS[name]


def test_records_of_several_parquet_files_come_in_order(tmp_path):
    folder = tmp_path / "gsm8k" / "main"
    folder.mkdir(parents=True)
    records = evaluation_data.GSM8K["train"]
    for i, part in enumerate((records[:3], records[3:])):
        table = pyarrow.Table.from_pylist(part)
        pyarrow.parquet.write_table(table, folder / f"train-0000{i}-of-00002.parquet")
    problems = benchmarks.load_task("gsm8k", tmp_path).problems("train")
    assert [problem.fields for problem in problems] == records


@pytest.mark.parametrize("module", ["pyarrow.parquet", "datasets"])
def test_a_library_that_is_not_there_is_asked_for(module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test-0.parquet").touch()
    folder = None if module == "datasets" else tmp_path
    with pytest.raises(UserError, match=f"pip install {module.split('.')[0]}"):
        benchmarks.load_task("gsm8k", folder).problems("test")


def test_without_a_folder_records_come_from_the_hub(monkeypatch):
    class Hub:
        def load_dataset(self, *asked, split):
            self.asked = (*asked, split)
            return iter(evaluation_data.GSM8K["test"])

    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert len(benchmarks.load_task("gsm8k").problems("test")) == 3
    assert hub.asked == ("openai/gsm8k", "main", "test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no records"),
        ('{"question": "x"}\n', "record 0 has no 'answer'"),
        ('{"question": "x", "answer": "#### 1"}\nnope\n', "line 2: not valid JSON"),
        ("[1]\n", "line 1: not a JSON object"),
    ],
)
def test_a_bad_file_is_named_with_its_line(content, message, tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text(content)
    with pytest.raises(UserError, match=f"test.jsonl.*{message}"):
        benchmarks.load_task("gsm8k", tmp_path).problems("test")


def test_a_file_that_is_cut_is_refused(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-9])
    with pytest.raises(UserError, match="x.jsonl.gz cannot be read"):
        read_records(path)


def test_what_is_missing_is_said_by_name(tmp_path):
    with pytest.raises(UserError, match="--data_dir: .*humaneval holds neither HumanEval.jsonl.gz"):
        benchmarks.load_task("humaneval", tmp_path).problems("test")
    with pytest.raises(UserError, match="no task 'gsm9k'; there are gsm8k"):
        benchmarks.load_task("gsm9k")


# Prompts.


@pytest.mark.parametrize("name", benchmarks.TASKS)
def test_a_chat_prompt_is_one_users_message_that_holds_the_question(name, data_dir):
    task = benchmarks.load_task(name, data_dir, count=2)
    for problem in everything(task):
        [message] = task.prompt(problem, "chat")
        assert message["role"] == "user"
        question = next(problem.fields[k] for k in ("question", "problem", "text", "prompt")
                        if k in problem.fields)  # fmt: skip
        assert question.strip() in message["content"]


@pytest.mark.parametrize("name", benchmarks.TASKS)
@pytest.mark.parametrize("style", ["chat", "completion"])
def test_no_prompt_shows_its_own_answer_or_another_test_problem(name, style, data_dir):
    task = benchmarks.load_task(name, data_dir, count=3)
    problems = everything(task) if name != "mbpp" else task.problems("test")
    gold = evaluation_data.GOLD.get(name, lambda fields: fields["completion"])
    for problem in problems:
        text = json.dumps(task.prompt(problem, style))
        assert json.dumps(gold(problem.fields).strip())[1:-1] not in text
        for other in problems:
            question = other.fields.get("question") or other.fields.get("problem")
            assert other is problem or question is None or question not in text


def test_gsm8ks_examples_are_training_problems_without_marks(data_dir):
    task = benchmarks.load_task("gsm8k", data_dir)
    prompt = task.prompt(task.problems("test")[0], "completion")
    shots = task.problems("train")[:5]
    assert [shot.fields["question"] in prompt for shot in shots] == [True] * 5
    assert prompt.count("Question:") == 6 and prompt.endswith("Answer:")
    assert "#### 12" in prompt and "<<" not in prompt


def test_mbpps_prompt_is_the_published_one_and_names_the_function(data_dir):
    task = benchmarks.load_task("mbpp", data_dir)
    [problem] = task.problems("test")
    prompt = task.prompt(problem, "completion")
    assert [f"add_{n}" in prompt for n in (2, 3, 4)] == [True] * 3
    *shots, last = prompt.split("[DONE]\n\n")
    assert len(shots) == 3 and all("[BEGIN]\ndef " in shot for shot in shots)
    assert "Your code should pass these tests:\n\nassert sum(1, 2) == 4\n" in last
    assert last.endswith("[BEGIN]\n") and "\r" not in prompt
    assert "assert sum(1, 2) == 4" in task.prompt(problem, "chat")[0]["content"]


def test_mathematics_is_asked_for_in_a_box(data_dir):
    task = benchmarks.load_task("math500", data_dir)
    problem = task.problems("test")[0]
    assert r"\boxed{}" in task.prompt(problem, "chat")[0]["content"]
    assert r"\boxed{12}" in task.prompt(problem, "completion")


def test_a_humaneval_completion_goes_on_where_the_prompt_ends(data_dir):
    task = benchmarks.load_task("humaneval", data_dir)
    for problem in task.problems("test"):
        assert task.prompt(problem, "completion") == problem.fields["prompt"]


@pytest.mark.parametrize("name", ["gsm8k", "math500", "mbpp"])
def test_a_stop_string_ends_the_answer_before_the_next_example(name, data_dir):
    task = benchmarks.load_task(name, data_dir)
    problem = task.problems("test")[0]
    prompt = task.prompt(problem, "completion")
    following = "\n\n" + prompt[: prompt.index("\n")]
    if name == "mbpp":
        following = "\n[DONE]" + following
    assert any(stop in f" 3{following}" for stop in task.stop_strings)
    assert not any(stop in " 3" for stop in task.stop_strings)
