"""Whether two pieces of LaTeX are the same mathematics, by math-verify in a process of its own."""

import json
import os
import pathlib
import queue
import select
import subprocess
import sys
import threading

from acceptmoe_jax.evaluation.answers import without_spacing

_SECONDS = 30  # for one pair; math-verify's own timeouts end nearly all that hang
_PROGRAM = "from acceptmoe_jax.evaluation import math_worker; math_worker.main()"
_START_SECONDS = 120  # sympy is slow to import on a busy machine


class MathEquality:
    """Compares from any thread, each at a time with a worker process; close it after use."""

    def __init__(self, seconds: float = _SECONDS):
        self._seconds = seconds
        self._idle = queue.LifoQueue()
        self._lock = threading.Lock()
        self._workers = set()

    def __enter__(self) -> "MathEquality":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes."""
        with self._lock:
            workers, self._workers = self._workers, set()
        for worker in workers:
            _end(worker)
        self._idle = queue.LifoQueue()

    def equal(self, gold: str, answer: str) -> bool:
        """Whether an answer is the gold answer; False as well if that cannot be found in time."""
        gold, answer = _tidy(gold), _tidy(answer)
        if gold == answer:
            return True
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = self._start()
        verdict = _ask(worker, gold, answer, self._seconds)
        if verdict is None:
            with self._lock:
                self._workers.discard(worker)
            _end(worker)
            return False
        self._idle.put(worker)
        return verdict

    def _start(self) -> subprocess.Popen:
        worker = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        )
        with self._lock:
            self._workers.add(worker)
        if _ask(worker, "1", "1", _START_SECONDS) is not True:
            raise RuntimeError("math-verify does not start; is it installed?")
        return worker


def _ask(worker: subprocess.Popen, gold: str, answer: str, seconds: float) -> bool | None:
    """The worker's verdict; None if it has none in time or is gone."""
    try:
        worker.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return None
    if not select.select([worker.stdout], [], [], seconds)[0]:
        return None
    line = worker.stdout.readline()
    return json.loads(line) if line else None


def _end(worker: subprocess.Popen) -> None:
    worker.kill()
    with worker:  # closes the pipes and waits
        pass


def _tidy(text: str) -> str:
    """Without what sets off mathematics from prose: dollars around it, a full stop behind it."""
    text = without_spacing(text.strip().rstrip("."))
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1]
    return text.strip()
