r"""Where in a completion its answer stands: the number after `####`, the last `\boxed{}`."""

import re
from fractions import Fraction

# What begins the next example of a few-shot prompt, or ends a turn that was decoded as text.
NEXT_QUESTION = ("\nQuestion:", "\nQ:", "\nProblem:", "<|im_end|>", "<|endoftext|>", "</s>")

_CURRENCY = r"(?:\\?[$€£¥₹])"
_CURRENCY_WORD = re.compile(r"(?<![A-Za-z])(?:USD|US(?=\$)|EUR|GBP|Rs\.?)\s?(?=[-−$\d])")
# A sign behind a digit, letter or bracket is an operator: the last number of "16-3" is 3.
_SIGN = r"(?<![\w.)\]}%])[-−+]"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A digit of a name or of an exponent (x2, m^2, m^{2}) begins no number.
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?(?:{_CURRENCY}\s?)?(?<![\w.^])(?<!\^\{{)"
    rf"(?:\\[dt]?frac\{{(?P<over>\d+)\}}\{{(?P<under>\d+)\}}"
    rf"|(?:(?P<whole>\d+) )?(?P<numerator>\d+)/(?P<denominator>\d+)(?![\d/])"
    rf"|(?P<digits>{_DIGITS}))"
)
_LONGEST = 300  # characters; what a model repeats for ever is no number
# "#### 1. First" is a heading, and "#### 18" an answer.
_MARKER = re.compile(r"####[ \t]*[*$\\(]*(?=[-−+$€£¥₹.\d\\])")
_HEADING = re.compile(r"####[ \t]*\d+[.):][ \t]+\S")


def cut(completion: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop; all of it where there is none."""
    starts = (completion.find(stop) for stop in stops)
    return completion[: min((start for start in starts if start >= 0), default=None)]


def final_number(text: str) -> Fraction | None:
    r"""The number that a text gives as its answer; None where there is none.

    It is the first number after the last `####`, else that in the last `\boxed{}`, else the last
    number. Signs, decimals, thousands separators, currency and units are understood: `$29.00` is
    29, `70,000.` is 70000, `-5` is not 5, and `1/2` is a half. `25%` is 25.
    """
    text = _CURRENCY_WORD.sub("$", without_spacing(text))
    for marker in reversed(list(_MARKER.finditer(text))):
        line = text[marker.end() :].partition("\n")[0]
        found = _NUMBER.search(line)
        if found and not _HEADING.match(text, marker.start()):
            return _value(found)
    boxed = last_boxed(text)
    numbers = list(_NUMBER.finditer(text if boxed is None else boxed))
    return _value(numbers[-1]) if numbers else None


def _value(found: re.Match) -> Fraction | None:
    part = found.groupdict()
    over, under = part["over"] or part["numerator"], part["under"] or part["denominator"]
    if len(found[0]) > _LONGEST:
        return None
    if over is None:
        number = Fraction(part["digits"].replace(",", ""))
    elif int(under) == 0:
        return None
    else:
        number = int(part["whole"] or 0) + Fraction(int(over), int(under))
    return -number if part["sign"] in ("-", "−") else number


def without_spacing(text: str) -> str:
    r"""Thousands separators as LaTeX sets them (`70{,}000`, `70\,000`) as plain commas."""
    return re.sub(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3})", ",", text)


def number_text(number: Fraction) -> str:
    """A number as text: a decimal where it has a short one, else a fraction."""
    if number.denominator == 1:
        return str(number.numerator)
    decimal = f"{float(number):.10g}"
    return decimal if Fraction(decimal) == number else str(number)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces balance, stripped; None without one.

    The last is the one that opens last, the inner one of two. `\fbox` counts too, and escaped
    braces (`\{`) do not count as braces.
    """
    opened, last = [], (-1, -1)
    for brace in re.finditer(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", text, re.DOTALL):
        if brace[0] == "{" or brace[1]:
            opened.append(brace.end() if brace[1] else None)
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if start is not None and start > last[0]:
                last = start, brace.start()
    return None if last[0] < 0 else text[slice(*last)].strip()
