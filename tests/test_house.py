"""The house: what lies at the top, what may ship, and what a stranger is told first."""

import ast
import re

import pytest

from tests import source_tree

TOP_LEVEL = {
    *(".ci", ".gitignore", "BUILD", "LICENSE", "MODULE.bazel", "Makefile", "README.md"),
    *("acceptmoe_jax", "checkpoints", "experiments", "pallas_kernels", "pyproject.toml"),
    *("requirements.txt", "tests"),
}
# Hosts that a text may point to: papers, code, models, licenses.
HOSTS = {"arxiv.org", "github.com", "huggingface.co", "www.apache.org"}
MB = 10**6


def texts() -> dict[str, str]:
    """Every file that people wrote, by name."""
    kinds = (".py", ".md", ".toml", ".txt", "Makefile", "BUILD", ".bazel", ".gitignore")
    return {
        path: (source_tree.ROOT / path).read_text()
        for path in source_tree.files()
        if (path.endswith(kinds) or path.startswith(".ci/")) and not path.startswith("tests/data/")
    }


def size_of(folder: str) -> int:
    return sum((source_tree.ROOT / path).stat().st_size for path in source_tree.files(folder))


def test_the_top_level_is_as_agreed():
    assert {path.split("/")[0] for path in source_tree.files()} == TOP_LEVEL


def test_what_ships_is_small():
    assert size_of("checkpoints") < 64 * MB
    assert size_of("tests/data") < 5 * MB


def test_no_text_names_a_place_on_one_machine():
    place = re.compile(r"(?<![\w.*}])/(home|root|work|Users|mnt)/")
    assert not {path for path, text in texts().items() if place.search(text)}


def test_links_lead_to_public_sources_only():
    link = re.compile(r"https?://([\w.-]+)")
    named = {(path, host) for path, text in texts().items() for host in link.findall(text)}
    assert not {(path, host) for path, host in named if host not in HOSTS}


def test_every_module_says_what_it_is():
    assert not {
        path for path in source_tree.sources() if not ast.get_docstring(source_tree.parsed(path))
    }


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_readme_names_the_two_commands(command):
    assert command in (source_tree.ROOT / "README.md").read_text()


def test_the_license_is_apache_2():
    words = (source_tree.ROOT / "LICENSE").read_text().split()
    assert words[:4] == ["Apache", "License", "Version", "2.0,"]
    assert words[-2:] == ["the", "License."]
