"""A report is one page that fetches nothing and shows what it was given."""

import base64
import html.parser
import io
import re

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from acceptmoe_jax import report_page
from acceptmoe_jax.figures import png
from acceptmoe_jax.report_page import Heading, Paragraph, Picture, Table


class Reader(html.parser.HTMLParser):
    """What a page shows, and every attribute that could name something outside of it."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.tags[-1], data.strip()))


def picture() -> bytes:
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([1, 4, 2])
    return png(figure)


def read(*parts) -> tuple[str, Reader]:
    page = report_page.render("A title", parts)
    return page, Reader(page)


def test_a_page_fetches_nothing():
    page, reader = read(
        Heading("h"), Paragraph("p"), Picture(picture(), "c"), Table("t", [{"a": 1}], {"a": "d"})
    )
    assert all(source.startswith("data:image/png;base64,") for source in reader.sources)
    assert not {"script", "link", "iframe", "object", "base"} & set(reader.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r'"data:[^"]*"', "", page))


def test_a_picture_comes_out_as_it_went_in():
    _, reader = read(Picture(picture(), "caption"))
    data = base64.b64decode(reader.sources[0].split(",")[1], validate=True)
    assert data == picture()
    assert matplotlib.image.imread(io.BytesIO(data)).shape[:2] == (200, 300)
    assert np.ptp(matplotlib.image.imread(io.BytesIO(data))) > 0


def test_what_is_no_png_is_refused():
    with pytest.raises(ValueError, match="'a map' is not a PNG"):
        Picture(b"GIF89a", "a map")


def test_a_table_shows_its_cells_in_their_formats():
    rows = [
        {"name": "x", "long_name": 0.51, "none": None},
        {"name": "y", "long_name": 2, "none": 7},
    ]
    _, reader = read(Table("measured on z", rows, {"name": "", "long_name": ".1f", "none": "d"}))
    assert ("figcaption", "measured on z") in reader.texts
    assert [text for tag, text in reader.texts if tag == "th"] == ["name", "long name", "none"]
    cells = [text for tag, text in reader.texts if tag == "td"]
    assert cells == ["x", "0.5", "-", "y", "2.0", "7"]


def test_markup_in_a_text_is_text():
    nasty = '<script>alert("&amp;")</script>'
    parts = [Heading(nasty), Paragraph(nasty), Picture(picture(), nasty)]
    page, reader = read(*parts, Table(nasty, [{nasty: nasty}], {nasty: ""}))
    assert "script" not in reader.tags
    assert sum(text == nasty for _, text in reader.texts) == 6
