r"""Short mathematics ending in `\boxed{}`, with every arithmetic step written out.

Each kind of problem draws its operands so that every step is a fact of `arithmetic`.
"""

import random
from collections.abc import Callable, Sequence

from acceptmoe_jax.pocket.arithmetic import addends, factor_pair, step
from acceptmoe_jax.pocket.records import Drawn, Record, numbers_in_test

NAME = "mathematics"

_EVALUATE = (
    "Evaluate ${}$.",
    "Compute ${}$.",
    "What is ${}$?",
    "Find the value of ${}$.",
    "Simplify ${}$.",
    "Calculate ${}$.",
)

Problem = tuple[str, Sequence[str], int]  # prompt, steps, answer


def _evaluate(rng: random.Random, expression: str) -> str:
    return rng.choice(_EVALUATE).format(expression)


def _product_plus(rng: random.Random) -> Problem:
    a, b = factor_pair(rng, 90)
    c = rng.randint(2, 100 - a * b)
    product = rf"{a} \cdot {b}"
    expression = rng.choice((f"{product} + {c}", f"{c} + {product}"))
    steps = (step(a, "*", b), step(a * b, "+", c))
    return _evaluate(rng, expression), steps, a * b + c


def _product_minus(rng: random.Random) -> Problem:
    a, b = factor_pair(rng, 100)
    c = rng.randint(1, a * b - 1)
    steps = (step(a, "*", b), step(a * b, "-", c))
    return _evaluate(rng, rf"{a} \cdot {b} - {c}"), steps, a * b - c


def _product_plus_minus(rng: random.Random) -> Problem:
    a, b = factor_pair(rng, 80)
    c = rng.randint(2, 100 - a * b)
    d = rng.randint(1, a * b + c - 1)
    steps = (step(a, "*", b), step(a * b, "+", c), step(a * b + c, "-", d))
    return _evaluate(rng, rf"{a} \cdot {b} + {c} - {d}"), steps, a * b + c - d


def _two_products(rng: random.Random) -> Problem:
    a, b = factor_pair(rng, 70)
    c, d = factor_pair(rng, 100 - a * b)
    steps = (step(a, "*", b), step(c, "*", d), step(a * b, "+", c * d))
    return _evaluate(rng, rf"{a} \cdot {b} + {c} \cdot {d}"), steps, a * b + c * d


def _bracket(rng: random.Random) -> Problem:
    total, c = factor_pair(rng, 100)
    if total > 2 and rng.random() < 0.5:
        a = rng.randint(1, total - 1)
        inner, first = f"{a} + {total - a}", step(a, "+", total - a)
    else:
        b = rng.randint(1, 60)
        inner, first = f"{total + b} - {b}", step(total + b, "-", b)
    outer = rng.randint(1, 100 - total * c) if total * c < 100 else 0
    expression = rf"{c}({inner})" + (f" + {outer}" if outer else "")
    steps = [first, step(c, "*", total)]
    if outer:
        steps.append(step(total * c, "+", outer))
    return _evaluate(rng, expression), steps, total * c + outer


def _sum_difference(rng: random.Random) -> Problem:
    a, b = addends(rng)
    c = rng.randint(1, a + b - 1)
    steps = (step(a, "+", b), step(a + b, "-", c))
    return _evaluate(rng, f"{a} + {b} - {c}"), steps, a + b - c


def _linear(rng: random.Random) -> Problem:
    a, x = factor_pair(rng, 96)
    letter = rng.choice("xyztnmk")
    if rng.random() < 0.5:
        b = rng.randint(1, 100 - a * x)
        equation = f"{a}{letter} + {b} = {a * x + b}"
        first = step(a * x + b, "-", b)
    else:
        b = rng.randint(1, a * x - 1)
        equation = f"{a}{letter} - {b} = {a * x - b}"
        first = step(a * x - b, "+", b)
    prompt = rng.choice(
        (
            f"Solve ${equation}$.",
            f"Solve for ${letter}$: ${equation}$.",
            f"If ${equation}$, what is ${letter}$?",
            f"Find ${letter}$ if ${equation}$.",
        )
    )
    return prompt, (first, step(a * x, "/", a)), x


def _linear_bracket(rng: random.Random) -> Problem:
    a, total = factor_pair(rng)
    letter = rng.choice("xyztnmk")
    if total > 2 and rng.random() < 0.4:
        b = rng.randint(1, total - 1)
        equation, last, x = f"{a}({letter} + {b})", step(total, "-", b), total - b
    else:
        b = rng.randint(1, 60)
        equation, last, x = f"{a}({letter} - {b})", step(total, "+", b), total + b
    equation += f" = {a * total}"
    prompt = rng.choice(
        (
            f"Solve ${equation}$.",
            f"Find ${letter}$ if ${equation}$.",
            f"If ${equation}$, what is ${letter}$?",
        )
    )
    return prompt, (step(a * total, "/", a), last), x


