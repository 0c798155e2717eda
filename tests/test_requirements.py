"""The requirements files: complete, bounded, with a reason each, and run time apart from tests."""

import tomllib

import pytest
from packaging.utils import canonicalize_name

from tests import source_tree

RUN_TIME = "requirements.txt"
TESTS = "tests/requirements.txt"
TORCH = "tests/requirements-torch.txt"


def distributions(*, of_tests: bool) -> set[str]:
    """The distributions that the tests import, or that everything else does."""
    paths = [path for path in source_tree.sources() if path.startswith("tests/") == of_tests]
    return set().union(*(source_tree.imported(path)[1] for path in paths))


@pytest.mark.parametrize("path", [RUN_TIME, TESTS, TORCH])
def test_every_requirement_is_bounded_above_and_says_why(path):
    for entry, reason in source_tree.requirement_lines(path):
        assert {bound.operator for bound in entry.specifier} & {"<", "=="}, entry
        assert len(reason.split()) >= 4, entry


def test_the_product_requires_exactly_what_it_imports():
    # jaxlib comes with jax
    assert distributions(of_tests=False) - {"jaxlib"} == source_tree.required(RUN_TIME)


def test_tests_require_what_they_import_besides():
    known = set().union(*map(source_tree.required, (RUN_TIME, TESTS, TORCH)))
    assert distributions(of_tests=True) <= known


def test_test_requirements_are_kept_apart():
    assert not source_tree.required(RUN_TIME) & source_tree.required(TESTS)
    assert not (
        source_tree.required(RUN_TIME) | source_tree.required(TESTS)
    ) & source_tree.required(TORCH)


@pytest.mark.parametrize(
    ("python", "version"), [("3.11", "0.10.2"), ("3.12", "0.12.0"), ("3.13", "0.12.0")]
)
def test_each_python_gets_its_one_jax(python, version):
    asked = [
        entry.specifier
        for entry, _ in source_tree.requirement_lines(RUN_TIME)
        if entry.name == "jax" and entry.marker.evaluate({"python_version": python})
    ]
    assert [specifier.contains(version) for specifier in asked] == [True]


def test_an_installed_package_requires_the_same_list():
    project = tomllib.loads((source_tree.ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": [RUN_TIME]}
    assert canonicalize_name(project["project"]["name"]) == "acceptmoe-jax"
