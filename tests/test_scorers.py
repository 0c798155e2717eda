"""Scorers: what counts as a number or a box, when it is right, and all gold answers."""

import re
import threading
from fractions import Fraction

import pytest

from acceptmoe_jax.evaluation import benchmarks, scoring
from acceptmoe_jax.evaluation.answers import final_number, last_boxed
from acceptmoe_jax.evaluation.math_equality import MathEquality
from tests import evaluation_data

# Numbers.


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The total is $29.00.", 29),
        ("#### 70,000", 70000),
        ("#### 70,000,", 70000),
        ("#### 70,000.", 70000),
        ("#### -5", -5),
        ("#### $-5", -5),
        ("-$5", -5),
        ("It is −3 degrees", -3),
        ("#### +7", 7),
        ("16-3-4", 4),
        ("5-10 years", 10),
        ("#### 18 dollars per day (7 days)", 18),
        ("#### **18**", 18),
        ("#### \\$18", 18),
        ("####18", 18),
        ("#### 5\nNo, wait.\n#### 6", 6),
        ("#### 1. First step\n5 + 5 = 10\nSo it is 10.", 10),
        ("#### Final answer: 18", 18),
        ("3 hens lay 12 eggs", 12),
        ("**$1,234,567.89**", "1234567.89"),
        ("one of 3,4,5", 5),
        ("70{,}000", 70000),
        ("70\\,000 km", 70000),
        ("US$70", 70),
        ("Rs. 500", 500),
        ("£5", 5),
        ("$.50", "0.5"),
        ("25%", 25),
        ("1/2", "1/2"),
        ("3 1/2 hours", "7/2"),
        ("50 m^2", 50),
        ("50 cm^{2}.", 50),
        ("x2 = 7", 7),
        ("1,000,", 1000),
        ("It is 5.5.", "5.5"),
        ("\\boxed{18} eggs in 3 days", 18),
        ("\\boxed{\\frac{1}{2}}", "1/2"),
        ("\\boxed{\\$29.00}", 29),
        ("9" * 5000, None),
        ("1/0", None),
        ("####", None),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_is_read_as_people_write_it(text, number):
    assert final_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{x^{2^{3}}} is it {", "x^{2^{3}}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{2", None),
        (r"boxed{2}", None),
        (r"\boxed{" * 50_000, None),
    ],
)
def test_the_last_box_that_closes_counts(text, box):
    assert last_boxed(text) == box


# Word problems and mathematics, as wholes.


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return evaluation_data.write_stand_in(tmp_path_factory.mktemp("data"))


def scored(name, number, completion, data_dir):
    task = benchmarks.load_task(name, data_dir)
    [score] = scoring.score(task.scorer, [(task.problems("test")[number], completion)])
    return score


@pytest.mark.parametrize(
    ("completion", "correct"),
    [
        (" 7000 * 10 = 70,000\n#### 70,000", True),
        ("She makes **$70,000.00**.", True),
        ("#### 70,000\n\nQuestion: How many?\nAnswer: 3\n#### 3", True),
        ("It is 70000.\n\nQ: 5 hens?\nA: 5", True),
        ("<think>Maybe 5? #### 5</think>It is 70000", True),
        ("#### 70,001", False),
        ("#### -70,000", False),
        ("70,000 is wrong, it is 7,000", False),
        ("\n\nQuestion: 70000", False),
        ("I cannot tell.", False),
    ],
)
def test_gsm8k_counts_the_answer_to_its_own_question(completion, correct, data_dir):
    assert scored("gsm8k", 0, completion, data_dir).correct == correct


def test_a_score_says_what_was_read_and_why(data_dir):
    assert scored("gsm8k", 2, "#### 14.50", data_dir) == (True, "14.5", "the answer is 14.5")
    assert scored("gsm8k", 2, "#### 15", data_dir) == (False, "15", "the answer is 14.5")
    assert scored("gsm8k", 2, "?", data_dir) == (False, None, "no answer found")


