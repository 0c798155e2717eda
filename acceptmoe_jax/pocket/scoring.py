"""Whether a completion solves its task; nothing that a model wrote is ever executed."""

import ast
import decimal
import re

from acceptmoe_jax.pocket import functions, mathematics, word_problems
from acceptmoe_jax.pocket.records import Record


def is_correct(record: Record, completion: str) -> bool:
    r"""Judges a completion against its record.

    Word problems by the number after the last `####`, mathematics by the last balanced
    `\boxed{}`, code by its syntax tree: equal to the reference's, docstrings aside. Other code may
    compute the same, so for the code families this is a lower bound.
    """
    if record.family == word_problems.NAME:
        number = final_number(completion)
        return number is not None and number == decimal.Decimal(record.answer)
    if record.family == mathematics.NAME:
        return last_boxed(completion) == record.answer
    if record.family == functions.FROM_DOCSTRING:
        header = signature(record.prompt)
        return _same_function(f"{header}\n{completion}", f"{header}\n{record.answer}")
    if record.family == functions.FROM_TEXT:
        return _same_function(completion, record.answer)
    raise ValueError(f"no family {record.family!r}")


def final_number(text: str) -> decimal.Decimal | None:
    """The number after the last `####`; `70,000.` reads as 70000, None where there is none."""
    tail = text.rpartition("####")
    found = tail[1] and re.match(r"\s*\$?(-?\d[\d,]*(?:\.\d+)?)", tail[2])
    return decimal.Decimal(found[1].replace(",", "")) if found else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces balance, stripped; None without one."""
    for opening in reversed(list(re.finditer(r"\\boxed\{", text))):
        depth = 1
        for end in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[opening.end() : end].strip()
    return None


def signature(prompt: str) -> str:
    """The `def` line of a prompt."""
    return next(line for line in prompt.splitlines() if line.startswith("def "))


def _same_function(code: str, reference: str) -> bool:
    tree = _function_tree(code)
    return tree is not None and tree == _function_tree(reference)


def _function_tree(code: str) -> str | None:
    """A dump of the one function in `code`, without its docstring; None if it is anything else."""
    try:
        module = ast.parse(code.strip("\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(module.body) != 1 or not isinstance(module.body[0], ast.FunctionDef):
        return None
    function = module.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        function.body = function.body[1:]
    return ast.dump(function)
