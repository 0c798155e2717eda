"""The pocket checkpoint's tasks: splits, drills, true solutions and fair scoring."""

import functools
import itertools
import math
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from acceptmoe_jax.pocket import (
    arithmetic,
    drills,
    families,
    functions,
    mathematics,
    scoring,
    word_problems,
)
from acceptmoe_jax.pocket.records import Record

CODE_FAMILIES = (functions.FROM_DOCSTRING, functions.FROM_TEXT)
COUNTS = {"train": 20_000, "test": 2_000}
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@functools.cache
def records(family: str, split: str = "train") -> tuple[Record, ...]:
    return tuple(families.generate(family, split, seed=3, count=COUNTS[split]))


# Splits and seeds.


@pytest.mark.parametrize("family", families.FAMILIES)
def test_no_test_prompt_is_ever_trained(family):
    tested = {record.prompt for record in records(family, "test")}
    assert tested.isdisjoint(record.prompt for record in records(family))


@pytest.mark.parametrize("family", (word_problems.NAME, mathematics.NAME))
def test_the_numbers_of_a_test_problem_are_new_in_every_wording(family):
    def numbers(record):
        return tuple(re.findall(r"\d+", record.prompt))

    tested = set(map(numbers, records(family, "test")))
    assert () not in tested
    for other in (word_problems.NAME, mathematics.NAME):
        assert tested.isdisjoint(map(numbers, records(other)))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_test_prompts_are_distinct(family):
    tested = records(family, "test")
    assert len({record.prompt for record in tested}) == len(tested)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_training_prompts_hardly_repeat(family):
    trained = records(family)
    assert len({record.prompt for record in trained}) > 0.95 * len(trained)


def _described(record: Record) -> str:
    """The described function without the name of its argument."""
    return re.sub(r"(numbers in|from 1 to|digits of|words in) \w+", r"\1 _", _sentence(record))


def _combination(record: Record) -> str:
    """The described function without its constants too."""
    return re.sub(r"\d+", "0", re.sub("'.'", "'c'", _described(record)))


def _sentence(record: Record) -> str:
    """What the function of a prompt returns, in words."""
    if record.family == functions.FROM_DOCSTRING:
        return re.search(r'"""\w+ (.*)\."""', record.prompt)[1]
    return re.search(r"(?:returns|to return) (.*)\.$", record.prompt)[1]


def test_most_functions_of_the_test_split_combine_parts_as_training_never_does():
    trained = {_combination(record) for family in CODE_FAMILIES for record in records(family)}
    for family in CODE_FAMILIES:
        tested = [_combination(record) for record in records(family, "test")]
        new = sum(combination not in trained for combination in tested) / len(tested)
        assert new > 0.6


def test_a_tested_function_is_not_trained_by_the_other_family():
    for tested_family, trained_family in (CODE_FAMILIES, CODE_FAMILIES[::-1]):
        described = set(map(_described, records(tested_family, "test")))
        assert described.isdisjoint(map(_described, records(trained_family)))


def test_each_part_of_the_grammar_is_trained():
    text = "\n".join(record.prompt for family in CODE_FAMILIES for record in records(family))
    phrases = [aggregate.phrase for kind in functions._AGGREGATES.values() for aggregate in kind]
    phrases += [change.phrase for kind in functions._MAPS.values() for change in kind]
    phrases += [
        keep.adjective or keep.suffix for kind in functions._FILTERS.values() for keep in kind
    ]
    for phrase in phrases:
        pieces = map(re.escape, re.split(r"\{\w?\}", phrase))
        assert re.search("[^\n]*?".join(pieces), text), phrase


def test_records_are_the_same_in_another_process_with_another_hash_seed():
    program = (
        "from acceptmoe_jax.pocket import families\n"
        "for family in families.FAMILIES:\n"
        "    for split in ('train', 'test'):\n"
        "        print(families.generate(family, split, 11, 20))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = "".join(
        f"{families.generate(family, split, 11, 20)}\n"
        for family in families.FAMILIES
        for split in ("train", "test")
    )
    assert outputs == {here}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_seeds_give_different_records(family):
    one, other = (families.generate(family, "train", seed, 50) for seed in (0, 1))
    assert one != other


