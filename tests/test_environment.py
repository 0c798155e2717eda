"""The scripts behind `make`: which interpreter is taken, and when an environment is (re)made."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests import source_tree

# A stand-in for an interpreter: the one that runs the tests, told that it is another.
INTERPRETER = """#!/bin/sh
exec {python} -c '
import sys
sys.version_info, sys._base_executable = {version}, "{path}"
sys.modules.update(dict.fromkeys("{missing}".split()))
del sys.argv[0]
exec(sys.stdin.read())' "$@"
"""
# A stand-in that makes environments of one file and notes what pip was told.
ENVIRONMENT_MAKER = """#!/bin/sh
case $2 in
    venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    pip) echo "$@" >>pip.log; exit "${PIP_STATUS-0}" ;;
    *) echo "/python ${PYTHON_VERSION-3.13.0}" ;;
esac
"""


def run(script: str, *arguments: str, folder: pathlib.Path, **environment: str):
    """Runs a script of .ci in a folder whose own commands come first."""
    return subprocess.run(
        ["sh", str(source_tree.ROOT / ".ci" / script), *arguments],
        cwd=folder,
        env=os.environ | {"PATH": f"{folder}:/usr/bin:/bin"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def write_command(folder: pathlib.Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def write_interpreter(folder, name, version=(3, 11, 0), missing=""):
    write_command(
        folder,
        name,
        INTERPRETER.format(
            python=sys.executable, version=version, path=folder / name, missing=missing
        ),
    )


def test_the_newest_interpreter_is_taken(tmp_path):
    write_interpreter(tmp_path, "one", (3, 11, 9))
    write_interpreter(tmp_path, "two", (3, 13, 0))
    write_interpreter(tmp_path, "three", (3, 12, 10))
    found = run("find_python", "one", "two", "three", folder=tmp_path)
    assert found.stdout == f"{tmp_path}/two\n"


def test_a_command_with_nothing_behind_it_is_passed_over(tmp_path):
    write_command(tmp_path, "shim", "#!/bin/sh\nexit 127\n")
    write_interpreter(tmp_path, "real")
    assert run("find_python", "shim", "real", folder=tmp_path).stdout == f"{tmp_path}/real\n"


def test_a_version_is_found_off_the_path(tmp_path):
    place = tmp_path / "pyenv" / "versions" / "3.98.1" / "bin"
    place.mkdir(parents=True)
    write_interpreter(place, "python3.98", (3, 98, 1))
    found = run("find_python", "3.98", folder=tmp_path, PYENV_ROOT=str(tmp_path / "pyenv"))
    assert found.stdout == f"{place}/python3.98\n"


@pytest.mark.parametrize(
    ("version", "missing", "reason"),
    [
        ((3, 10, 4), "", "old is Python 3.10, and 3.11 or newer is needed."),
        ((3, 12, 1), "ensurepip", "apt install python3.12-venv"),
    ],
)
def test_an_interpreter_that_cannot_serve_gets_one_clear_line(tmp_path, version, missing, reason):
    write_interpreter(tmp_path, "old", version, missing)
    found = run("find_python", "old", folder=tmp_path)
    assert found.returncode == 1
    assert not found.stdout
    assert found.stderr.count("\n") == 1
    assert reason in found.stderr


class Environment:
    """A folder with one requirements file, and `make_venv` to install it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        write_command(folder, "python", ENVIRONMENT_MAKER)
        self.require("jax[cuda12]==0.12.*\n")
        self.log = folder / "pip.log"

    def require(self, text: str, name: str = "requirements.txt") -> None:
        (self.folder / name).write_text(text)

    def make(self, *names: str, **environment: str):
        """Returns the finished process and how often pip was called."""
        self.log.write_text("")
        files = names or ("requirements.txt",)
        done = run("make_venv", "venv", "python", *files, folder=self.folder, **environment)
        return done, len(self.log.read_text().splitlines())

    def is_new(self) -> bool:
        """Whether it was made since the last call."""
        old = self.folder / "venv" / "old"
        is_new = not old.exists()
        old.touch()
        return is_new


@pytest.fixture
def environment(tmp_path) -> Environment:
    """An environment that has just been made."""
    environment = Environment(tmp_path)
    done, installations = environment.make(CUDA="0")
    assert (done.returncode, installations, environment.is_new()) == (0, 1, True)
    return environment


def test_a_second_run_installs_nothing_and_says_nothing(environment):
    done, installations = environment.make(CUDA="0")
    assert (done.returncode, done.stdout, installations) == (0, "", 0)
    assert not environment.is_new()


def test_further_requirements_are_added(environment):
    environment.require("pytest\n", "more.txt")
    _, installations = environment.make("requirements.txt", "more.txt", CUDA="0")
    assert installations == 1
    assert "more.txt" in environment.log.read_text()
    assert "requirements.txt" not in environment.log.read_text()
    assert not environment.is_new()


@pytest.mark.parametrize("change", ["requirements", "interpreter", "broken", "GPU"])
def test_what_was_made_for_something_else_is_made_anew(environment, change):
    settings = {"CUDA": "1" if change == "GPU" else "0"}
    if change == "requirements":
        environment.require("jax==0.10.2\n")
    if change == "interpreter":
        settings["PYTHON_VERSION"] = "3.12.0"
    if change == "broken":
        (environment.folder / "venv" / "bin" / "python").unlink()
    _, installations = environment.make(**settings)
    assert (installations, environment.is_new()) == (1, True)


def test_a_failed_installation_is_done_again_from_scratch(environment):
    environment.require("jax==0.10.2\n")
    done, _ = environment.make(CUDA="0", PIP_STATUS="1")
    assert done.returncode != 0
    environment.is_new()
    done, installations = environment.make(CUDA="0")
    assert (done.returncode, installations, environment.is_new()) == (0, 1, True)


@pytest.mark.parametrize(
    ("cuda", "asked"), [("0", "jax==0.12.*\n"), ("1", "jax[cuda12]==0.12.*\n")]
)
def test_only_a_machine_with_a_gpu_installs_cuda(environment, cuda, asked):
    environment.make(CUDA=cuda)
    installed = environment.folder / "venv" / "installed" / "requirements.txt"
    assert installed.read_text() == asked
