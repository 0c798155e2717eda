"""tree_attention: the Triton kernels' promises, and how the decoder calls the op."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton as plgpu

from acceptmoe_jax.models import decoder
from acceptmoe_jax.models.attention import first_column, window_mask
from acceptmoe_jax.models.gpt_oss import FULL, SLIDING
from pallas_kernels.tree_attention import IMPLEMENTATIONS, cases
from pallas_kernels.tree_attention.cases import SHAPES
from pallas_kernels.tree_attention.triton import tiles_for, tiles_of_split, triton
from tests import tiny_models
from tests.tree_attention_suite import (
    TOLERANCES,
    TreeAttentionSuite,
    arguments,
    assert_close,
    poisoned,
    reference,
)


class TestTriton(TreeAttentionSuite):
    implementation = "triton"

    @pytest.mark.parametrize("name", ["pocket-qwen3-moe", "pocket-gpt-oss-sliding"])
    def test_the_pocket_models_layers(self, name):
        args = arguments(SHAPES[name], "float32")
        assert_close(self.run(*poisoned(args)), reference(*args), TOLERANCES["float32"])


@pytest.mark.parametrize("splits", [1, 2, 9])
def test_any_number_of_splits_merges_to_the_same(splits):
    """9 are more than there are tiles."""
    tiles = dataclasses.replace(tiles_for(26, jnp.float32), rows=128, programs=2 * splits)
    args = arguments(SHAPES["awkward-sliding"])
    actual = jax.jit(functools.partial(triton, tiles=tiles, interpret=True))(*args)
    assert_close(actual, reference(*args), TOLERANCES["float32"])


def test_splits_cover_every_tile_of_the_range_once_and_in_order():
    columns, splits = 4, 5
    begin, end = np.array([(b, e) for e in range(51) for b in range(e)]).T
    divide = jax.vmap(lambda *span: tiles_of_split(jnp.arange(splits), *span, columns, splits))
    for b, e, first, last, live in zip(begin, end, *map(np.asarray, divide(begin, end))):
        tiles = [tile for split in range(live) for tile in range(first[split], last[split])]
        assert tiles == list(range(b // columns, -(-e // columns)))
        assert (first[:live] < last[:live]).all() and (first[live:] >= last[live:]).all()


def test_each_tile_of_the_range_is_loaded_once_a_block_of_rows_and_no_other(monkeypatch):
    """Counts loads of keys and values: a sliding layer's cost is its window's, not its cache's."""
    shape = dataclasses.replace(SHAPES["awkward-sliding"], columns=147)
    tiles = tiles_for(shape.width, jnp.float32)
    cache_shape = (shape.columns, shape.kv_heads, shape.width)
    loads, load = collections.Counter(), plgpu.load

    def counting(ref, **options):
        if ref.ref.shape == cache_shape:
            column, kv_head, _ = ref.transforms[-1].indices
            jax.debug.callback(
                lambda *at: loads.update([tuple(int(x.ravel()[0]) for x in at)]), column, kv_head
            )
        return load(ref, **options)

    monkeypatch.setattr(plgpu, "load", counting)
    run = functools.partial(cases.by_position, implementation="triton", interpret=True)
    jax.jit(run)(*arguments(shape)).block_until_ready()
    jax.effects_barrier()
    blocks = -(-shape.rows * 3 // tiles.rows)
    first = shape.begin // tiles.columns * tiles.columns
    assert loads == {
        (column, kv_head): 2 * blocks  # keys and values
        for column in range(first, shape.end, tiles.columns)
        for kv_head in range(shape.kv_heads)
    }


def test_the_first_column_is_the_first_that_a_window_shows():
    place = np.arange(40)
    for window in (1, 7, None):
        for start in (0, 3, 6, 7, 29):
            seen = window_mask(np.tri(40, dtype=bool), place, place, window)[start:]
            first = np.flatnonzero(seen.any(axis=0))[0]
            assert first_column(jnp.int32(start), window) == first


def test_the_decoder_asks_for_live_columns_and_sliding_layers_for_their_window():
    """A chunk that crosses the window's edge; whatever else the caches hold is NaN."""
    config = dataclasses.replace(
        tiny_models.GPT_OSS, num_layers=2, layer_types=(SLIDING, FULL), sliding_window=7
    )
    rows, start, place = 9, 21, jnp.arange(48)
    params = decoder.init_params(jax.random.key(0), config)
    caches = decoder.empty_caches(config, len(place), jnp.float32)
    keys = iter(jax.random.split(jax.random.key(1), 4))
    caches = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), caches)

    @functools.partial(jax.jit, static_argnums=0)
    def forward(attention, caches):
        at = start + jnp.arange(rows)
        return decoder.Decoder(config, attention, interpret=True).apply(
            {"params": params},
            jnp.arange(rows),
            at,
            place <= at[:, None],
            banks=(None, None),
            moe=lambda layer, x, logits, bank: (x, None),
            caches=caches,
            start=jnp.int32(start),
        )

    def only(cache, first):
        live = (place >= first) & (place < start + rows)
        return jax.tree.map(lambda leaf: jnp.where(live[:, None, None], leaf, jnp.nan), cache)

    live = (only(caches[0], start - 6), only(caches[1], 0))
    expected = forward("xla", caches).hidden
    assert_close(forward("triton", live).hidden, expected, (1e-5, 2e-5))


def test_an_unknown_implementation_is_refused_by_name():
    args = poisoned(arguments(SHAPES["awkward"]))
    with pytest.raises(ValueError, match="nonsense"):
        cases.by_position(*args, implementation="nonsense")


def test_what_is_compiled_every_day_is_full_size():
    for name in IMPLEMENTATIONS[1:]:
        everyday = {case.shape for case in cases.kernel_cases(name) if case.everyday}
        assert everyday == {"qwen3-30b-a3b", "gpt-oss-120b"}
