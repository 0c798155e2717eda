"""A journal keeps what a run has finished, and notices a run of other settings."""

import json

import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.journal import Journal

SETTINGS = {"seed": 3, "phat": (1.0, 0.5), "tree": {"nodes": 9}}


def test_what_is_added_is_there_for_the_next_run(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    journal = Journal(path, SETTINGS)
    assert "a" not in journal and not path.exists()
    journal.add("a", {"x": [1, 2.5], "y": None})
    journal.add("b", {"x": (3,)})
    again = Journal(path, SETTINGS)
    for held in (journal, again):
        assert held["a"] == {"x": [1, 2.5], "y": None} and held["b"] == {"x": [3]}
    again.add("c", 1)
    lines = path.read_text().splitlines()
    assert [json.loads(line).get("key") for line in lines] == [None, "a", "b", "c"]


def test_a_key_is_added_once(tmp_path):
    journal = Journal(tmp_path / "rows.jsonl", SETTINGS)
    journal.add("a", 1)
    with pytest.raises(ValueError, match="'a' is in .* already"):
        journal.add("a", 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SETTINGS | {"seed": 4}, "seed is 3, not 4"),
        (SETTINGS | {"phat": (1.0, 0.25)}, r"phat is \[1.0, 0.5\], not \[1.0, 0.25\]"),
        ({"seed": 3, "phat": (1.0, 0.5)}, "tree is .*9.*, not null"),
        (SETTINGS | {"slots": 48}, "slots is null, not 48"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, other, message):
    path = tmp_path / "rows.jsonl"
    Journal(path, SETTINGS).add("a", 1)
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"{path} is of other settings: {message}"):
        Journal(path, other)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{}\n", '{"settings": {}}\n{"key": "a"', "[1]\n"])
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=f"{path} is not what a run leaves behind"):
        Journal(path, {})
