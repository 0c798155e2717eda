"""Grade-school word problems whose answers write each arithmetic step and end in `#### N`."""

import dataclasses
import random
from collections.abc import Callable

from acceptmoe_jax.pocket.arithmetic import addends, factor_pair, step, value
from acceptmoe_jax.pocket.records import Drawn, Record, numbers_in_test

NAME = "word_problems"

_GIRLS = (
    "Anna",
    "Maria",
    "Lily",
    "Emma",
    "Sara",
    "Nina",
    "Julia",
    "Kate",
    "Rosa",
    "Mia",
    "Zoe",
    "Ella",
    "Ruth",
    "Grace",
    "Clara",
    "Alice",
)
_BOYS = (
    "Tom",
    "Ben",
    "Max",
    "Sam",
    "Leo",
    "Paul",
    "Jack",
    "Mark",
    "Omar",
    "Ali",
    "David",
    "Peter",
    "Noah",
    "Hugo",
    "Adam",
    "Carl",
)
_THINGS = (
    "apples",
    "books",
    "pens",
    "stamps",
    "coins",
    "cards",
    "cookies",
    "shells",
    "marbles",
    "oranges",
    "pencils",
    "stickers",
    "flowers",
    "stones",
    "candles",
    "buttons",
    "cups",
    "toys",
    "eggs",
    "muffins",
    "tickets",
    "photos",
    "plates",
    "balls",
    "pears",
    "rolls",
)
_HOLDERS = (
    "boxes",
    "bags",
    "baskets",
    "shelves",
    "drawers",
    "packs",
    "trays",
    "rows",
    "piles",
    "crates",
    "jars",
    "tables",
)
_PLACES = (
    "shop",
    "market",
    "school",
    "farm",
    "library",
    "park",
    "museum",
    "club",
    "fair",
    "station",
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

Steps = tuple[tuple[int, str, int], ...]
Operands = tuple[tuple[int, ...], Steps]


# Each plan draws the numbers of a story and the steps that solve it.
def _plus_plus(rng: random.Random) -> Operands:
    a, rest = addends(rng, smallest=4)
    b = rng.randint(2, rest - 2)
    return (a, b, rest - b), ((a, "+", b), (a + b, "+", rest - b))


def _plus_minus(rng: random.Random) -> Operands:
    a, b = addends(rng)
    c = rng.randint(1, a + b - 1)
    return (a, b, c), ((a, "+", b), (a + b, "-", c))


def _minus_minus(rng: random.Random) -> Operands:
    (a, b, c), _ = _plus_plus(rng)
    total = a + b + c
    return (total, b, c), ((total, "-", b), (total - b, "-", c))


def _times_plus(rng: random.Random) -> Operands:
    a, b = factor_pair(rng, 90)
    c = rng.randint(2, 100 - a * b)
    return (a, b, c), ((a, "*", b), (a * b, "+", c))


def _times_minus(rng: random.Random) -> Operands:
    a, b = factor_pair(rng, 100)
    c = rng.randint(1, a * b - 1)
    return (a, b, c), ((a, "*", b), (a * b, "-", c))


def _times_from(rng: random.Random) -> Operands:
    a, b = factor_pair(rng, 96)
    c = rng.randint(a * b + 1, 100)
    return (a, b, c), ((a, "*", b), (c, "-", a * b))


def _times_times(rng: random.Random) -> Operands:
    a, b = factor_pair(rng, 70)
    c, d = factor_pair(rng, 100 - a * b)
    return (a, b, c, d), ((a, "*", b), (c, "*", d), (a * b, "+", c * d))


def _plus_times(rng: random.Random) -> Operands:
    total, c = factor_pair(rng)
    a = rng.randint(1, total - 1)
    return (a, total - a, c), ((a, "+", total - a), (total, "*", c))


def _plus_divide(rng: random.Random) -> Operands:
    c, share = factor_pair(rng, 96)
    a = rng.randint(1, c * share - 1)
    b = c * share - a
    return (a, b, c), ((a, "+", b), (c * share, "/", c))


def _minus_divide(rng: random.Random) -> Operands:
    c, share = factor_pair(rng, 96)
    b = rng.randint(1, 100 - c * share)
    total = c * share + b
    return (total, b, c), ((total, "-", b), (c * share, "/", c))


def _divide_plus(rng: random.Random) -> Operands:
    b, share = factor_pair(rng)
    c = rng.randint(2, 80)
    return (b * share, b, c), ((b * share, "/", b), (share, "+", c))


def _twice(rng: random.Random) -> Operands:
    a = rng.randint(2, 32)
    b = rng.randint(1, 100 - 3 * a)
    return (a, b), ((2, "*", a), (a, "+", 2 * a), (3 * a, "+", b))


def _more_than(rng: random.Random) -> Operands:
    a = rng.randint(2, 45)
    b = rng.randint(1, 100 - 2 * a)
    return (a, b), ((a, "+", b), (a, "+", a + b))


@dataclasses.dataclass(frozen=True)
class _Story:
    """A plan with its telling: the prompt, and what stands after each step of the solution."""

    plan: Callable[[random.Random], Operands]
    prompt: str
    labels: tuple[str, ...]


_STORIES = (
    _Story(
        _plus_plus,
        "{name} has {a} {things}. {other} has {b} {things} and {third} has {c}. How many "
        "{things} do they have together?",
        ("{things} for two of them", "{things} for all three"),
    ),
    _Story(
        _plus_plus,
        "On {day} {name} sells {a} {things}, then {b} at the {place} and {c} more in the "
        "evening. How many {things} does {they} sell?",
        ("{things} sold by then", "{things} sold in all"),
    ),
    _Story(
        _plus_minus,
        "{name} has {a} {things}. {They} buys {b} more and gives {c} to {other}. How many "
        "{things} does {name} have now?",
        ("{things} after buying", "{things} left"),
    ),
    _Story(
        _plus_minus,
        "There are {a} {things} in the {place}. On {day} {b} {things} arrive and {c} are "
        "taken away. How many {things} are there now?",
        ("{things} after the arrival", "{things} now"),
    ),
    _Story(
        _plus_minus,
        "{name} finds {a} {things} and {other} finds {b}. They lose {c} of them. How many "
        "{things} are left?",
        ("{things} found", "{things} left"),
    ),
    _Story(
        _minus_minus,
        "A {place} has {a} {things}. It sells {b} on {day} and {c} the next day. How many "
        "{things} remain?",
        ("{things} after {day}", "{things} remain"),
    ),
    _Story(
        _minus_minus,
        "{name} had {a} {things}. {They} gave {b} to {other} and {c} to {third}. How many "
        "{things} does {they} still have?",
        ("{things} after the first gift", "{things} left"),
    ),
    _Story(
        _times_plus,
        "{name} has {a} {holders} with {b} {things} each, and {c} more {things}. How many "
        "{things} does {name} have?",
        ("{things} in the {holders}", "{things} in all"),
    ),
    _Story(
        _times_plus,
        "The {place} keeps {a} {holders} of {b} {things}. On {day} it gets {c} more {things}."
        " How many {things} are there?",
        ("{things} at first", "{things} now"),
    ),
    _Story(
        _times_minus,
        "{name} buys {a} {holders} of {b} {things} and gives {c} {things} to {other}. How "
        "many {things} are left?",
        ("{things} bought", "{things} left"),
    ),
    _Story(
        _times_minus,
        "Each of {a} children brings {b} {things} to the {place}. {c} {things} are lost. How "
        "many {things} remain?",
        ("{things} brought", "{things} remain"),
    ),
    _Story(
        _times_from,
        "{name} buys {a} {things} for {b} dollars each and pays with {c} dollars. How much "
        "money does {they} get back?",
        ("dollars to pay", "dollars back"),
    ),
    _Story(
        _times_from,
        "{name} reads {b} pages a day for {a} days. The book has {c} pages. How many pages "
        "are left?",
        ("pages read", "pages left"),
    ),
    _Story(
        _times_from,
        "{name} wants {c} {things}. {They} gets {b} {things} a week for {a} weeks. How many "
        "more does {they} need?",
        ("{things} so far", "{things} more"),
    ),
    _Story(
        _times_times,
        "{name} buys {a} {things} for {b} dollars each and {c} hats for {d} dollars each. How"
        " much does {they} pay?",
        ("dollars for the {things}", "dollars for the hats", "dollars in all"),
    ),
    _Story(
        _times_times,
        "There are {a} {holders} with {b} {things} each and {c} {holders} with {d} each. How "
        "many {things} are there?",
        ("{things} in the first", "{things} in the others", "{things} in all"),
    ),
    _Story(
        _plus_times,
        "{name} has {a} red and {b} blue {holders}. Each holds {c} {things}. How many "
        "{things} does {name} have?",
        ("{holders}", "{things}"),
    ),
    _Story(
        _plus_times,
        "{name} works {a} hours on {day} and {b} hours the next day for {c} dollars an hour. "
        "How much does {they} earn?",
        ("hours", "dollars"),
    ),
    _Story(
        _plus_divide,
        "{name} has {a} {things} and gets {b} more. {They} puts them in {c} equal {holders}. "
        "How many {things} are in each?",
        ("{things}", "{things} in each"),
    ),
    _Story(
        _plus_divide,
        "{name} and {other} bring {a} and {b} {things}. {c} friends share them equally. How "
        "many {things} does each get?",
        ("{things} together", "{things} for each"),
    ),
    _Story(
        _minus_divide,
        "The {place} has {a} {things}. {b} are broken and the rest goes in {c} equal "
        "{holders}. How many {things} are in each?",
        ("good {things}", "{things} in each"),
    ),
    _Story(
        _minus_divide,
        "{name} has {a} dollars and keeps {b}. {They} buys {things} for {c} dollars each with"
        " the rest. How many does {they} buy?",
        ("dollars to spend", "{things}"),
    ),
    _Story(
        _divide_plus,
        "{a} {things} are shared equally by {b} children. {name} is one of them and had {c} "
        "before. How many {things} does {they} have now?",
        ("{things} for each", "{things} now"),
    ),
    _Story(
        _twice,
        "{name} has {a} {things} and {other} has twice as many. {third} has {b}. How many "
        "{things} do they have together?",
        ("{things} for {other}", "{things} for both", "{things} for all three"),
    ),
    _Story(
        _more_than,
        "{name} has {a} {things}. {other} has {b} more than {name}. How many {things} do they"
        " have together?",
        ("{things} for {other}", "{things} together"),
    ),
    _Story(
        _more_than,
        "On {day} {a} people come to the {place}. The next day {b} more come than on {day}. "
        "How many come in all?",
        ("people the next day", "people in all"),
    ),
)


def draw(rng: random.Random) -> Drawn:
    """Draws one story with its names, things and numbers."""
    story = rng.choice(_STORIES)
    operands, steps = story.plan(rng)
    girl = rng.random() < 0.5
    name = rng.choice(_GIRLS if girl else _BOYS)
    other, third = rng.sample(_BOYS if girl else _GIRLS, 2)
    they = "she" if girl else "he"
    words = {
        "name": name,
        "other": other,
        "third": third,
        "they": they,
        "They": they.capitalize(),
        "things": rng.choice(_THINGS),
        "holders": rng.choice(_HOLDERS),
        "place": rng.choice(_PLACES),
        "day": rng.choice(_DAYS),
    }
    prompt = story.prompt.format(**words, **dict(zip("abcd", operands)))
    lines = [f"{step(*one)} {label.format(**words)}" for one, label in zip(steps, story.labels)]
    answer = str(value(*steps[-1]))
    completion = "\n".join((*lines, f"#### {answer}"))
    return Drawn(Record(NAME, prompt, completion, answer), numbers_in_test(prompt))
