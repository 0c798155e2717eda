"""The engine on the shipped pocket checkpoint: exactness, stopping, counting, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax import Engine, selection
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.runtime.statistics import summarise
from acceptmoe_jax.selection import CommitmentTable, SelectorConfig
from tests import pocket

NEW_TOKENS = 48
BUDGETED = ("acceptmoe_fix", "moe_spec")


def test_native_speculation_is_token_identical_with_plain_decoding():
    pocket.assert_native_is_plain(pocket.engine(), pocket.prompts(each=8), NEW_TOKENS)


@pytest.mark.slow
def test_native_speculation_is_token_identical_over_two_hundred_prompts():
    pocket.assert_native_is_plain(pocket.engine(), pocket.prompts(each=52, seed=2), NEW_TOKENS)


def test_a_second_prompt_of_a_known_length_compiles_nothing():
    engine = pocket.engine()
    first, second, third = pocket.prompts(each=1)[:3]
    engine.generate([first], selector="acceptmoe", max_new_tokens=NEW_TOKENS, audit_every=1)
    again = engine.generate(
        [second, third], selector="acceptmoe", max_new_tokens=NEW_TOKENS, audit_every=1
    )
    assert [generation.statistics.compile_seconds for generation in again] == [0, 0]


def test_an_audit_changes_no_token():
    engine, prompts = pocket.engine(), pocket.prompts(each=1)
    plain, audited = (
        engine.generate(prompts, selector="acceptmoe", max_new_tokens=NEW_TOKENS, audit_every=audit)
        for audit in (False, True)
    )
    assert [g.token_ids for g in plain] == [g.token_ids for g in audited]
    assert all(g.statistics.audited_rows == 0 for g in plain)
    assert all(g.statistics.audited_rows == sum(g.statistics.accepted_lengths) for g in audited)


def test_what_a_prompt_yields_does_not_depend_on_what_ran_before():
    engine = pocket.engine()
    first, second, *_ = pocket.prompts(each=1)
    alone = engine.generate([second], selector="acceptmoe", max_new_tokens=NEW_TOKENS)[0]
    after = engine.generate([first, second], selector="acceptmoe", max_new_tokens=NEW_TOKENS)[1]
    assert alone.token_ids == after.token_ids
    assert alone.statistics.accepted_lengths == after.statistics.accepted_lengths


def test_reach_adds_up_to_the_mean_accepted_length():
    generations = pocket.engine().generate(
        pocket.prompts(each=1), selector="native", max_new_tokens=NEW_TOKENS
    )
    statistics = [generation.statistics for generation in generations]
    reach = sum(s.reach for s in statistics)
    summary = summarise(statistics, sum(len(g.token_ids) for g in generations))
    assert reach.sum() / summary["verifications"] == pytest.approx(summary["accepted_length"])
    assert reach[0] == summary["verifications"] == sum(s.nodes_by_depth[0] for s in statistics)
    assert sum(s.nodes_by_depth for s in statistics).sum() == 64 * summary["verifications"]


def test_emitted_tokens_are_accepted_tokens_up_to_the_cut():
    for generation in pocket.engine().generate(
        pocket.prompts(each=2), selector="native", max_new_tokens=NEW_TOKENS
    ):
        accepted = 1 + sum(generation.statistics.accepted_lengths)  # prefill yields the first
        emitted = len(generation.token_ids)
        last = generation.statistics.accepted_lengths[-1]
        assert accepted - last < emitted <= accepted
        if generation.stop_reason != "stop_token":
            assert emitted == accepted or generation.stop_reason == "length"


def test_a_stop_token_inside_an_accepted_run_ends_the_answer_there():
    engine = pocket.engine()
    generations = engine.generate(
        pocket.prompts(each=4), selector="native", max_new_tokens=NEW_TOKENS
    )
    stops = engine.tokenizer.stop_ids
    cut_inside_a_run = 0
    for generation in generations:
        assert not stops & set(generation.token_ids[:-1])
        if generation.stop_reason == "stop_token":
            assert generation.token_ids[-1] in stops
            accepted = 1 + sum(generation.statistics.accepted_lengths)
            cut_inside_a_run += accepted > len(generation.token_ids)
    assert cut_inside_a_run, "no stop token stood inside a run: the test shows nothing"


@pytest.mark.parametrize("selector", ["autoregressive", "native"])
def test_the_token_limit_cuts_inside_a_run(selector):
    prompt = pocket.prompts(each=1)[:1]
    long = pocket.engine().generate(prompt, selector=selector, max_new_tokens=NEW_TOKENS)[0]
    for limit in range(1, 6):
        short = pocket.engine().generate(prompt, selector=selector, max_new_tokens=limit)[0]
        assert short.token_ids == long.token_ids[:limit]
        assert short.stop_reason == "length"


def test_a_stop_string_is_cut_off_the_text():
    prompt = pocket.prompts(each=1)[:1]
    whole = pocket.engine().generate(prompt, selector="native", max_new_tokens=NEW_TOKENS)[0]
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = pocket.engine().generate(
        prompt, selector="native", max_new_tokens=NEW_TOKENS, stop_strings=[stop]
    )[0]
    assert cut.stop_reason == "stop_string"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_policies_restrict_what_native_uses():
    engine, prompts = pocket.engine(), pocket.prompts(each=1)
    budgeted = {name: selection.SelectorConfig(policy=name, budget=20) for name in BUDGETED}
    for name, selector in {"acceptmoe": "acceptmoe", **budgeted}.items():
        generations = engine.generate(prompts, selector=selector, max_new_tokens=NEW_TOKENS)
        summary = summarise([g.statistics for g in generations], 0)
        assert summary["used"] < summary["natural_union"], name
        if name == "acceptmoe_fix":
            # Fewer than the budget only where fewer experts have demand.
            assert summary["used"] == summary["eligible"] <= 20
        if name == "moe_spec":
            assert summary["used"] <= summary["eligible"] == 20


def test_the_first_round_is_not_a_token_behind():
    """A head that lagged would start low after prefill and recover once drafting extends it."""
    generations = pocket.engine().generate(
        pocket.prompts(each=8), selector="native", max_new_tokens=24
    )
    firsts = [g.statistics.accepted_lengths[0] for g in generations]
    later = [a for g in generations for a in g.statistics.accepted_lengths[1:3]]
    assert np.mean(firsts) > 0.6 * np.mean(later)


def test_a_prompt_longer_than_a_prefill_program_goes_through_several():
    engine = pocket.engine()
    ids = engine.encode("Once more. " * 120, chat=False)
    assert len(ids) > 256
    plain, native = (
        engine.generate([ids], selector=selector, max_new_tokens=12)[0]
        for selector in ("autoregressive", "native")
    )
    assert plain.token_ids == native.token_ids


@pytest.mark.parametrize("prompt", ["", "  \n", []])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(UserError, match="empty"):
        pocket.engine().generate([prompt], selector="native", max_new_tokens=4)


def test_a_prompt_longer_than_the_cache_is_refused_before_any_decoding():
    with pytest.raises(UserError, match="prompt 1 .*max_length = 1024"):
        pocket.engine().generate(["short", "word " * 2000], selector="native", max_new_tokens=4)


def test_token_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(UserError, match="outside the vocabulary"):
        pocket.engine().generate([[5, 999_999]], selector="native", max_new_tokens=4)


def test_an_unknown_policy_and_an_impossible_budget_are_refused():
    engine = pocket.engine()
    with pytest.raises(UserError, match="nonsense"):
        engine.generate(["x"], selector="nonsense")
    with pytest.raises(UserError, match="budget"):
        engine.generate(["x"], selector="moe_spec")
    with pytest.raises(UserError, match="129"):
        engine.generate(["x"], selector=selection.SelectorConfig(policy="moe_spec", budget=129))


def test_a_policy_that_drafts_needs_a_head():
    engine = Engine.from_pretrained(str(pocket.TARGET), dtype="float32")
    with pytest.raises(UserError, match="draft"):
        engine.generate(["x"], selector="native")


def test_a_commitment_table_of_another_target_is_refused():
    table = pocket.engine().commitment
    foreign = dataclasses.replace(table, target_hash="0" * 64)
    with pytest.raises(UserError, match="another target"):
        Engine.from_pretrained(
            str(pocket.TARGET), str(pocket.HEAD), commitment=foreign, dtype="float32"
        )


def test_a_commitment_table_too_shallow_for_the_tree_is_refused():
    table = pocket.engine().commitment
    shallow = CommitmentTable.from_counts(
        table.reach[:3],
        table.nodes[:3],
        table.verifications,
        target_hash=table.target_hash,
        head_hash=table.head_hash,
        data="",
        seed=0,
    )
    with pytest.raises(UserError, match="depths up to 2"):
        Engine.from_pretrained(
            str(pocket.TARGET), str(pocket.HEAD), commitment=shallow, dtype="float32"
        )


def test_bfloat16_runs_and_keeps_its_caches_in_bfloat16():
    engine = Engine.from_pretrained(str(pocket.TARGET), str(pocket.HEAD), dtype="bfloat16")
    dtypes = {
        leaf.dtype.name
        for leaf in jax.tree.leaves(engine.model.weights)
        if leaf.dtype.kind == "V" or "float" in leaf.dtype.name
    }
    assert dtypes == {"bfloat16"}
    generation = engine.generate(pocket.prompts(each=1)[:1], selector="acceptmoe", max_new_tokens=8)
    assert len(generation[0].token_ids) == 8


def test_weighing_by_path_is_refused_where_the_table_has_no_path_calibration():
    engine = pocket.engine()
    bare = dataclasses.replace(engine.commitment, path=None)
    without = Engine(engine.model, bare, dtype=jnp.float32, max_length=256)
    by_path = SelectorConfig(path=True)
    assert engine.selector(by_path).weighs_paths
    with pytest.raises(UserError, match="holds none"):
        without.selector(by_path)