def test_unknown_families_and_splits_are_refused():
    with pytest.raises(ValueError, match="riddles"):
        families.generate("riddles", "train", 0, 1)
    with pytest.raises(ValueError, match="validation"):
        families.generate(mathematics.NAME, "validation", 0, 1)


# Arithmetic.


def test_drills_are_true():
    for drill in itertools.islice(drills.stream(seed=0), 5_000):
        steps = STEP.findall(drill.text)
        assert len(steps) == sum(drill.graded)
        for left, operator, right, result in steps:
            assert eval(f"{left} {operator} {right} == {result}"), drill.text


def test_drills_grade_the_results_alone():
    for drill in itertools.islice(drills.stream(seed=0), 500):
        results = [result for *_, result in STEP.findall(drill.text)]
        graded = [piece for piece, is_graded in zip(drill.pieces, drill.graded) if is_graded]
        assert graded == [f" {result}" for result in results]


@pytest.mark.parametrize("family", (word_problems.NAME, mathematics.NAME))
def test_every_step_of_a_solution_is_true_and_a_fact_of_the_drills(family):
    known = {fact for operator in "+-*/" for fact in arithmetic.facts(operator)}
    for record in records(family):
        steps = STEP.findall(record.completion)
        assert len(steps) == record.completion.count("=")
        for left, operator, right, result in steps:
            assert (int(left), operator, int(right)) in known, record
            assert eval(f"{left} {operator} {right} == {result}"), record


def test_a_word_problem_ends_with_the_result_of_its_last_step():
    for record in records(word_problems.NAME):
        *_, (_, _, _, result) = STEP.findall(record.completion)
        assert record.completion.endswith(f"\n#### {result}")
        assert record.answer == result


def test_a_word_problem_uses_each_number_of_its_prompt():
    for record in records(word_problems.NAME):
        used = {
            number
            for left, _, right, _ in STEP.findall(record.completion)
            for number in (left, right)
        }
        assert used.issuperset(re.findall(r"\d+", record.prompt))


