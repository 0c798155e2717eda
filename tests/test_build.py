"""BUILD against the tree: no source is left out, nothing is named that is not there.

Bazel itself is not needed: a BUILD file that only calls rules is also a Python program, so that
Python's own parser reads it.
"""

import ast
import dataclasses
import pathlib
from collections import Counter

import pytest
from packaging.utils import canonicalize_name

from tests import source_tree

# What a py_test executes: the one source that several targets may name.
TEST_MAIN = "tests/run_pytest.py"
LOCK = "tests/requirements-lock.txt"
# Not in the lock file, since torch would bring CUDA; `make check` runs what needs these.
OUTSIDE_BAZEL = {"openai-harmony", "torch", "transformers"}


@dataclasses.dataclass(frozen=True)
class Target:
    """One call of a rule in BUILD."""

    rule: str
    name: str
    srcs: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    deps: tuple[str, ...] = ()
    main: str | None = None


def parse_targets(text: str) -> list[Target]:
    """Reads the rule calls of a BUILD file."""
    targets = []
    for statement in ast.parse(text).body:
        call = statement.value
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if "name" not in given:
            continue  # load() and package() make no target
        lists = {key: tuple(given.get(key, ())) for key in ("srcs", "args", "data", "deps")}
        targets.append(Target(call.func.id, given["name"], main=given.get("main"), **lists))
    return targets


TARGETS = parse_targets((source_tree.ROOT / "BUILD").read_text())
OWNERS = {path: target for target in TARGETS for path in target.srcs if path != TEST_MAIN}
SOURCES = [path for path in source_tree.sources() if path != TEST_MAIN]


def package_label(distribution: str) -> str:
    """The label that rules_python gives to a distribution of the lock file."""
    return "@pypi//" + canonicalize_name(distribution).replace("-", "_")


def test_target_names_are_unique():
    times = Counter(target.name for target in TARGETS)
    assert not {name for name, count in times.items() if count > 1}


def test_every_source_is_in_exactly_one_target():
    times = Counter(path for target in TARGETS for path in target.srcs)
    assert {path: times[path] for path in SOURCES if times[path] != 1} == {}


def test_every_file_and_target_that_a_target_names_exists():
    names = {f":{target.name}" for target in TARGETS}
    missing = {
        (target.name, named)
        for target in TARGETS
        for named in target.srcs + target.data + target.deps
        if not named.startswith("@")
        and named not in names
        and not (source_tree.ROOT / named).is_file()
    }
    assert not missing


def test_every_file_of_tests_is_a_test_and_every_program_a_binary():
    def rule(path: str) -> str:
        if pathlib.Path(path).name.startswith("test_"):
            return "py_test"
        return "py_binary" if source_tree.is_program(path) else "py_library"

    expected = {path: rule(path) for path in SOURCES}
    assert {path: OWNERS[path].rule for path in SOURCES} == expected


def test_every_test_runs_its_own_file_and_every_program_itself():
    for target in TARGETS:
        if target.rule == "py_test":
            assert target.main == TEST_MAIN
            assert target.srcs == (TEST_MAIN, *target.args)
        if target.rule == "py_binary":
            assert (target.main,) == target.srcs


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_dependencies_are_what_the_sources_import(target):
    labels = set()
    for path in target.srcs:
        if path.endswith(".py"):
            own, others = source_tree.imported(path)
            labels |= {f":{OWNERS[file].name}" for file in own}
            labels |= {package_label(name) for name in others - OUTSIDE_BAZEL}
    if target.rule == "py_test":
        labels.add(":tests_conftest")  # pytest imports it
    assert set(target.deps) == labels - {f":{target.name}"}


def test_no_target_depends_on_itself():
    below = {target.name: [d[1:] for d in target.deps if d[0] == ":"] for target in TARGETS}
    while leaves := {name for name, names in below.items() if not set(names) & below.keys()}:
        below = {name: names for name, names in below.items() if name not in leaves}
    assert not below


@pytest.mark.parametrize(("group", "folder"), [("checkpoints",) * 2, ("test_data", "tests/data")])
def test_every_data_file_is_in_its_group(group, folder):
    (target,) = (target for target in TARGETS if target.name == group)
    assert sorted(target.srcs) == source_tree.files(folder)


def test_every_package_that_a_target_names_is_locked():
    named = {label for target in TARGETS for label in target.deps if label[0] == "@"}
    assert named <= {package_label(name) for name in source_tree.required(LOCK)}


@pytest.mark.parametrize("path", ["requirements.txt", "tests/requirements.txt"])
def test_the_locked_versions_are_within_the_bounds(path):
    locked = {
        canonicalize_name(entry.name): str(entry.specifier).removeprefix("==")
        for entry, _ in source_tree.requirement_lines(LOCK)
    }
    for entry, _ in source_tree.requirement_lines(path):
        if entry.marker is None or entry.marker.evaluate({"python_version": "3.13"}):
            assert entry.specifier.contains(locked[canonicalize_name(entry.name)]), entry
