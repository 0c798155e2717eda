"""Draws in the engine: reproduced by seeds, greedy at the limit, and the target's distribution."""

import collections

import pytest

from acceptmoe_jax.speculation import SamplingConfig
from tests import pocket

# The pocket models are sure of most tokens, so nothing less makes them draw.
WARM = SamplingConfig(temperature=3.0)


def _answers(count, **options):
    prompts = pocket.prompts(each=1)[:count]
    answers = pocket.engine().generate(prompts, max_new_tokens=12, **options)
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("selector", ["autoregressive", "native"])
def test_a_seed_reproduces_and_another_draws_otherwise(selector):
    options = {"selector": selector, "sampling": WARM}
    assert _answers(3, seed=7, **options) == _answers(3, seed=7, **options)
    assert _answers(3, seed=7, **options) != _answers(3, seed=8, **options)


def test_the_same_prompt_draws_otherwise_at_another_place():
    prompt = pocket.prompts(each=1)[0]
    options = {"selector": "autoregressive", "sampling": WARM, "max_new_tokens": 12}
    answers = pocket.engine().generate([prompt] * 4, **options)
    assert len({answer.token_ids for answer in answers}) > 1


def test_one_token_to_choose_from_is_greedy_decoding():
    greedy = _answers(2, selector="native")
    only_best = SamplingConfig(temperature=5.0, top_k=1)
    assert _answers(2, selector="native", sampling=only_best) == greedy


@pytest.mark.slow
def test_draws_by_a_tree_have_the_distribution_of_plain_draws():
    # The first token comes from prefill, the next ones from verifications: the third token's
    # frequencies, given the first two, are those of plain decoding.
    prompt = pocket.prompts(each=1)[0]
    sampling = SamplingConfig(temperature=2.5, top_k=3)
    counts = {}
    for selector in ("autoregressive", "native"):
        answers = pocket.engine().generate(
            [prompt] * 600, selector=selector, sampling=sampling, max_new_tokens=3, batch_size=1
        )
        counts[selector] = collections.Counter(answer.token_ids[1:] for answer in answers)
    plain, tree = counts["autoregressive"], counts["native"]
    assert len(plain) > 3, "hardly anything is left to chance: the test shows little"
    # Homogeneity of two samples, by chi-square over pairs seen often enough.
    kept = [pair for pair in plain | tree if plain[pair] + tree[pair] >= 20]
    statistic = sum((plain[p] - tree[p]) ** 2 / (plain[p] + tree[p]) for p in kept)
    # The 99.9 % point is below twice the number of cells plus 12 for any number of cells here.
    assert statistic < 2 * len(kept) + 12