# Each reads the answer from the wording, without the written steps.
_ORACLES = (
    (
        r"(?:Evaluate|Compute|What is|value of|Simplify|Calculate) "
        r"\$(\d(?:[\d()+ -]|\\cdot)+)\$[.?]$",
        lambda expression: eval(re.sub(r"(\d)\(", r"\1*(", expression.replace(r"\cdot", "*"))),
    ),
    (r"(?:divisor of|GCD of|divides) (\d+) and (\d+)", lambda a, b: math.gcd(int(a), int(b))),
    (r"gcd\((\d+), (\d+)\)", lambda a, b: math.gcd(int(a), int(b))),
    (
        r"(\d+) (?:is divided by|divided by|mod) (\d+), plus (\d+)",
        lambda a, b, c: int(a) % int(b) + int(c),
    ),
    (r"(\d+)% of (\d+)(?:, plus (\d+))?\.", lambda p, a, c: int(p) * int(a) / 100 + int(c or 0)),
    (
        r"frac\{(\d+)\}\{(\d+)\} \\cdot (\d+) \+ (\d+)",
        lambda a, b, c, d: int(a) * int(c) / int(b) + int(d),
    ),
    (r"(?:average|mean) of ([\d, and]+)", lambda listed: np.mean(_integers(listed))),
    (r"(?:largest of|numbers|smallest of) ([\d, ]+)", lambda listed: np.ptp(_integers(listed))),
    (r"(?:digits|digit sum) of (\d+)", lambda number: sum(map(int, number))),
    (
        r"sum (?:of two numbers is )?(\d+) and (?:their )?difference (?:is )?(\d+)",
        lambda total, gap: (int(total) - int(gap)) / 2,
    ),
    (
        r"(?:width|is) (\d+) (?:and length|by) (\d+)[.,] .*area (?:of )?(\d+)",
        lambda a, b, c: int(a) * int(b) - int(c),
    ),
    (
        r"(?:width|sides|perimeter of a) (\d+) (?:and|and length|by) (\d+)"
        r"(?:\. What is its| \w+\?|\.$)",
        lambda a, b: 2 * (int(a) + int(b)),
    ),
    (r"\$\w\(\w\) = (\d+)\w ([+-] \d+)\$.*\$\w\((\d+)\)\$", lambda a, b, x: eval(f"{a} * {x} {b}")),
    (
        r"If \$\w = (\d+)\$ and \$\w = (\d+)\$, what is \$(\d+)\w \+ (\d+)\w\$",
        lambda x, y, a, b: int(a) * int(x) + int(b) * int(y),
    ),
    (
        r"Evaluate \$(\d+)\w \+ (\d+)\w\$ for \$\w = (\d+)\$ and \$\w = (\d+)\$",
        lambda a, b, x, y: int(a) * int(x) + int(b) * int(y),
    ),
    (
        r"term (?:number )?(\d+) of the (?:arithmetic )?sequence (\d+), (\d+)",
        lambda index, first, second: int(first) + (int(index) - 1) * (int(second) - int(first)),
    ),
    (
        r"begins (\d+), (\d+), .* term (\d+)",
        lambda first, second, index: int(first) + (int(index) - 1) * (int(second) - int(first)),
    ),
    (
        r"\$(\d+)[a-z] ([+-] \d+) = (\d+)\$",
        lambda a, b, right: (int(right) - int(b.replace(" ", ""))) / int(a),
    ),
    (
        r"\$(\d+)\([a-z] ([+-] \d+)\) = (\d+)\$",
        lambda a, b, right: int(right) / int(a) - int(b.replace(" ", "")),
    ),
)


