"""EVICT in the engine: lossless, its lengths chosen by measured costs."""

import itertools

import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.runtime import decoding, evict
from acceptmoe_jax.runtime.evict import EvictConfig
from acceptmoe_jax.speculation import CostTable
from tests import pocket

NEW_TOKENS = 24
CONFIG = EvictConfig(lengths=(5, 16), repeats=1)


@pytest.fixture
def costs(monkeypatch):
    """Costs by length in place of the clock's, so that lengths of every kind are chosen."""
    table = CostTable((5, 16, 64), (1.0, 1.3, 1.5))
    monkeypatch.setattr(decoding.evict, "profile", lambda *args: table)
    engine = pocket.engine()
    engine._evict_costs.clear()
    yield table
    engine._evict_costs.clear()


def test_evict_is_token_identical_with_standard_sd(costs):
    engine, prompts = pocket.engine(), pocket.prompts(each=2)
    seen = set()
    options = {"selector": "native", "max_new_tokens": NEW_TOKENS}
    whole = engine.generate(prompts, **options)
    cut = engine.generate(
        prompts, evict=CONFIG, observe=lambda _, one: seen.add(len(one.tokens)), **options
    )
    assert [g.token_ids for g in cut] == [g.token_ids for g in whole]
    assert seen <= set(costs.lengths) and len(seen) > 1
    rows = sum(g.statistics.nodes_by_depth.sum() for g in cut)
    assert rows < sum(g.statistics.nodes_by_depth.sum() for g in whole)


def test_a_profile_runs_each_length_in_turn_and_takes_the_median():
    ran, durations = [], iter([5.0, 2.0, 1.0, 4.0, 30.0, 3.0])
    clock = itertools.accumulate(
        itertools.chain.from_iterable((0.0, duration) for duration in durations)
    )
    table = evict.profile(ran.append, 20, EvictConfig(lengths=(4,), repeats=3), lambda: next(clock))
    assert ran == [4, 20] * 4  # once to compile
    assert table == CostTable((4, 20), (5.0, 3.0))


def test_lengths_beyond_the_tree_are_left_out_and_its_own_joins():
    assert EvictConfig(lengths=(4, 9, 70)).lengths_of(20) == (4, 9, 20)
    assert EvictConfig(lengths=(4, 20)).lengths_of(20) == (4, 20)


def test_evict_is_refused_where_there_is_no_single_tree():
    engine = pocket.engine()
    with pytest.raises(UserError, match="autoregressive"):
        engine.generate(["x"], selector="autoregressive", evict=CONFIG)
    with pytest.raises(UserError, match="batch_size"):
        engine.generate(["x"], selector="native", evict=CONFIG, batch_size=2)
    with pytest.raises(UserError, match="lengths"):
        EvictConfig(lengths=(16, 8))


def test_other_lengths_are_measured_anew(monkeypatch):
    engine, prompt = pocket.engine(), pocket.prompts(each=1)[0]
    asked = []

    def profile(run_round, nodes, config):
        asked.append(config.lengths)
        return CostTable((nodes,), (1.0,))

    monkeypatch.setattr(decoding.evict, "profile", profile)
    engine._evict_costs.clear()
    for lengths in ((5,), (5,), (9,)):
        config = EvictConfig(lengths=lengths)
        engine.generate([prompt], selector="native", max_new_tokens=8, evict=config)
    engine._evict_costs.clear()
    assert asked == [(5,), (9,)]
