"""tree_attention in Mosaic GPU: the same promises, with races between copies and reads an error."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic_helpers import MmaLayouts
from pallas_kernels.tree_attention import cases
from pallas_kernels.tree_attention.cases import SHAPES
from tests.tree_attention_suite import TreeAttentionSuite, arguments


class TestMosaic(TreeAttentionSuite):
    implementation = "mosaic"


def test_numbers_that_tensor_cores_do_not_take_are_refused():
    with pytest.raises(ValueError, match="float32"):
        cases.by_position(*arguments(SHAPES["awkward"]), implementation="mosaic")


def _held(layout, shape: tuple[int, int]) -> np.ndarray:
    """Which elements each thread holds, in order: [warps, 8, 4, registers].

    A layout splits a matrix into tiles of tiles; the last five axes but one are rows of a tile.
    """
    layout = layout.to_mgpu()
    elements = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead = elements.shape[: elements.ndim - len(tile)]
        counts = [n // t for n, t in zip(elements.shape[len(lead) :], tile)]
        split = [x for pair in zip(counts, tile) for x in pair]
        elements = elements.reshape(*lead, *split)
        outer = [len(lead) + 2 * i for i in range(len(tile))]
        elements = elements.transpose(*range(len(lead)), *outer, *[axis + 1 for axis in outer])
    (warps, *replicated), lanes = layout.warp_dims, layout.lane_dims
    assert all(dim.times == 1 for dim in replicated)
    elements = np.moveaxis(elements, (warps, *lanes), (0, 1, 2))
    return elements.reshape(*elements.shape[:3], -1)


def test_a_thread_holds_the_same_scores_as_a_result_and_as_an_operand():
    """So that weights go from one product to the next without a copy."""
    layouts = MmaLayouts.of(64, 32, jnp.bfloat16)
    result, operand = (_held(layout, (64, 32)) for layout in (layouts.acc, layouts.lhs))
    assert result.shape == (4, 8, 4, 16)
    np.testing.assert_array_equal(result, operand)
