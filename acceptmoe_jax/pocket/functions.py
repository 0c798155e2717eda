"""Small Python functions from a grammar: an aggregate of a map over a filter of a source.

`the sum of the squares of the even numbers in values` is one sentence of the grammar, and
`sum(x * x for x in values if x % 2 == 0)` its only translation. A share of the (source, aggregate,
map, filter) combinations never occurs in training, so the test split shows composition.
"""

import dataclasses
import random

from acceptmoe_jax.pocket.records import TEST_SHARE, Drawn, Record, hash_share

FROM_DOCSTRING = "function_from_docstring"
FROM_TEXT = "function_from_text"
HELD_OUT_SHARE = 1 / 8


@dataclasses.dataclass(frozen=True)
class _Source:
    """What is iterated over: `code` yields items named `item`, of type `kind`."""

    name: str
    arguments: tuple[str, ...]
    hint: str
    noun: str
    place: str
    code: str
    item: str
    kind: str


@dataclasses.dataclass(frozen=True)
class _Filter:
    """`the {adjective}{noun} {place}{suffix}`, and its condition on item {x} (None keeps all)."""

    adjective: str
    suffix: str
    condition: str | None


@dataclasses.dataclass(frozen=True)
class _Map:
    """A phrase around the filtered items {}, the expression on item {x}, and its result's type."""

    phrase: str
    expression: str
    kind: str


@dataclasses.dataclass(frozen=True)
class _Aggregate:
    """A phrase around the mapped items {}, the body over {expression} and {loop}, and its type."""

    phrase: str
    body: str
    result: str


_SOURCES = (
    _Source(
        "list",
        ("numbers", "values", "nums", "data", "items", "scores", "xs"),
        "list[int]",
        "numbers",
        "in {}",
        "{}",
        "x",
        "int",
    ),
    _Source(
        "range",
        ("n", "limit", "top", "m"),
        "int",
        "numbers",
        "from 1 to {}",
        "range(1, {} + 1)",
        "x",
        "int",
    ),
    _Source(
        "digits",
        ("n", "number", "code", "m"),
        "int",
        "digits",
        "of {}",
        "map(int, str({}))",
        "x",
        "int",
    ),
    _Source(
        "words",
        ("text", "sentence", "line", "s", "phrase", "message"),
        "str",
        "words",
        "in {}",
        "{}.split()",
        "w",
        "str",
    ),
)
_SOURCE_WEIGHTS = (4, 2, 1, 3)

_FILTERS = {
    "int": (
        _Filter("", "", None),
        _Filter("even ", "", "{x} % 2 == 0"),
        _Filter("odd ", "", "{x} % 2 == 1"),
        _Filter("positive ", "", "{x} > 0"),
        _Filter("negative ", "", "{x} < 0"),
        _Filter("nonzero ", "", "{x} != 0"),
        _Filter("", " greater than {k}", "{x} > {k}"),
        _Filter("", " less than {k}", "{x} < {k}"),
        _Filter("", " divisible by {k}", "{x} % {k} == 0"),
        _Filter("", " not divisible by {k}", "{x} % {k} != 0"),
        _Filter("", " other than {k}", "{x} != {k}"),
        _Filter("", " between {k} and {m}", "{k} <= {x} <= {m}"),
    ),
    "str": (
        _Filter("", "", None),
        _Filter("", " longer than {k}", "len({x}) > {k}"),
        _Filter("", " shorter than {k}", "len({x}) < {k}"),
        _Filter("", " of length {k}", "len({x}) == {k}"),
        _Filter("", " starting with '{c}'", "{x}.startswith('{c}')"),
        _Filter("", " ending with '{c}'", "{x}.endswith('{c}')"),
        _Filter("", " containing '{c}'", "'{c}' in {x}"),
        _Filter("", " without '{c}'", "'{c}' not in {x}"),
        _Filter("lowercase ", "", "{x}.islower()"),
        _Filter("uppercase ", "", "{x}.isupper()"),
    ),
}

_MAPS = {
    "int": (
        _Map("{}", "{x}", "int"),
        _Map("the squares of {}", "{x} * {x}", "int"),
        _Map("the cubes of {}", "{x} ** 3", "int"),
        _Map("the doubles of {}", "2 * {x}", "int"),
        _Map("the negatives of {}", "-{x}", "int"),
        _Map("the absolute values of {}", "abs({x})", "int"),
        _Map("the last digits of {}", "{x} % 10", "int"),
        _Map("{}, each plus {j}", "{x} + {j}", "int"),
        _Map("{}, each minus {j}", "{x} - {j}", "int"),
        _Map("{}, each times {j}", "{x} * {j}", "int"),
        _Map("{}, each modulo {j}", "{x} % {j}", "int"),
    ),
    "str": (
        _Map("{}", "{x}", "str"),
        _Map("{}, each in upper case", "{x}.upper()", "str"),
        _Map("{}, each in lower case", "{x}.lower()", "str"),
        _Map("{}, each reversed", "{x}[::-1]", "str"),
        _Map("the first letters of {}", "{x}[0]", "str"),
        _Map("the last letters of {}", "{x}[-1]", "str"),
        _Map("the first {j} letters of {}", "{x}[:{j}]", "str"),
        _Map("the lengths of {}", "len({x})", "int"),
        _Map("the counts of '{e}' in {}", "{x}.count('{e}')", "int"),
    ),
}

