"""Scorers of code: which part of a completion is run, and against what."""

import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation import benchmarks, scoring
from acceptmoe_jax.evaluation.tasks import Problem
from acceptmoe_jax.pocket import families, functions
from tests import evaluation_data

CODE_FAMILIES = (functions.FROM_DOCSTRING, functions.FROM_TEXT)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return evaluation_data.write_stand_in(tmp_path_factory.mktemp("data"))


# Which code of a completion is run.

BODY = "    return [math.hypot(*point) for point in points]\n"
WHOLE = "def lengths(points):\n" + BODY
HELPED = "    return [one(p) for p in points]\n\ndef one(point):\n    return math.hypot(*point)\n"
PROMPT = evaluation_data.HUMANEVAL[0]["prompt"]


def with_expression(expression):
    return WHOLE.replace("math.hypot(*point)", expression)


RIGHT = {
    "bare": BODY,
    "a helper behind": HELPED,
    "a helper before": "def one(p): return math.hypot(*p)\n\n\n" + with_expression("one(point)"),
    "a comment first": "    # by hypot\n" + BODY,
    "an empty line first": "\n" + BODY,
    "fenced whole": f"Sure:\n\n```python\n{WHOLE}```\nIt uses hypot.",
    "fenced with the prompt": f"```python\n{PROMPT}{BODY}```",
    "fenced body": f"Here is the body:\n```python\n{BODY}```",
    "fenced in a list": "1. Write:\n" + "".join(
        f"   {line}\n" for line in f"```python\n{WHOLE}```".split("\n")),
    "fence never closed": f"```python\n{WHOLE}",
    "fence closes a continuation": f"{BODY}```\nThis is it.\n```python\nlengths([])\n```",
    "an example in a second block": f"```python\n{WHOLE}```\n\n```python\nprint(lengths([]))\n```",
    "a draft in a first block": f"```\ndef lengths(points): return 1\n```\nor\n```\n{WHOLE}```",
    "whole without fence": f"Here it is:\n\n{WHOLE}\n\nThat's all!",
    "thought": f"<think>\n```python\ndef lengths(p): pass\n```\n</think>\n```python\n{WHOLE}```",
    "runs on to prose": f"{BODY}\n\nThis works because of Pythagoras.",
    "runs on to a cut function": f"{BODY}\n\ndef other(x):\n    return [x for",
    "runs on to itself": f"{BODY}\n\ndef lengths(points):\n    return 0\n",
    "runs on to examples": f"{BODY}\nprint(lengths(1))\nassert lengths([]) == 1\n",
    "runs on to main": f"{BODY}\nif __name__ == '__main__':\n    lengths(input())\n",
    "Windows line ends": BODY.replace("\n", "\r\n"),
    "a constant before": "# Mine\nTWO = 2\n" + with_expression("math.dist(point[:TWO], (0, 0))"),
    "prose and a constant before": f"Sure\n\nEmpty = []\n{WHOLE.rstrip()} + Empty",
    "a lambda": "```python\nlengths = lambda points: [math.hypot(*p) for p in points]\n```",
}  # fmt: skip
WRONG = {
    "nothing": "",
    "prose": "I would use hypot.",
    "indent lost": BODY.lstrip(),
    "another name": f"```python\n{WHOLE.replace('lengths', 'norms')}```",
    "exit at the end": f"{BODY}\nimport sys\nsys.exit(0)\n",
    "wrong": "    return []\n",
    "wrong and the tests' name": "    return []\n\ndef check(candidate):\n    pass\n",
}


@pytest.fixture(scope="module")
def humaneval_scores(data_dir):
    """All completions at once, since each takes a sandbox."""
    task = benchmarks.load_task("humaneval", data_dir)
    problem = task.problems("test")[0]
    completions = RIGHT | WRONG
    pairs = [(problem, completion) for completion in completions.values()]
    scores = scoring.score(task.scorer, pairs, allow_code_execution=True)
    return dict(zip(completions, scores, strict=True))


@pytest.mark.parametrize("case", RIGHT)
def test_right_code_is_found_in_its_surroundings(case, humaneval_scores):
    assert humaneval_scores[case].correct, humaneval_scores[case]


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_right_code_is_wrong(case, humaneval_scores):
    assert not humaneval_scores[case].correct, humaneval_scores[case]


@pytest.mark.parametrize(
    ("number", "completion", "correct"),
    [
        (3, "def sum(a, b): return a + b + 1", True),
        (3, "def sum(a, b): return a + b + bonus\n[DONE]\n\nYou are an expert: f(1)", True),
        (3, "[BEGIN]\ndef sum(a, b):\n\treturn a + b + bonus\n[DONE]", True),
        (3, "def add(a, b): return a + b + 1", False),
        (3, "def sum(a, b): return 4", False),  # the first test alone would pass
        (4, "def rising(pairs): return len([p for p in pairs if p.a < p.b])", False),  # no Pair
        (4, "class Pair:\n    def __init__(self, a, b): self.x = a < b\n"
            "def rising(pairs): return len([p for p in pairs if p.x])", True),
    ],
)  # fmt: skip
def test_mbpp_runs_all_tests_and_the_set_up(number, completion, correct, data_dir):
    task = benchmarks.load_task("mbpp", data_dir)
    pair = task.problems("all")[number], completion
    [score] = scoring.score(task.scorer, [pair], allow_code_execution=True)
    assert score.correct == correct, score


@pytest.mark.parametrize("name", ["humaneval", "mbpp", *CODE_FAMILIES])
def test_code_is_run_with_permission_only(name, data_dir, monkeypatch):
    task = benchmarks.load_task(name, data_dir, count=1)
    monkeypatch.setattr(type(task.scorer), "judge", lambda *_: pytest.fail("it was judged"))
    [problem, *_] = task.problems("test")
    with pytest.raises(UserError, match="--allow_code_execution"):
        scoring.score(task.scorer, [(problem, BODY)])


# Pocket families.


def test_pocket_code_counts_as_right_if_it_computes_the_same():
    [record] = [
        record
        for record in families.generate(functions.FROM_TEXT, "test", 0, 200)
        if record.answer.count("\n") == 1 and "return sum(" in record.answer
    ][:1]
    task = benchmarks.load_task(functions.FROM_TEXT)
    problem = Problem("0", vars(record))
    header, expression = record.answer.split("\n    return sum(")
    loop = f"    for part in list({expression}:\n        total += part\n"
    same = f"{header}\n    total = 0\n{loop}    return total"
    scores = scoring.score(
        task.scorer,
        [(problem, same), (problem, same.replace("= 0", "= 1")), (problem, record.completion)],
        allow_code_execution=True,
    )
    assert [score.correct for score in scores] == [True, False, True]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_pocket_references_are_right_and_those_of_others_wrong(family):
    task = benchmarks.load_task(family, count=4)
    problems = task.problems("test")
    completions = [problem.fields["completion"] for problem in problems]
    pairs = [*zip(problems, completions), *zip(problems, completions[1:] + completions[:1])]
    scores = scoring.score(task.scorer, pairs, allow_code_execution=True)
    assert [score.correct for score in scores] == [True] * 4 + [False] * 4
