"""commitment_select: the Mosaic GPU kernel against `select`, any race in it being an error."""

import numpy as np
import pytest

from pallas_kernels.commitment_select import SHAPES, supports
from tests import commitment_select_parity as parity
from tests.commitment_select_parity import CONFIGS

# Interpreting a block takes a quarter of a second: but for the method itself, a few of each kind.
FEW = slice(0, None, 7)
# To this kernel, whose tiles are 32 rows by 128 experts, a pocket shape is a part of a full one.
LARGE = [name for name in SHAPES if not name.startswith("pocket")]


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if supports(c, "mosaic")])
def test_every_policy_decides_and_weighs_as_select_does(name):
    blocks = parity.blocks()
    if name != "acceptmoe":
        blocks = tuple(array[FEW] for array in blocks)
    parity.check_against_select("mosaic", CONFIGS[name], blocks)


@pytest.mark.parametrize("shape", parity.worked_cases())
def test_every_intermediate_of_the_worked_cases(shape):
    parity.check_worked_cases("mosaic", parity.worked_cases()[shape])


@pytest.mark.parametrize("name", LARGE)
def test_every_named_shape_agrees_with_select(name):
    parity.check_shape("mosaic", name)


@pytest.mark.parametrize("policy", ["native", "acceptmoe"])
def test_a_forced_set_replaces_the_eligible_one_and_nothing_before_it(policy):
    blocks = tuple(array[FEW] for array in parity.blocks())
    override = np.random.default_rng(1).random((len(blocks[0]), 14)) < 0.6
    ours = parity.check_against_select("mosaic", CONFIGS[policy], blocks, override)
    np.testing.assert_array_equal(ours.eligible, override)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_root_keeps_its_experts_and_weights_exactly(norm_topk_prob):
    parity.check_root_is_exact("mosaic", norm_topk_prob)