_COMPREHENSION = "{expression} {loop}"
_ANY = (
    _Aggregate("a list of {}", f"return [{_COMPREHENSION}]", "list[{}]"),
    _Aggregate("the set of {}", f"return {{{{{_COMPREHENSION}}}}}", "set[{}]"),
    _Aggregate("a sorted list of {}", f"return sorted({_COMPREHENSION})", "list[{}]"),
    _Aggregate(
        "the number of different values among {}", f"return len({{{{{_COMPREHENSION}}}}})", "int"
    ),
    _Aggregate("the first of {}", f"return next({_COMPREHENSION})", "{}"),
    _Aggregate("the last of {}", f"return [{_COMPREHENSION}][-1]", "{}"),
)
_AGGREGATES = {
    "int": _ANY
    + (
        _Aggregate("the sum of {}", f"return sum({_COMPREHENSION})", "int"),
        _Aggregate("the largest of {}", f"return max({_COMPREHENSION})", "int"),
        _Aggregate("the smallest of {}", f"return min({_COMPREHENSION})", "int"),
        _Aggregate(
            "the average of {}",
            f"found = [{_COMPREHENSION}]\n    return sum(found) / len(found)",
            "float",
        ),
        _Aggregate(
            "the range of {}",
            f"found = [{_COMPREHENSION}]\n    return max(found) - min(found)",
            "int",
        ),
        _Aggregate(
            "the product of {}",
            "result = 1\n    for {x} in {source}:\n"
            "{guard}{indent}result *= {expression}\n    return result",
            "int",
        ),
        _Aggregate(
            "whether any of {} is over {h}", "return any({expression} > {h} {loop})", "bool"
        ),
        _Aggregate(
            "whether all of {} are under {h}", "return all({expression} < {h} {loop})", "bool"
        ),
    ),
    "str": _ANY
    + (
        _Aggregate("the longest of {}", f"return max([{_COMPREHENSION}], key=len)", "str"),
        _Aggregate("the shortest of {}", f"return min([{_COMPREHENSION}], key=len)", "str"),
        _Aggregate("a string joining {} with spaces", f"return ' '.join({_COMPREHENSION})", "str"),
        _Aggregate("a string joining {} with commas", f"return ','.join({_COMPREHENSION})", "str"),
    ),
}

_VERBS = (
    "get",
    "find",
    "compute",
    "make",
    "collect",
    "build",
    "solve",
    "process",
    "pick",
    "run",
    "check",
    "take",
)
_NOUNS = (
    "result",
    "answer",
    "total",
    "output",
    "part",
    "group",
    "summary",
    "value",
    "report",
    "score",
    "thing",
    "number",
)

_DOCSTRINGS = ("Return {}.", "Returns {}.", "Give {}.", "Find {}.")
_OPENINGS = ("", "Complete this function.\n", "Finish the function:\n", "Write the body.\n")
_REQUESTS = (
    "Write a Python function {call} that returns {what}.",
    "Write a function {call} to return {what}.",
    "Define {call}, which returns {what}.",
    "Implement {call}. It returns {what}.",
)


@dataclasses.dataclass(frozen=True)
class _Function:
    """One sentence of the grammar with its translation and the types for its signature."""

    name: str
    argument: str
    hint: str
    result: str
    what: str
    body: str
    in_test: bool


def _draw_function(rng: random.Random) -> _Function:
    (source,) = rng.choices(_SOURCES, _SOURCE_WEIGHTS)
    keep = rng.choice(_FILTERS[source.kind])
    change = rng.choice(_MAPS[source.kind])
    gather = rng.choice(_AGGREGATES[change.kind])
    argument = rng.choice(source.arguments)

    k = rng.randint(2, 9)
    constants = {
        "k": k,
        "m": k + rng.randint(1, 20),
        "j": rng.randint(2, 9),
        "h": rng.randint(2, 50),
        "c": rng.choice("abcdefghijklmnoprstuvwy"),
        "e": rng.choice("aeioulnrst"),
        "x": source.item,
    }
    condition = keep.condition and keep.condition.format(**constants)
    iterable = source.code.format(argument)
    loop = f"for {source.item} in {iterable}" + (f" if {condition}" if condition else "")
    body = gather.body.format(
        expression=change.expression.format(**constants),
        loop=loop,
        source=iterable,
        guard=f"        if {condition}:\n" if condition else "",
        indent=" " * (12 if condition else 8),
        **constants,
    )

    suffix = keep.suffix.format(**constants)

    def sentence(argument: str) -> str:
        filtered = f"the {keep.adjective}{source.noun} {source.place.format(argument)}{suffix}"
        return gather.phrase.format(change.phrase.format(filtered, **constants), **constants)

    combination = "|".join((source.name, keep.adjective, keep.suffix, change.phrase, gather.phrase))
    in_test = hash_share(combination) < HELD_OUT_SHARE or hash_share(sentence("_")) < TEST_SHARE
    return _Function(
        name=f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}",
        argument=argument,
        hint=source.hint,
        result=gather.result.format(change.kind),
        what=sentence(argument),
        body=f"    {body}",
        in_test=in_test,
    )


def draw_from_docstring(rng: random.Random) -> Drawn:
    """Draws a signature with its docstring; the completion is the indented body."""
    function = _draw_function(rng)
    if rng.random() < 0.5:
        signature = f"def {function.name}({function.argument}):"
    else:
        signature = (
            f"def {function.name}({function.argument}: {function.hint}) -> {function.result}:"
        )
    docstring = rng.choice(_DOCSTRINGS).format(function.what)
    prompt = f'{rng.choice(_OPENINGS)}{signature}\n    """{docstring}"""'
    return Drawn(Record(FROM_DOCSTRING, prompt, function.body, function.body), function.in_test)


def draw_from_text(rng: random.Random) -> Drawn:
    """Draws a sentence that names the function; the completion is the whole function."""
    function = _draw_function(rng)
    call = f"{function.name}({function.argument})"
    prompt = rng.choice(_REQUESTS).format(call=call, what=function.what)
    code = f"def {call}:\n{function.body}"
    return Drawn(Record(FROM_TEXT, prompt, code, code), function.in_test)
