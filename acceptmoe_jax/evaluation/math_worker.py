"""The process that compares mathematics with math-verify: pairs a line in, verdicts a line out.

A pair is a JSON list of gold and answer, a verdict `true` or `false`. It is a process of its
own because sympy can take for ever and any amount of memory over a short answer: this process can
be killed, and its main thread is where math-verify's own timeouts work.
"""

import contextlib
import json
import logging
import resource
import sys

import math_verify

_MEMORY = 4 * 2**30  # bytes of address space
_SECONDS = 5  # for each step of math-verify


def _equal(gold: str, answer: str) -> bool:
    gold_parsed, answer_parsed = (
        math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=_SECONDS) for text in (gold, answer)
    )
    return math_verify.verify(gold_parsed, answer_parsed, timeout_seconds=_SECONDS)


def main() -> None:
    """Answers until stdin ends."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable()  # math-verify logs what it cannot parse
    channel, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no verdict
    for line in sys.stdin:
        try:
            verdict = _equal(*json.loads(line))
        except Exception:
            verdict = False
        print(json.dumps(bool(verdict)), file=channel, flush=True)