@pytest.fixture(scope="module")
def equality():
    with MathEquality() as compared:
        yield compared


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", r"\dfrac12", True),
        (r"\frac{1}{23}", r"\frac{12}{3}", False),
        ("4", r"\frac{12}{3}", True),
        ("x + 1", "1+x", True),
        ("p - q", "q - p", False),
        ("(1,2)", "(2,1)", False),
        ("1,2,3", "3,2,1", True),
        ("(1,2)", "[1,2]", False),
        ("58,500", "58500", True),
        ("10080", r"10\,080", True),
        (r"90^\circ", "90", True),
        (r"\text{Evelyn}", "Evelyn", True),
        (r"\text{even}", r"\text{odd}", False),
        ("3", "$3$.", True),
        ("-5", "5", False),
        ("5", "", False),
        ("5", r"\frac{5}{", False),
    ],
)
def test_mathematics_is_compared_by_its_meaning(gold, answer, equal, equality):
    assert equality.equal(gold, answer) == equal


def test_mathematics_is_compared_in_any_thread(equality):
    found = []
    thread = threading.Thread(target=lambda: found.append(equality.equal("0.5", r"\frac{2}{4}")))
    thread.start()
    thread.join()
    assert found == [True]


def test_an_expression_that_takes_for_ever_is_wrong_and_the_next_is_judged():
    with MathEquality(seconds=0.5) as impatient:
        assert not impatient.equal("5", "9^{9^{9^{9}}}")
        assert impatient.equal("7", "7")
        assert len(impatient._workers) == 0


MATH = {
    r"so $\boxed{\frac{1}{2}}$": True,
    r"\boxed{2}? No: \boxed{\frac12}": True,
    r"\boxed{\frac12}? No: \boxed{2}": False,
    r"\boxed{\frac{1}{2}": False,
    "The final answer is $\\frac{1}{2}$. I hope it is correct.": True,
    "\\frac{1}{2}": True,
    "\\boxed{0.5}\n\nProblem:\nWhat is 2?\n\nSolution:\n\\boxed{2}": True,
    "It is a half.\nOr is it?": False,
}


def test_math_counts_the_last_box_of_its_own_problem(data_dir):
    task = benchmarks.load_task("math500", data_dir)
    problem = task.problems("test")[0]
    scores = scoring.score(task.scorer, [(problem, completion) for completion in MATH], jobs=1)
    assert {text: score.correct for text, score in zip(MATH, scores, strict=True)} == MATH


# Gold answers.


def changed(name, fields, others):
    """A completion like the record's own whose answer is another."""
    if name == "gsm8k":
        return re.sub(r"#### (-?)([\d,.]+)", r"#### \g<1>1\g<2>", fields["answer"])
    if name == "math500":
        answer = fields["answer"]
        digit = re.search(r"\d", answer)
        if digit is None:
            answer = next(o["answer"] for o in others if o["answer"] != answer)
        else:
            changed_digit = "27"[digit[0] == "2"]
            answer = answer[: digit.start()] + changed_digit + answer[digit.end() :]
        return rf"It is $\boxed{{{answer}}}$."
    if name == "humaneval":
        return "    return NotImplemented\n" + fields["canonical_solution"]
    return re.sub(r"\breturn\b", "return NotImplemented,", fields["code"])


def gold_and_changed(name, folder, jobs=None):
    task = benchmarks.load_task(name, folder)
    problems = task.problems("all" if "all" in task.splits else "test")
    fields = [problem.fields for problem in problems]
    pairs = [(problem, evaluation_data.GOLD[name](problem.fields)) for problem in problems]
    pairs += [
        (problem, changed(name, problem.fields, fields[i:] + fields[:i]))
        for i, problem in enumerate(problems)
    ]
    scores = scoring.score(task.scorer, pairs, allow_code_execution=True, jobs=jobs)
    ids = [problem.id for problem in problems]
    right, wrong = scores[: len(ids)], scores[len(ids) :]
    return (
        [id for id, score in zip(ids, right, strict=True) if not score.correct],
        [id for id, score in zip(ids, wrong, strict=True) if score.correct],
    )


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_gold_answers_are_right_and_changed_ones_wrong(name, data_dir):
    assert gold_and_changed(name, data_dir, jobs=1) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_so_are_those_of_the_published_data_where_they_lie_beside_the_project(name, data_dir):
    """The reference code of MBPP 367 and 927 fails: their set-up code needs a class of it."""
    folder = evaluation_data.SHARED if evaluation_data.SHARED.is_dir() else data_dir
    failing = {"mbpp": ["367", "927"]}.get(name, []) if folder == evaluation_data.SHARED else []
    assert gold_and_changed(name, folder) == (failing, [])
