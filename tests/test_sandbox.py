"""The sandbox: right answers pass, and nothing that an answer does instead does.

Both levels of isolation are attacked, since a machine of this kind may permit the weaker one only.
"""

import concurrent.futures
import os
import pathlib
import socket
import threading

import pytest

from acceptmoe_jax.evaluation.sandbox import confinement, run

TESTS = ("assert add(2, 3) == 5", "assert add(-7, 3) == -4")
RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
LIMITS = run.Limits(cpu_seconds=1, wall_seconds=60, memory=2**28, processes=16, file_size=2**16)

LEVELS = list(dict.fromkeys([run.isolation(), confinement.LIMITS]))
both_levels = pytest.mark.parametrize("level", LEVELS)
the_second_slowly = pytest.mark.parametrize(
    "level", [LEVELS[0], *(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS[1:])]
)


def judged(answer, level=None, tests=TESTS, names=("add",), limits=LIMITS, **parts):
    program = run.Program(answer, names, tests, **parts)
    return run.run(program, limits) if level is None else run._run(program, limits, level)


@both_levels
def test_a_right_answer_passes_and_a_wrong_one_does_not(level):
    assert judged(RIGHT, level) == run.Verdict(True, "")
    verdict = judged(WRONG, level)
    assert not verdict.passed and verdict.reason == "test 1 of 2: AssertionError"


