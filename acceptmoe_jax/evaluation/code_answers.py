"""Which part of a completion is its code: a bare continuation, or a block of a chat answer."""

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_CODE_LINE = re.compile(
    r"^(?:(?:async )?def |class |import |from \w|@\w|[A-Za-z_]\w* *=[^=])", re.MULTILINE
)


def function_code(completion: str, names: Sequence[str], prompt: str = "") -> str | None:
    """The program that a completion answers with.

    The last fenced block that defines the names counts, else the text itself, up to where it stops
    being Python. Examples behind the definitions (prints, assertions, a main block) are left out,
    and so is a second definition that a continuation runs on to.

    Args:
      completion: what the model wrote; its leading indent is kept.
      names: the functions and classes that the program must define.
      prompt: the code that the completion may continue; its imports and helpers belong to the
        program in any case.

    Returns:
      The program, the prompt included; None if there is none that defines the names.
    """
    completion = completion.replace("\r\n", "\n")
    for text, continues in _candidates(completion, prompt):
        if not continues and not all(name in text for name in names):
            continue
        head = prompt if continues or not prompt else f"{prompt.rstrip()}\n"
        program = _longest_program(head, text)
        if program is None:
            continue
        tree, begun = _parse(program), 0 if continues else head.count("\n")
        if set(names) <= set().union(*(_bound(node) for node in tree.body if node.lineno > begun)):
            return _without_examples(program, tree, set(names), begun, runs_on=continues)
    return None


def _candidates(completion: str, prompt: str) -> Iterator[tuple[str, bool]]:
    """Texts that may be the program, likely ones first, and whether each continues the prompt."""
    blocks = [found[1] for found in _FENCE.finditer(completion)]
    for block in reversed(blocks):
        yield textwrap.dedent(block), False
    if prompt:
        for block in reversed(blocks):
            if re.match(r"\s*\n?[ \t]+\S", block):
                yield block, True
    text = re.split(r"^[ \t]*```", completion, maxsplit=1, flags=re.MULTILINE)[0]
    if prompt and re.match(r"\s*(?:#[^\n]*\n)?[ \t]+\S", text):
        yield text, True
    yield text, False
    for start in _CODE_LINE.finditer(text):
        yield text[start.start() :], False
    if prompt:
        yield text, True


def _longest_program(head: str, tail: str) -> str | None:
    """`head` and as many lines of `tail` as are Python; None if that is none."""
    lines, least = (head + tail).split("\n"), head.count("\n")
    while len(lines) > least and any(line.strip() for line in lines[least:]):
        try:
            _parse("\n".join(lines))
        except SyntaxError as error:
            lines = lines[: min(error.lineno or len(lines), len(lines)) - 1]
        except (ValueError, RecursionError, MemoryError):
            return None
        else:
            return "\n".join(lines)
    return None


def _parse(code: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model's invalid escapes are not ours to report
        return ast.parse(code)


def _bound(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _without_examples(
    program: str, tree: ast.Module, names: set[str], begun: int, *, runs_on: bool
) -> str:
    """The program without what stands behind its definitions and is none of it."""
    missing, kept, dropped = set(names), [], []
    ended = False
    for node in tree.body:
        if missing or node.lineno <= begun:
            (dropped if node.lineno > begun and _does_nothing(node) else kept).append(node)
            if node.lineno > begun:
                missing -= _bound(node)
            continue
        ended = ended or (runs_on and bool(_bound(node) & names))
        (dropped if ended or _is_example(node) else kept).append(node)
    lines = _lines(dropped) - _lines(kept)
    numbered = enumerate(program.split("\n"), start=1)
    return "\n".join(line for number, line in numbered if number not in lines)


def _does_nothing(node: ast.stmt) -> bool:
    """Whether a statement is a bare value; prose of one word is one too."""
    return isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)


def _is_example(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return _does_nothing(node) or ast.unparse(node.value.func) == "print"
    is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    return is_main or isinstance(node, ast.Assert)


def _lines(nodes: Sequence[ast.stmt]) -> set[int]:
    found = set()
    for node in nodes:
        first = min([node, *getattr(node, "decorator_list", ())], key=lambda part: part.lineno)
        found |= set(range(first.lineno, node.end_lineno + 1))
    return found


def bound_names(code: str) -> set[str]:
    """The names of the functions and classes that trusted code defines at its top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in _parse(code).body if isinstance(node, kinds)}


def loaded_names(code: str) -> set[str]:
    """The names that trusted code reads anywhere."""
    nodes = (node for node in ast.walk(_parse(code)) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, ast.Load)}
