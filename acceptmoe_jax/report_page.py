"""A report as one HTML page that needs nothing else: no script, no font, nothing to fetch."""

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any

from acceptmoe_jax import reporting

_PNG = b"\x89PNG\r\n\x1a\n"

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
p { max-width: 48rem; }
figure { margin: 1.2rem 0; overflow-x: auto; }
figcaption { color: #555; font-size: 0.9rem; max-width: 60rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left;
         white-space: nowrap; }
th { border-bottom: 2px solid #888; }
.number { text-align: right; }
"""


@dataclasses.dataclass(frozen=True)
class Heading:
    """Begins a section."""

    text: str


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """Numbers, as `reporting.print_table` shows them.

    Attributes:
      title: says what the numbers are and what they were measured on.
      rows: one mapping a row.
      formats: key -> format specification; see `reporting.print_table`.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    formats: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
      png: the file's bytes.
      caption: says what it shows and what that was measured on.

    Raises:
      ValueError: if the bytes are no PNG.
    """

    png: bytes
    caption: str

    def __post_init__(self):
        if not self.png.startswith(_PNG):
            raise ValueError(f"the picture {self.caption!r} is not a PNG")


Part = Heading | Paragraph | Table | Picture


def render(title: str, parts: Sequence[Part]) -> str:
    """The page. All text is shown as it is: markup in it is escaped.

    Args:
      title: of the page.
      parts: from top to bottom.
    """
    body = "\n".join(map(_part, parts))
    title = html.escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
    )


def _part(part: Part) -> str:
    match part:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Picture(png, caption):
            data, caption = base64.b64encode(png).decode(), html.escape(caption)
            image = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
            return f"<figure>{image}\n<figcaption>{caption}</figcaption></figure>"
        case Table(title, rows, formats):
            kinds = [' class="number"' if spec else "" for spec in formats.values()]
            head = _row("th", [key.replace("_", " ") for key in formats], kinds)
            body = "\n".join(_row("td", reporting.cells(row, formats), kinds) for row in rows)
            return (
                f"<figure><figcaption>{html.escape(title)}</figcaption>\n<table>\n"
                f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table></figure>"
            )


def _row(tag: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    filled = (f"<{tag}{k}>{html.escape(c)}</{tag}>" for c, k in zip(cells, kinds, strict=True))
    return f"<tr>{''.join(filled)}</tr>"
