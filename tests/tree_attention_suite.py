"""What every kernel of tree_attention promises; each implementation's tests are a subclass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import cases
from pallas_kernels.tree_attention.cases import SHAPES, AttentionShape

# Largest errors over the largest number of the reference: of 99.9 % of the numbers, and of all.
TOLERANCES = {"float32": (2e-6, 5e-6), "bfloat16": (0.01, 0.02)}
AWKWARD = ["awkward", "awkward-sliding"]


@functools.cache
def program(implementation: str):
    """tree_attention, jitted; kernels in interpret mode."""
    interpret = implementation != "xla"
    function = functools.partial(
        cases.by_position, implementation=implementation, interpret=interpret
    )
    return jax.jit(function)


def arguments(shape: AttentionShape, dtype: str = "float32", seed: int = 0) -> list[jax.Array]:
    return list(cases.random_arguments(jax.random.key(seed), shape, dtype))


def reference(*args):
    """In float32, of the same numbers."""
    floats = [None if x is None or x.dtype == bool else x.astype(jnp.float32) for x in args[:5]]
    return program("xla")(*floats[:3], args[3], floats[4], *args[5:])


def poisoned(args: list[jax.Array]) -> list[jax.Array]:
    """The arguments with NaN keys and values outside [begin, end)."""
    *_, begin, end = args
    place = jnp.arange(args[1].shape[0])[:, None, None]
    outside = (place < begin) | (place >= end)
    return [args[0], *(jnp.where(outside, jnp.nan, x) for x in args[1:3]), *args[3:]]


def with_range(args, mask, begin, end) -> list[jax.Array]:
    return [*args[:3], jnp.asarray(mask), args[4], jnp.int32(begin), jnp.int32(end)]


def assert_close(actual: jax.Array, expected: jax.Array, tolerances: tuple[float, float]) -> None:
    """`tolerances`: for 99.9 % of the numbers and for all, over the largest expected one."""
    expected = np.asarray(expected, np.float64)
    error = np.abs(np.asarray(actual, np.float64) - expected) / np.abs(expected).max()
    assert np.quantile(error, 0.999) <= tolerances[0]
    assert error.max() <= tolerances[1]


class TreeAttentionSuite:
    """Subclasses name the implementation, and the dtypes that it takes."""

    implementation: str
    dtypes = ("float32", "bfloat16")

    def run(self, *args):
        return program(self.implementation)(*args)

    @property
    def exact(self) -> str:
        """The most precise dtype, in which promises about data are tested."""
        return self.dtypes[0]

    @pytest.mark.parametrize("name", AWKWARD)
    def test_a_tree_behind_a_prefix_sees_what_the_reference_sees(self, name):
        for dtype in self.dtypes:
            args = arguments(SHAPES[name], dtype)
            assert_close(self.run(*poisoned(args)), reference(*args), TOLERANCES[dtype])

    @pytest.mark.parametrize("rows", [1, 10, 100])
    def test_any_number_of_rows(self, rows):
        shape = AttentionShape(rows, 6, 2, 26, cached=9, columns=111, sinks=rows == 10)
        args = arguments(shape, self.exact)
        assert_close(self.run(*poisoned(args)), reference(*args), TOLERANCES[self.exact])

    def test_any_range_of_columns_and_nothing_outside_it_is_used(self):
        """The first column and the last at, before and behind the edges of tiles."""
        shape, rng = SHAPES["awkward-sliding"], np.random.default_rng(1)
        args = arguments(shape, self.exact)
        for begin, end in [(0, 1), (0, 139), (31, 33), (32, 64), (33, 97), (63, 64), (96, 139)]:
            mask = np.zeros(args[3].shape, bool)
            mask[:, begin:end] = rng.random((shape.rows, end - begin)) < 0.5
            ranged = with_range(args, mask, begin, end)
            actual = self.run(*poisoned(ranged))
            assert_close(actual, reference(*ranged), TOLERANCES[self.exact])
        np.testing.assert_array_equal(self.run(*ranged), actual)

    def test_the_window_of_a_sliding_layer_moves_with_the_prefix(self):
        args = arguments(SHAPES["awkward-sliding"], self.exact)
        for cached in (0, 1, 20, 21, 52, 102):
            shape = dataclasses.replace(SHAPES["awkward-sliding"], cached=cached)
            mask = cases.random_mask(np.random.default_rng(cached), shape)
            ranged = with_range(args, mask, shape.begin, shape.end)
            actual = self.run(*poisoned(ranged))
            assert_close(actual, reference(*ranged), TOLERANCES[self.exact])

    def test_scores_and_sinks_of_any_size_overflow_nothing(self):
        """The greater takes all: the sink, whose value is zero, or keys of as large scores."""
        args = arguments(SHAPES["awkward-sliding"], self.exact)
        q, k, v, mask, sinks, begin, end = args
        for sink, value in [(1e4, 0.0), (-1e4, 2.0)]:
            actual = self.run(
                jnp.ones_like(q),
                jnp.full_like(k, -sink),
                jnp.full_like(v, 2),
                mask,
                jnp.full_like(sinks, sink),
                begin,
                end,
            )
            np.testing.assert_allclose(np.asarray(actual, np.float32), value, rtol=1e-6)

    @pytest.mark.parametrize("name", AWKWARD)
    def test_a_row_that_sees_nothing_is_zero_and_disturbs_no_other(self, name):
        """Without sinks as with them."""
        args = arguments(SHAPES[name], self.exact)
        blind = np.array([0, 9, 36])
        expected = np.array(self.run(*args))
        expected[blind] = 0
        args[3] = args[3].at[blind].set(False)
        np.testing.assert_array_equal(self.run(*args), expected)

    def test_the_same_input_gives_the_same_bits(self):
        args = arguments(SHAPES["awkward"], "bfloat16")
        np.testing.assert_array_equal(self.run(*args), self.run(*args))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [name for name in SHAPES if "long" not in name])
    def test_full_sizes(self, name):
        for dtype in self.dtypes:
            args = arguments(SHAPES[name], dtype)
            assert_close(self.run(*poisoned(args)), reference(*args), TOLERANCES[dtype])
