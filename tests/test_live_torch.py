"""The parity cases with the torch and transformers installed here, on the recorded seed and others.

Collected only where both are installed (see conftest.py); `make check` runs it there.
"""

import numpy as np
import pytest
import torch
import transformers

from tests import parity
from tests.record_references import all_cases, save_checkpoints
from tests.reference_cases import (
    CASES,
    CHECKPOINTS,
    FRESH_SEEDS,
    HEAD,
    HEAD_CASES,
    HEAD_TOLERANCE,
    PROMPT_LENGTHS,
    ROPE_CASE,
    SEED,
    TARGET_TOLERANCE,
    block_name,
    prompt_name,
    read_case,
)

pytestmark = [pytest.mark.slow, pytest.mark.torch]

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # for matrices this small, threads only wait for each other

every_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)


@pytest.fixture(scope="module")
def recorded_anew(data_dir):
    """All cases, computed now on the checkpoints that were recorded."""
    return all_cases(data_dir, SEED)


@pytest.fixture(scope="module", params=(SEED, *FRESH_SEEDS))
def live(request, tmp_path_factory):
    """A folder of checkpoints that transformers saved just now, and all cases on them."""
    directory = tmp_path_factory.mktemp("checkpoints")
    save_checkpoints(directory, request.param)
    return directory, all_cases(directory, request.param)


@pytest.mark.parametrize("name", CASES)
def test_the_recorded_numbers_are_those_of_the_torch_installed_here(data_dir, recorded_anew, name):
    recorded, anew = read_case(data_dir, name), recorded_anew[name]
    assert recorded.keys() == anew.keys()
    tolerance = dict(rtol=0, atol=HEAD_TOLERANCE if name in HEAD_CASES else TARGET_TOLERANCE)
    if name == ROPE_CASE:  # some frequencies are far below the tolerances of logits
        tolerance = dict(rtol=1e-6, atol=0)
    for key, value in recorded.items():
        np.testing.assert_allclose(anew[key], value, **tolerance, err_msg=key)


@every_checkpoint
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_prompts_equal_transformers_live(live, name, length):
    directory, cases = live
    target, theirs = parity.load_target(directory / name), cases[prompt_name(name, length)]
    for ours in (parity.prompt_arrays, parity.cached_prompt_arrays):
        assert parity.worst_error(ours(target, theirs), theirs) < TARGET_TOLERANCE


@every_checkpoint
@pytest.mark.parametrize("restricted", [False, True], ids=["natural", "restricted"])
def test_a_verification_block_equals_transformers_live(live, name, restricted):
    directory, cases = live
    target, theirs = parity.load_target(directory / name), cases[block_name(name)]
    ours = parity.block_arrays(target, theirs, restricted=restricted)
    assert parity.worst_error(ours, theirs) < TARGET_TOLERANCE


@pytest.mark.parametrize("name", HEAD_CASES)
def test_the_head_equals_torch_live(live, name):
    directory, cases = live
    head = parity.load_head(directory / HEAD, HEAD_CASES[name])
    assert parity.worst_error(parity.head_arrays(head, cases[name]), cases[name]) < HEAD_TOLERANCE
