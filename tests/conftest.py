"""What holds for every test: where the recorded references lie, and what is collected."""

import importlib.metadata
import importlib.util
import os
import pathlib

import packaging.version
import pytest

# Correctness is shown in float32 on the CPU; a test that wants an accelerator says so itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Where torch and transformers, or openai-harmony, are not installed the live comparisons with them
# are not collected at all: a skip would read as if it might run there. `make check` runs them where
# they are.
collect_ignore = []
if importlib.util.find_spec("openai_harmony") is None:
    collect_ignore.append("test_live_harmony.py")
if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    collect_ignore += ["test_live_torch.py", "test_live_mxfp4.py", "test_live_compare.py"]
# Mosaic GPU needs jax 0.11; `make check` tests with an older jax and with a newer one.
if packaging.version.parse(importlib.metadata.version("jax")) < packaging.version.parse("0.11"):
    collect_ignore_glob = ["test_*_mosaic.py"]


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of recorded references and worked cases."""
    return pathlib.Path(__file__).parent / "data"