def _greatest_common_divisor(rng: random.Random) -> Problem:
    while True:
        unit = rng.randint(1, 12)
        a, b = (unit * rng.randint(2, 99 // unit) for _ in range(2))
        steps, divisor = _euclid(a, b)
        if len(steps) <= 4:
            break
    prompt = rng.choice(
        (
            f"What is the greatest common divisor of {a} and {b}?",
            f"Find the GCD of {a} and {b}.",
            f"Compute $\\gcd({a}, {b})$.",
            f"What is the largest number that divides {a} and {b}?",
        )
    )
    return prompt, steps, divisor


def _euclid(a: int, b: int) -> tuple[list[str], int]:
    """Euclid's algorithm by subtraction, so that each step is one fact."""
    steps = []
    while a != b:
        a, b = max(a, b), min(a, b)
        steps.append(step(a, "-", b))
        a, b = b, a - b
    return steps, a


def _remainder(rng: random.Random) -> Problem:
    divisor, quotient = factor_pair(rng, 88)
    rest = rng.randint(1, divisor - 1)
    number = divisor * quotient + rest
    c = rng.randint(1, 60)
    question = rng.choice(
        (
            f"What is the remainder when {number} is divided by {divisor}",
            f"Find the remainder of {number} divided by {divisor}",
            f"What is {number} mod {divisor}",
        )
    )
    prompt = f"{question}, plus {c}?"
    steps = (
        step(divisor, "*", quotient),
        step(number, "-", divisor * quotient),
        step(rest, "+", c),
    )
    return prompt, steps, rest + c


def _percent(rng: random.Random) -> Problem:
    tenths, share = rng.randint(2, 12), rng.choice((2, 3, 4, 6, 7, 8, 9))
    part = tenths * share
    c = rng.randint(1, 100 - part) if part < 100 else 0
    prompt = rng.choice(("Calculate {}% of {}", "Find {}% of {}", "Compute {}% of {}"))
    prompt = prompt.format(share * 10, tenths * 10)
    steps = [step(tenths * 10, "/", 10), step(tenths, "*", share)]
    if not c:
        return prompt + ".", steps, part
    return f"{prompt}, plus {c}.", (*steps, step(part, "+", c)), part + c


def _fraction(rng: random.Random) -> Problem:
    bottom, unit = factor_pair(rng)
    top = rng.randint(2, 12)
    while top == bottom or top * unit > 99:
        top = rng.randint(1, 11)
    c = rng.randint(1, 100 - top * unit)
    prompt = rng.choice(("Evaluate", "Compute", "Find"))
    prompt += rf" $\frac{{{top}}}{{{bottom}}} \cdot {bottom * unit} + {c}$."
    steps = [step(bottom * unit, "/", bottom)]
    if top > 1:
        steps.append(step(unit, "*", top))
    return prompt, (*steps, step(unit * top, "+", c)), unit * top + c


def _sequence(rng: random.Random) -> Problem:
    gap, count = factor_pair(rng, 88)
    first = rng.randint(1, 100 - gap * count)
    terms = ", ".join(str(first + i * gap) for i in range(3))
    prompt = rng.choice(
        (
            f"What is term {count + 1} of the arithmetic sequence {terms}, ...?",
            f"Find term number {count + 1} of the sequence {terms}, ...",
            f"An arithmetic sequence begins {terms}. What is term {count + 1}?",
        )
    )
    steps = (
        step(first + gap, "-", first),
        step(count + 1, "-", 1),
        step(gap, "*", count),
        step(first, "+", gap * count),
    )
    return prompt, steps, first + gap * count


def _area(rng: random.Random) -> Problem:
    a, b = factor_pair(rng, 96)
    c = rng.randint(1, a * b - 1)
    shape = rng.choice(("rectangle", "garden", "room", "field", "wall", "floor", "yard"))
    prompt = rng.choice(
        (
            f"A {shape} is {a} by {b}. An area of {c} is painted. What area is left?",
            f"From a {shape} of width {a} and length {b}, a piece of area {c} is cut. "
            "What area remains?",
        )
    )
    return prompt, (step(a, "*", b), step(a * b, "-", c)), a * b - c


def _perimeter(rng: random.Random) -> Problem:
    a, b = addends(rng, 50)
    shape = rng.choice(("rectangle", "garden", "room", "field", "park", "table", "yard"))
    prompt = rng.choice(
        (
            f"A {shape} has width {a} and length {b}. What is its perimeter?",
            f"Find the perimeter of a {shape} with sides {a} and {b}.",
            f"What is the perimeter of a {a} by {b} {shape}?",
        )
    )
    return prompt, (step(a, "+", b), step(2, "*", a + b)), 2 * (a + b)


def _function_value(rng: random.Random) -> Problem:
    a, x = factor_pair(rng, 90)
    name, letter = rng.choice("fghpq"), rng.choice("xtnz")
    if rng.random() < 0.5:
        b = rng.randint(1, 100 - a * x)
        body, last, result = f"{a}{letter} + {b}", step(a * x, "+", b), a * x + b
    else:
        b = rng.randint(1, a * x - 1)
        body, last, result = f"{a}{letter} - {b}", step(a * x, "-", b), a * x - b
    rule = f"${name}({letter}) = {body}$"
    prompt = rng.choice((f"If {rule}, what is ${name}({x})$?", f"Let {rule}. Find ${name}({x})$."))
    return prompt, (step(a, "*", x), last), result


def _substitute(rng: random.Random) -> Problem:
    a, x = factor_pair(rng, 70)
    b, y = factor_pair(rng, 100 - a * x)
    first, second = rng.choice(("xy", "ab", "mn", "pq", "st"))
    prompt = rng.choice(
        (
            f"If ${first} = {x}$ and ${second} = {y}$, what is ${a}{first} + {b}{second}$?",
            f"Evaluate ${a}{first} + {b}{second}$ for ${first} = {x}$ and ${second} = {y}$.",
        )
    )
    steps = (step(a, "*", x), step(b, "*", y), step(a * x, "+", b * y))
    return prompt, steps, a * x + b * y


def _average(rng: random.Random) -> Problem:
    count = rng.choice((3, 4))
    mean = rng.randint(3, 12)
    while True:
        numbers = [rng.randint(1, 2 * mean) for _ in range(count - 1)]
        numbers.append(count * mean - sum(numbers))
        if numbers[-1] >= 1:
            break
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    prompt = rng.choice(
        ("What is the average of {}?", "Find the mean of {}.", "Compute the average of {}.")
    ).format(listed)
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(step(total, "+", number))
        total += number
    return prompt, (*steps, step(total, "/", count)), mean


def _spread(rng: random.Random) -> Problem:
    numbers = rng.sample(range(2, 100), 4)
    listed = ", ".join(map(str, numbers))
    prompt = rng.choice(
        (
            f"What is the largest of {listed} minus the smallest?",
            f"Find the range of the numbers {listed}.",
            f"How far apart are the largest and the smallest of {listed}?",
        )
    )
    largest, smallest = max(numbers), min(numbers)
    return prompt, (step(largest, "-", smallest),), largest - smallest


def _digit_sum(rng: random.Random) -> Problem:
    number = "".join(str(rng.randint(1, 9)) for _ in range(4))
    prompt = rng.choice(
        (
            "What is the sum of the digits of {}?",
            "Find the digit sum of {}.",
            "Add up the digits of {}.",
        )
    ).format(number)
    a, b, c, d = map(int, number)
    steps = (step(a, "+", b), step(a + b, "+", c), step(a + b + c, "+", d))
    return prompt, steps, a + b + c + d


def _two_numbers(rng: random.Random) -> Problem:
    smaller = rng.randint(2, 48)
    gap = rng.randint(1, 50 - smaller)
    total = 2 * smaller + gap
    prompt = rng.choice(
        (
            f"Two numbers have sum {total} and difference {gap}. What is the smaller number?",
            f"The sum of two numbers is {total} and their difference is {gap}. "
            "Find the smaller one.",
        )
    )
    return prompt, (step(total, "-", gap), step(2 * smaller, "/", 2)), smaller


# Kinds with few distinct prompts are drawn less often.
_KINDS: tuple[tuple[Callable[[random.Random], Problem], float], ...] = (
    (_product_plus, 1.0),
    (_product_minus, 1.0),
    (_product_plus_minus, 1.5),
    (_two_products, 1.2),
    (_bracket, 1.2),
    (_sum_difference, 1.5),
    (_linear, 1.5),
    (_linear_bracket, 1.0),
    (_greatest_common_divisor, 0.5),
    (_remainder, 1.2),
    (_percent, 0.8),
    (_fraction, 1.0),
    (_sequence, 1.0),
    (_area, 1.2),
    (_perimeter, 0.5),
    (_function_value, 1.5),
    (_substitute, 1.5),
    (_average, 1.0),
    (_spread, 1.5),
    (_digit_sum, 0.6),
    (_two_numbers, 0.4),
)
_FUNCTIONS = tuple(kind for kind, _ in _KINDS)
_WEIGHTS = tuple(weight for _, weight in _KINDS)


def draw(rng: random.Random) -> Drawn:
    """Draws one problem of a random kind."""
    (kind,) = rng.choices(_FUNCTIONS, _WEIGHTS)
    prompt, steps, answer = kind(rng)
    completion = "\n".join((*steps, rf"\boxed{{{answer}}}"))
    return Drawn(Record(NAME, prompt, completion, str(answer)), numbers_in_test(prompt))