def _integers(listed: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", listed)))


def test_mathematics_answers_are_right_by_an_independent_reading_of_the_prompt():
    for record in records(mathematics.NAME):
        readings = [
            oracle(*found.groups())
            for pattern, oracle in _ORACLES
            if (found := re.search(pattern, record.prompt))
        ]
        assert readings == [int(record.answer)], record


# Code: the sentence is read and evaluated here without the grammar's own code.

_KEEPS = (
    ("even ", "", lambda x: x % 2 == 0),
    ("odd ", "", lambda x: x % 2 != 0),
    ("positive ", "", lambda x: x > 0),
    ("negative ", "", lambda x: x < 0),
    ("nonzero ", "", bool),
    ("lowercase ", "", str.islower),
    ("uppercase ", "", str.isupper),
    ("", r" greater than (\d+)", lambda x, k: x > int(k)),
    ("", r" less than (\d+)", lambda x, k: x < int(k)),
    ("", r" divisible by (\d+)", lambda x, k: not x % int(k)),
    ("", r" not divisible by (\d+)", lambda x, k: bool(x % int(k))),
    ("", r" other than (\d+)", lambda x, k: not x == int(k)),
    ("", r" between (\d+) and (\d+)", lambda x, k, m: x in range(int(k), int(m) + 1)),
    ("", r" longer than (\d+)", lambda x, k: len(x) > int(k)),
    ("", r" shorter than (\d+)", lambda x, k: len(x) < int(k)),
    ("", r" of length (\d+)", lambda x, k: len(x) == int(k)),
    ("", " starting with '(.)'", lambda x, c: x[0] == c),
    ("", " ending with '(.)'", lambda x, c: x[-1] == c),
    ("", " containing '(.)'", lambda x, c: x.count(c) > 0),
    ("", " without '(.)'", lambda x, c: x.count(c) == 0),
    ("", "", lambda x: True),
)
_CHANGES = (
    ("the squares of (.*)", lambda x: x**2),
    ("the cubes of (.*)", lambda x: x * x * x),
    ("the doubles of (.*)", lambda x: x + x),
    ("the negatives of (.*)", lambda x: 0 - x),
    ("the absolute values of (.*)", lambda x: max(x, -x)),
    ("the last digits of (.*)", lambda x: divmod(x, 10)[1]),
    (r"(.*), each plus (\d+)", lambda x, j: x + int(j)),
    (r"(.*), each minus (\d+)", lambda x, j: x - int(j)),
    (r"(.*), each times (\d+)", lambda x, j: x * int(j)),
    (r"(.*), each modulo (\d+)", lambda x, j: divmod(x, int(j))[1]),
    ("(.*), each in upper case", str.upper),
    ("(.*), each in lower case", str.lower),
    ("(.*), each reversed", lambda x: "".join(reversed(x))),
    ("the first letters of (.*)", lambda x: x[0]),
    ("the last letters of (.*)", lambda x: x[len(x) - 1]),
    (r"the first (?P<n>\d+) letters of (?P<rest>.*)", lambda x, j: "".join(list(x)[: int(j)])),
    ("the lengths of (.*)", len),
    ("the counts of '(?P<n>.)' in (?P<rest>.*)", lambda x, c: list(x).count(c)),
    ("(.*)", lambda x: x),
)
_GATHERINGS = (
    ("a list of (.*)", list),
    ("the set of (.*)", set),
    ("a sorted list of (.*)", sorted),
    ("the number of different values among (.*)", lambda items: np.unique(items).size),
    ("the first of (.*)", lambda items: items[0]),
    ("the last of (.*)", lambda items: items[len(items) - 1]),
    ("the sum of (.*)", sum),
    ("the largest of (.*)", lambda items: sorted(items)[-1]),
    ("the smallest of (.*)", lambda items: sorted(items)[0]),
    ("the average of (.*)", lambda items: math.fsum(items) / len(items)),
    ("the range of (.*)", lambda items: sorted(items)[-1] - sorted(items)[0]),
    ("the product of (.*)", math.prod),
    (r"whether any of (.*) is over (\d+)", lambda items, h: any(i > int(h) for i in items)),
    (r"whether all of (.*) are under (\d+)", lambda items, h: not any(i >= int(h) for i in items)),
    ("the longest of (.*)", lambda items: sorted(items, key=len, reverse=True)[0]),
    ("the shortest of (.*)", lambda items: sorted(items, key=len)[0]),
    ("a string joining (.*) with spaces", lambda items: " ".join(items)),
    ("a string joining (.*) with commas", lambda items: ",".join(items)),
)


def _reads(table, text):
    """The first entry of the table that reads the text: what it wraps, and its function."""
    for pattern, function in table:
        if found := re.fullmatch(pattern, text):
            named = found.groupdict()
            rest = named["rest"] if named else found[1]
            constants = [named["n"]] if named else found.groups()[1:]
            return rest, lambda x, constants=constants: function(x, *constants)
    raise AssertionError(f"cannot read {text!r}")


def _meaning(sentence: str, argument: str):
    """A function that computes what a sentence of the grammar says."""
    wrapped, gather = _reads(_GATHERINGS, sentence)
    filtered, change = _reads(_CHANGES, wrapped)
    sources = {
        f"numbers in {argument}": list,
        f"numbers from 1 to {argument}": lambda n: list(range(1, n + 1)),
        f"digits of {argument}": lambda n: [int(digit) for digit in str(n)],
        f"words in {argument}": str.split,
    }
    for place, source in sources.items():
        for adjective, suffix, keep in _KEEPS:
            if found := re.fullmatch(f"the {adjective}{place}{suffix}", filtered):
                return lambda given: gather(
                    [change(x) for x in source(given) if keep(x, *found.groups())]
                )
    raise AssertionError(f"cannot read {filtered!r}")


def _outcome(function, given):
    """The result, or None where there is none because nothing passed the filter."""
    try:
        return function(given)
    except (IndexError, ValueError, ZeroDivisionError, StopIteration):
        return None


@pytest.mark.parametrize("family", CODE_FAMILIES)
@pytest.mark.parametrize("split", ("train", "test"))
def test_reference_code_does_what_its_sentence_says(family, split):
    rng = random.Random(0)
    results = 0
    for record in records(family, split)[:600]:
        code, sentence = record.answer, _sentence(record)
        if family == functions.FROM_DOCSTRING:
            code = f"{scoring.signature(record.prompt)}\n{code}"
        namespace = {}
        exec(code, namespace)  # written by the generator, never by a model
        name, argument = re.search(r"def (\w+)\((\w+)", code).groups()
        expected = _meaning(sentence, argument)
        for _ in range(4):
            given = _example(rng, sentence, argument)
            result = _outcome(namespace[name], given)
            assert result == _outcome(expected, given), (record, given)
            results += result is not None
    assert results > 1_200


def _example(rng: random.Random, sentence: str, argument: str):
    if f"words in {argument}" in sentence:
        words = ["apple", "Sun", "tree", "RAIN", "of", "stone", "river", "A", "moss", "gleam"]
        return " ".join(rng.choices(words, k=8))
    if f"numbers in {argument}" in sentence:
        return [rng.randint(-30, 30) for _ in range(9)]
    return rng.randint(10, 40) if f"1 to {argument}" in sentence else rng.randint(1_000, 99_999)


# Scoring.


@pytest.mark.parametrize("family", families.FAMILIES)
def test_reference_solutions_score(family):
    for record in records(family, "test")[:500]:
        assert scoring.is_correct(record, record.completion)


@pytest.mark.parametrize("family", (word_problems.NAME, mathematics.NAME))
def test_another_result_does_not_score(family):
    for record in records(family, "test")[:500]:
        head, mark, tail = record.completion.rpartition(record.answer)
        assert not scoring.is_correct(record, f"{head}{int(record.answer) + 1}{tail}")
        assert not scoring.is_correct(record, head)


@pytest.mark.parametrize("family", CODE_FAMILIES)
def test_code_of_another_function_does_not_score(family):
    tested = records(family, "test")[:500]
    for record, other in zip(tested, tested[1:]):
        if family == functions.FROM_TEXT or record.answer != other.answer:
            assert not scoring.is_correct(record, other.completion)


@pytest.mark.parametrize("family", CODE_FAMILIES)
def test_broken_code_does_not_score(family):
    record = records(family, "test")[0]
    for broken in (
        "",
        record.completion + ")",
        record.completion + "\nimport os",
        "\0",
        record.completion.replace("return", "retrun"),
    ):
        assert not scoring.is_correct(record, broken)


@pytest.mark.parametrize("family", CODE_FAMILIES)
def test_layout_comments_and_a_docstring_do_not_change_the_score(family):
    record = records(family, "test")[0]
    first, *rest = record.completion.splitlines()
    if family == functions.FROM_TEXT:
        documented = [first, '    """What it does."""', *rest]
    else:
        documented = ['    """What it does."""', first, *rest]
    assert scoring.is_correct(record, "\n".join(documented))
    assert scoring.is_correct(record, record.completion + "  # done\n\n")


@pytest.mark.parametrize(
    "text, number",
    [
        ("#### 29", 29),
        ("#### $29.00.", 29),
        ("#### 70,000.", 70000),
        ("####-5", -5),
        ("#### 3\n#### 4", 4),
        ("the answer is 4", None),
        ("#### none", None),
        ("#### 5\n####", None),
    ],
)
def test_the_number_after_the_last_mark_counts(text, number):
    assert scoring.final_number(text) == number


@pytest.mark.parametrize(
    "text, boxed",
    [
        (r"\boxed{12}", "12"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{ 2 }", "2"),
        (r"\boxed{12", None),
        (r"\boxed{3}, \boxed{4", "3"),
        ("12", None),
    ],
)
def test_the_last_balanced_box_counts(text, boxed):
    assert scoring.last_boxed(text) == boxed