# An answer that does this instead of the sum, and would otherwise give a wrong one.
ATTACKS = {
    "exits early": "import sys; sys.exit(0)",
    "exits hard": "import os; os._exit(0)",
    "exits in the call": "def add(a, b):\n    import os\n    os._exit(0)",
    "exits by exception": "def add(a, b):\n    raise SystemExit(0)",
    "raises what tests raise": "def add(a, b):\n    raise AssertionError('passed')",
    "kills its judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "kills everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "patches assert's error": "import builtins\nbuiltins.AssertionError = ValueError",
    "patches built-ins": "import builtins\nbuiltins.compile = builtins.exec = lambda *a: None",
    "patches every comparison": (
        "class Same(int):\n"
        "    __eq__ = lambda self, other: True\n"
        "    __hash__ = int.__hash__\n"
        "def add(a, b):\n    return Same(0)"
    ),
    "equals everything": (
        "class Same:\n    def __eq__(self, other): return True\n"
        "def add(a, b):\n    return Same()"
    ),
    "prints a verdict": (
        'import os\nfor fd in range(1, 30):\n    try: os.write(fd, b\'{"passed": true}\\n\')\n'
        "    except OSError: pass\nos._exit(0)"
    ),
    "prints a verdict in every frame": (
        "import os\n"
        'data = b\'["value", true]\'\n'
        "for fd in range(1, 30):\n"
        "    try: os.write(fd, len(data).to_bytes(4, 'big') + data)\n"
        "    except OSError: pass\n"
    ),
    "prints at its end": (
        "import atexit\natexit.register(print, '{\"passed\": true}')\nimport sys; sys.exit(0)"
    ),
    "looks for what is expected": (
        "import gc, sys\n"
        "def add(a, b):\n"
        "    frame, found = sys._getframe(), []\n"
        "    while frame:\n"
        "        found += [*frame.f_locals.values(), *frame.f_globals.values()]\n"
        "        frame = frame.f_back\n"
        "    texts = [item for item in found + gc.get_objects() if isinstance(item, str)]\n"
        "    return next(int(t.split('==')[1]) for t in texts if t.startswith('assert add('))\n"
    ),
    "reads its judge's memory": (
        "import os\n"
        "def add(a, b):\n"
        "    for file in ('mem', 'environ', 'maps', 'fd/0'):\n"
        "        open(f'/proc/{os.getppid()}/{file}', 'rb').read(1)\n"
    ),
    "hangs on input": "def add(a, b):\n    return int(input())",
    "takes memory": "def add(a, b):\n    return len(bytearray(2**29)) and a + b",
    "answers too much": "def add(a, b):\n    return 'x' * 2**24",
    "recurses": "def add(a, b):\n    return add(a, b)",
    "returns what nests": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "is no code": "def add(a, b:\n    return",
    "lacks the name": "def sum(a, b):\n    return a + b",
    "writes much": (
        "def add(a, b):\n"
        "    with open('big', 'wb') as file:\n"
        "        file.write(bytes(2**17))\n"
        "    return a + b"
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_no_right_answer_does_not_pass(attack):
    verdict = judged(ATTACKS[attack])
    assert not verdict.passed and verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_nor_does_it_without_namespaces(attack):
    assert not judged(ATTACKS[attack], confinement.LIMITS).passed


@the_second_slowly
def test_an_endless_loop_ends_by_its_cpu_time(level):
    verdict = judged("def add(a, b):\n    while True: pass", level)
    assert not verdict.passed and "SIGKILL" in verdict.reason


@the_second_slowly
def test_whoever_sleeps_is_ended_by_the_clock(level):
    limits = run.Limits(wall_seconds=1)
    verdict = judged("import time\ntime.sleep(1000)", level, limits=limits)
    assert verdict == run.Verdict(False, "no end after 1 s")


MARK = 41  # open files, a limit that nobody else sets
DAEMON = f"""
import os, resource, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, ({MARK}, {MARK}))
        time.sleep(1000)
    os._exit(0)
os.wait()
{RIGHT}
"""


def marked_processes():
    """Processes that have the daemon's limit, in whatever session and namespace."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/limits"):
        try:
            found += [path] if f"Max open files {MARK} {MARK} files" in _words(path) else []
        except OSError:
            pass
    return found


def _words(path):
    return " ".join(path.read_text().split())


@both_levels
def test_a_process_that_left_its_session_ends_with_the_verdict(level):
    seen = []
    slow = f"import time\n{DAEMON}time.sleep(0.5)\n"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(judged, slow, level)
        while not verdict.done():
            seen += marked_processes()
    assert verdict.result().passed
    assert seen and not marked_processes()


def test_a_fork_bomb_stays_small_and_ends():
    answer = (
        "import os\n"
        "def add(a, b):\n"
        "    made = 0\n"
        "    while made < 1000:\n"
        "        if os.fork() == 0:\n"
        "            import time\n"
        "            time.sleep(1000)\n"
        "        made += 1\n"
        "    return a + b\n"
    )
    verdict = judged(answer)
    assert not verdict.passed
    if run.isolation() == confinement.NAMESPACES:
        assert "BlockingIOError" in verdict.reason


@both_levels
def test_nothing_outside_the_temporary_directory_can_be_written(level, tmp_path):
    target = tmp_path / "outside"
    target.write_text("before")
    tmp_path.chmod(0o777)
    target.chmod(0o666)
    answer = (
        "import os, pathlib\n"
        "pathlib.Path('inside').write_text('mine')\n"
        "def add(a, b):\n"
        f"    for path in ({str(target)!r}, {str(target) + '2'!r}, '/usr/x', '/etc/x', '/x'):\n"
        "        try:\n"
        "            pathlib.Path(path).write_text('after')\n"
        "        except OSError:\n"
        "            continue\n"
        "        return 0\n"
        "    return a + b\n"
    )
    assert judged(answer, level).passed
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert not any(os.path.exists(path) for path in ("/usr/x", "/etc/x", "/x"))


@both_levels
def test_there_is_no_network(level):
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.2)
    address = server.getsockname()
    answer = f"import socket\nsocket.create_connection({address!r}, timeout=1)\n{RIGHT}"
    verdict = judged(answer, level)
    assert not verdict.passed and "the answer" in verdict.reason
    with server, pytest.raises(TimeoutError):
        server.accept()


@the_second_slowly
def test_the_environment_is_empty_and_so_is_the_directory(level, monkeypatch):
    monkeypatch.setenv("SECRET", "hf_token")
    answer = (
        "import os, sys\n"
        "def add(a, b):\n"
        "    seen = [*os.environ, *os.listdir()]\n"
        "    return a + b if 'SECRET' not in seen and not os.listdir() else seen\n"
    )
    assert judged(answer, level).passed


def test_answers_are_judged_several_at_a_time_from_any_thread():
    barrier = threading.Barrier(3)

    def one(answer):
        barrier.wait()
        return judged(answer).passed

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, [RIGHT, WRONG, RIGHT])) == [True, False, True]


# What tests may do with values and objects of the answer.


@pytest.mark.parametrize(
    "value",
    [
        "None", "True", "10**30", "-3", "1.5", "float('inf')", "'tex\\ud800t'", "b'\\x00'",
        "2 - 3j", "[1, (2, 'x'), {3: {4}}]", "frozenset({(1, 2)})", "{(1,): [None]}",
        "bytearray(b'a')", "int", "__import__('decimal').Decimal('1.10')",
        "__import__('fractions').Fraction(1, 3)",
    ],
)  # fmt: skip
def test_plain_values_arrive_as_they_are(value):
    tests = (f"assert f({value}) == ({value}, {value!r})",)
    answer = f"def f(x):\n    assert x == {value}\n    return x, {value!r}"
    verdict = judged(answer, tests=tests, names=("f",))
    assert verdict.passed, verdict.reason


def test_objects_stay_where_they_are_and_can_be_used():
    answer = (
        "import collections\n"
        "class Node:\n"
        "    def __init__(self, value): self.value, self.left = value, None\n"
        "    def double(self, by=2): return self.value * by\n"
        "def depth(node): return 0 if node is None else 1 + depth(node.left)\n"
        "def numbers():\n"
        "    yield from (1, 2)\n"
        "def count(): return collections.Counter('aab')\n"
        "def fail(): raise KeyError('x')\n"
    )
    tests = (
        "root = Node(3)\nroot.left = Node(value=4)\nassert depth(root) == 2",
        "assert root.left.value == 4 and root.double(by=3) == 9",
        "assert root.left is root.left and root != root.left",
        "assert list(numbers()) == [1, 2] and numbers() != [1, 2]",
        "assert count() == {'a': 2, 'b': 1}",
        "try:\n    fail()\nexcept KeyError: pass\nelse: assert False",
    )
    names = ("Node", "depth", "numbers", "count", "fail")
    verdict = judged(answer, tests=tests, names=names)
    assert verdict.passed, verdict.reason


def test_an_answer_cannot_replace_what_the_tests_compare_with():
    parts = {"reference": "import math\ndef helper(x):\n    return x + 1\ndef f(x): return 1"}
    tests = ("assert f(1) == helper(1) and abs(-1) == 1 and math.pi > 3",)
    redefined = "helper = abs = lambda x: 0\nclass math: pi = 4\ndef f(x): return "
    assert not judged(redefined + "0", tests=tests, names=("f",), **parts).passed
    assert judged(redefined + "2", tests=tests, names=("f",), **parts).passed


def test_what_tests_print_is_no_verdict():
    tests = ("print({'passed': False})", *TESTS)
    assert judged(RIGHT, tests=tests, reference="print('{')").passed


def test_set_up_code_runs_on_both_sides_and_first():
    parts = {"setup": "import math\nlimit = 3"}
    assert judged("def f(x): return math.floor(x) + limit", None, ("assert f(2.5) == limit + 2",),
                  ("f",), **parts).passed  # fmt: skip
    late = judged(RIGHT, None, TESTS, ("add",), setup="add(1, 2)")
    assert late.reason.startswith("the set-up: NameError")
