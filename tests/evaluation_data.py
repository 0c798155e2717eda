"""The four benchmarks in their published formats: the real ones where they lie, and a stand-in.

The stand-in's records are ours, with what is odd in the real ones: marks for a calculator,
thousands separators, nested braces, helpers in a prompt, Windows line ends, set-up code.
"""

import gzip
import json
import pathlib

SHARED = pathlib.Path(__file__).parents[2] / "shared" / "data"

GSM8K = {
    "train": [
        {
            "question": f"Tom has {n} boxes of 6 pens. How many pens has he?",
            "answer": f"He has {n} * 6 = <<{n}*6={6 * n}>>{6 * n} pens.\n#### {6 * n}",
        }
        for n in range(2, 9)
    ],
    "test": [
        {
            "question": "Ann sells 7,000 eggs at $10. How much does she make?",
            "answer": "She makes 7000 * 10 = $<<7000*10=70000>>70,000.\n#### 70,000",
        },
        {
            "question": "It was 3 degrees and fell by 8. How cold is it?",
            "answer": "3 - 8 = <<3-8=-5>>-5\n#### -5",
        },
        {"question": "What is half of 29?", "answer": "29 / 2 = <<29/2=14.5>>14.5\n#### 14.5"},
    ],
}
MATH500 = [
    {
        "problem": "What is $\\frac{1}{3} + \\frac{1}{6}$?",
        "solution": "It is $\\frac{2}{6} + \\frac{1}{6} = \\boxed{\\frac{1}{2}}.$",
        "answer": "\\frac{1}{2}",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    {
        "problem": "Where do $y = x$ and $y = 3$ meet?",
        "solution": "At $\\boxed{\\left( 3, 3 \\right)}.$",
        "answer": "\\left( 3, 3 \\right)",
        "subject": "Geometry",
        "level": 2,
        "unique_id": "test/geometry/2.json",
    },
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": (
            "import math\nfrom typing import List\n\n\n"
            "def lengths(points: List[tuple]) -> List[float]:\n"
            '    """ Lengths of vectors.\n    >>> lengths([(3, 4)])\n    [5.0]\n    """\n'
        ),
        "entry_point": "lengths",
        "canonical_solution": "    return [math.hypot(*point) for point in points]\n",
        "test": (
            "\n\nMETADATA = {}\n\n\ndef check(candidate):\n"
            "    assert candidate([(3, 4), (0, 0)]) == [5.0, 0.0]\n"
            "    assert math.isclose(candidate([(1, 1)])[0], 2 ** 0.5)\n"
        ),
    },
    {
        "task_id": "HumanEval/1",
        "prompt": (
            'def shift(s: str):\n    """ Shifts by one."""\n'
            '    return "".join(chr(ord(c) + 1) for c in s)\n\n\n'
            'def unshift(s: str):\n    """ Undoes shift. """\n'
        ),
        "entry_point": "unshift",
        "canonical_solution": '\n    return "".join(chr(ord(c) - 1) for c in s)\n',
        "test": (
            "def check(candidate):\n    import random\n    for _ in range(9):\n"
            "        word = ''.join(random.choice('abc') for _ in range(5))\n"
            "        assert candidate(shift(word)) == word\n"
        ),
    },
]
MBPP = [
    {
        "text": f"Write a function to add {n} to a number.",
        "code": f"def add_{n}(x):\r\n  return (x + {n}) ",
        "task_id": n,
        "test_setup_code": "",
        "test_list": [f"assert add_{n}({x}) == {x + n}" for x in (1, 2, 3)],
        "challenge_test_list": [],
    }
    for n in (2, 3, 4)
] + [
    {
        "text": "Write a function to sum two numbers and a bonus.",
        "code": "import sys\r\ndef sum(a, b): \r\n\treturn a + b + bonus",
        "task_id": 126,
        "test_setup_code": "bonus = 1\r\n",
        "test_list": [
            "assert sum(1, 2) == 4",
            "assert sum(2, 2) == 5 ",
            "assert sum(0, 0) == bonus",
        ],
        "challenge_test_list": ["assert sum(0, 0) == 17"],
    },
    {
        "text": "Write a function to count the pairs whose first is smaller.",
        "code": (
            "class Pair(object): \r\n\tdef __init__(self, a, b): \r\n"
            "\t\tself.a = a \r\n\t\tself.b = b\r\n"
            "def rising(pairs): \r\n\treturn len([p for p in pairs if p.a < p.b])"
        ),
        "task_id": 601,
        "test_setup_code": "",
        "test_list": [
            "assert rising([Pair(1, 2), Pair(2, 1)]) == 1",
            "assert rising([]) == 0",
            "assert rising([Pair(1, 2), Pair(2, 3)]) == 2",
        ],
        "challenge_test_list": [],
    },
]
SANITIZED = [
    {
        "source_file": "ours",
        "task_id": 11,
        "prompt": "Write a function to halve a number.",
        "code": "def halve(x):\n  return x / 2",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(halve(3), 1.5)", "assert halve(0) == 0"],
    }
]


def lines(records: list[dict]) -> str:
    """Records as JSON Lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


def write_stand_in(folder: pathlib.Path) -> pathlib.Path:
    """Writes the stand-in below a folder; returns the folder."""
    for name in ("gsm8k", "math500", "humaneval", "mbpp"):
        (folder / name).mkdir(parents=True)
    for split, records in GSM8K.items():
        (folder / "gsm8k" / f"{split}.jsonl").write_text(lines(records))
    (folder / "math500" / "test.jsonl").write_text(lines(MATH500))
    packed = gzip.compress(lines(HUMANEVAL).encode())
    (folder / "humaneval" / "HumanEval.jsonl.gz").write_bytes(packed)
    (folder / "mbpp" / "mbpp.jsonl").write_text(lines(MBPP))
    (folder / "mbpp" / "sanitized-mbpp.json").write_text(json.dumps(SANITIZED))
    return folder


# The completion that a record publishes as right.
GOLD = {
    "gsm8k": lambda fields: fields["answer"],
    "math500": lambda fields: fields["solution"],
    "humaneval": lambda fields: fields["canonical_solution"],
    "mbpp": lambda fields: fields["code"],
    "mbpp_sanitized": lambda fields: fields["code"],
}
