"""MXFP4: every code at every scale, and the rounding against a search over the whole grid."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mxfp4 import Mxfp4, dequantise, quantise, round_to_mxfp4

SMALLEST_NORMAL = 2.0**-126


def element(code: int) -> float:
    """E2M1 as specified: the sign, two exponent bits with a bias of 1, one bit of mantissa."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def every_byte_at_every_scale() -> tuple[Mxfp4, np.ndarray]:
    """256 matrices, one a scale, each of 2 rows of 8 blocks; and their values in float64."""
    all_bytes = np.arange(256, dtype=np.uint8).reshape(2, 8, 16)
    packed = Mxfp4(
        jnp.asarray(np.broadcast_to(all_bytes, (256, 2, 8, 16))),
        jnp.asarray(np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None], (256, 2, 8))),
    )
    pairs = [[element(byte & 15), element(byte >> 4)] for byte in range(256)]
    factors = 2.0 ** (np.arange(256.0) - 127)
    factors[255] = np.nan
    return packed, factors[:, None, None] * np.array(pairs).reshape(2, 256)


def assert_same_bits(actual, expected: np.ndarray) -> None:
    """Equal, with the sign of zeros; NaNs are all alike."""
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype
    actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))


def wide_weights(rows: int, blocks: int) -> np.ndarray:
    """Weights of very different blocks: outliers, few bits, few values, tiny and huge ones."""
    rng = np.random.default_rng(7)
    weights = rng.standard_t(2, (rows, blocks, 32)).astype(np.float32)
    weights[1::4] = np.round(4 * weights[1::4]) / 4  # many ties
    weights[2::4] = rng.choice([0.25, 0.75, 2.5, 5, 7, -0.0, 0], (len(weights[2::4]), blocks, 32))
    weights[3::4] = rng.choice([1.5, 2, -4, 6, 7.8], (len(weights[3::4]), blocks, 32))
    weights *= np.exp2(rng.integers(-100, 100, (rows, blocks, 1))).astype(np.float32)
    return weights.reshape(rows, blocks * 32)


# --- Reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_byte_at_every_scale_reads_as_specified(dtype):
    """Subnormal numbers (scales 0 and 1) read as 0, numbers beyond the dtype as infinity."""
    packed, values = every_byte_at_every_scale()
    expected = np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(0, values), values)
    with np.errstate(over="ignore"):
        expected = expected.astype(dtype)
    assert np.isinf(expected.astype(np.float32)).any() and np.isnan(expected[255]).all()
    assert_same_bits(jax.jit(dequantise, static_argnums=1)(packed, dtype), expected)


def test_the_low_nibble_is_the_even_element():
    blocks = jnp.zeros((1, 1, 16), jnp.uint8).at[0, 0, :2].set(jnp.array([0x10, 0x32], jnp.uint8))
    values = dequantise(Mxfp4(blocks, jnp.full((1, 1), 127, jnp.uint8)))
    np.testing.assert_array_equal(values[0, :5], [0, 0.5, 1, 1.5, 0])


def test_leading_axes_are_chosen_before_anything_is_read():
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (5, 3, 2, 16), dtype=np.uint8)
    scales = rng.integers(120, 130, (5, 3, 2), dtype=np.uint8)
    packed = Mxfp4(jnp.asarray(blocks), jnp.asarray(scales))
    assert packed.shape == (5, 3, 64)
    chosen = packed[jnp.array([[4, 1], [0, 4], [2, 2], [3, 1]])]
    assert chosen.shape == (4, 2, 3, 64)
    np.testing.assert_array_equal(dequantise(chosen)[1, 1], dequantise(packed)[4])
    np.testing.assert_array_equal(dequantise(packed[2]), dequantise(packed)[2])


def test_a_weight_takes_four_and_a_quarter_bits():
    packed = jax.eval_shape(quantise, jax.ShapeDtypeStruct((7, 96, 160), jnp.float32))
    assert packed.shape == (7, 96, 160)
    assert 8 * sum(leaf.size for leaf in jax.tree.leaves(packed)) == 4.25 * 7 * 96 * 160


# --- Rounding ----------------------------------------------------------------------------------


def nearest_on_grid(scaled: np.ndarray) -> np.ndarray:
    """Of the eight magnitudes the nearest to each number; of two as near, the one of even code."""
    grid = np.array([element(code) for code in range(8)])
    distance = np.abs(np.abs(scaled)[..., None] - grid)
    ties = distance == distance.min(-1, keepdims=True)
    even = np.arange(8) % 2 == 0
    code = np.where(ties.sum(-1) > 1, np.argmax(ties & even, -1), np.argmax(ties, -1))
    return np.copysign(grid[code], scaled)


def test_weights_round_to_the_nearest_at_the_better_of_two_scales():
    weights = wide_weights(40, 9)
    blocks = weights.astype(np.float64).reshape(40, 9, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(largest, SMALLEST_NORMAL))) - 2)
    candidates = [nearest_on_grid(blocks / u) * u for u in (unit, 2 * unit)]
    errors = [np.square((c - blocks) / unit).sum(-1) for c in candidates]
    # The choice sees the errors in steps of 1/256 of the unit: of two as good, either is right.
    first, second = errors[0] < errors[1] - 0.25, errors[1] < errors[0] - 0.25
    assert first.sum() > 50 and second.sum() > 50
    rounded = np.asarray(round_to_mxfp4(jnp.asarray(weights))).reshape(40, 9, 32)
    np.testing.assert_array_equal(rounded[first], candidates[0][first])
    np.testing.assert_array_equal(rounded[second], candidates[1][second])
    either = (rounded == candidates[0]).all(-1) | (rounded == candidates[1]).all(-1)
    assert either.all()


def test_ties_go_to_the_even_code():
    row = np.full(32, 0.5, np.float32)  # so that the scale is that of the 6
    row[:8] = [6, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5]
    rounded = round_to_mxfp4(jnp.asarray(row[None]))[0]
    np.testing.assert_array_equal(rounded[:9], [6, 0, 1, -1, 2, 2, -4, 4, 0.5])


def test_the_scale_follows_the_smaller_error():
    """A 7.5 among halves saturates at 6, or the halves were lost; among fours it becomes an 8."""
    weights = np.array([[7.5] + 31 * [0.5], [7.5] + 31 * [4]], np.float32)
    packed = quantise(jnp.asarray(weights))
    np.testing.assert_array_equal(packed.scales, [[127], [128]])
    np.testing.assert_array_equal(dequantise(packed), [[6] + 31 * [0.5], [8] + 31 * [4]])


def test_what_mxfp4_holds_stays_as_it_is():
    packed, values = every_byte_at_every_scale()
    finite = slice(2, 253)  # the scales whose values are all normal numbers or zeros
    again = jax.jit(lambda packed: dequantise(quantise(dequantise(packed))))(packed[finite])
    assert_same_bits(again, values[finite].astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_is_packing_and_unpacking_bit_for_bit(dtype):
    weights = jnp.asarray(wide_weights(200, 11), dtype)
    rounded = jax.jit(round_to_mxfp4)(weights)
    assert_same_bits(rounded, np.asarray(dequantise(jax.jit(quantise)(weights), dtype)))
    assert_same_bits(rounded, np.asarray(round_to_mxfp4(weights)))  # op by op, too
    assert (rounded != weights).mean() > 0.5


def test_zeros_keep_their_sign():
    weights = np.zeros((1, 64), np.float32)
    weights[0, 3::5] = -0.0
    weights[0, 32] = 1.0
    assert_same_bits(dequantise(quantise(jnp.asarray(weights))), weights)


def test_the_largest_floats_stay_finite():
    weights = np.full((1, 32), np.finfo(np.float32).max)
    weights[0, 1] = -weights[0, 1]
    np.testing.assert_array_equal(
        dequantise(quantise(jnp.asarray(weights))), np.sign(weights) * 6 * 2.0**125
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_without_a_code_makes_its_block_nan(bad):
    weights = np.ones((1, 96), np.float32)
    weights[0, 40] = bad
    expected = np.ones((1, 96), np.float32)
    expected[0, 32:64] = np.nan
    assert_same_bits(dequantise(quantise(jnp.asarray(weights))), expected)
    assert_same_bits(round_to_mxfp4(jnp.asarray(weights)), expected)


def test_rows_must_be_whole_blocks():
    with pytest.raises(ValueError, match="rows of 48 are not whole blocks of 32"):
        quantise(jnp.zeros((3, 48)))
