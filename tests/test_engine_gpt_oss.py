"""The engine on the shipped GPT-OSS pocket checkpoint: MXFP4, windows, harmony, exactness."""

import jax
import jax.numpy as jnp
import pytest

from acceptmoe_jax import Engine
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.gpt_oss import SLIDING
from acceptmoe_jax.pocket import families, scoring
from pallas_kernels.mxfp4 import Mxfp4
from tests import pocket

NEW_TOKENS = 48


def _engine() -> Engine:
    return pocket.engine(pocket.GPT_OSS_TARGET, pocket.GPT_OSS_HEAD)


def _file_bytes(directory) -> int:
    return (directory / "model.safetensors").stat().st_size


def test_native_speculation_is_token_identical_with_plain_decoding():
    prompts = pocket.prompts(each=5)
    config = _engine().model.setup.target
    assert SLIDING in config.layer_types
    assert min(len(_engine().encode(prompt)) for prompt in prompts) > config.sliding_window
    pocket.assert_native_is_plain(_engine(), prompts, NEW_TOKENS)


@pytest.mark.slow
def test_native_speculation_is_token_identical_over_a_hundred_prompts():
    pocket.assert_native_is_plain(_engine(), pocket.prompts(each=26, seed=2), NEW_TOKENS)


def test_loaded_as_it_is_stored_it_needs_the_memory_of_its_files():
    """Weights in bfloat16 as on disk, experts packed: within a tenth of the files' sizes."""
    before = {id(array) for array in jax.live_arrays()}
    engine = Engine.from_pretrained(
        str(pocket.GPT_OSS_TARGET), str(pocket.GPT_OSS_HEAD), dtype="bfloat16"
    )
    placed = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    stored = _file_bytes(pocket.GPT_OSS_TARGET) + _file_bytes(pocket.GPT_OSS_HEAD)
    assert 0.9 * stored < placed < 1.1 * stored
    for bank in engine.model.weights.banks:
        assert all(isinstance(matrix, Mxfp4) for matrix in (bank.gate, bank.up, bank.down))


def test_in_float32_the_experts_stay_packed_too():
    experts = jax.tree.leaves(_engine().model.weights.banks)
    packed = sum(leaf.nbytes for leaf in experts if leaf.dtype == jnp.uint8)
    config = _engine().model.setup.target
    matrices = 3 * config.hidden_size * config.expert_width
    assert 8 * packed == 4.25 * config.num_layers * config.num_experts * matrices


def test_the_checkpoints_of_the_family_stay_under_64_megabytes():
    assert _file_bytes(pocket.GPT_OSS_TARGET) + _file_bytes(pocket.GPT_OSS_HEAD) < 64e6


def test_it_stops_at_any_id_of_its_generation_config():
    tokenizer = _engine().tokenizer
    stops = {tokenizer.token_id(token) for token in ("<|return|>", "<|endoftext|>", "<|call|>")}
    assert tokenizer.stop_ids == stops
    for generation in _engine().generate(
        pocket.prompts(each=1), selector="native", max_new_tokens=NEW_TOKENS
    ):
        assert generation.stop_reason == "stop_token"
        assert generation.token_ids[-1] == tokenizer.token_id("<|return|>")


def test_the_text_is_the_final_channel_and_is_what_is_scored():
    records = [
        record for family in families.FAMILIES for record in families.generate(family, "test", 1, 2)
    ]
    generations = _engine().generate(
        [record.prompt for record in records], selector="native", max_new_tokens=NEW_TOKENS
    )
    header = _engine().tokenizer.decode(generations[0].token_ids, skip_special_tokens=False)
    assert header.startswith("<|channel|>final<|message|>")
    assert not any("final" in generation.text for generation in generations)
    right = [scoring.is_correct(r, g.text) for r, g in zip(records, generations, strict=True)]
    assert sum(right) >= 6, "the answers of the shipped checkpoint are not found in its text"


def test_every_reasoning_effort_is_rendered_and_an_unknown_one_is_refused():
    prompt = pocket.prompts(each=1)[0]
    encoded = {
        effort: _engine().encode(prompt, chat_variables={"reasoning_effort": effort})
        for effort in ("low", "medium", "high")
    }
    assert len(set(encoded.values())) == 3
    assert _engine().encode(prompt) == encoded["medium"]
    with pytest.raises(UserError, match="extreme"):
        _engine().encode(prompt, chat_variables={"reasoning_effort": "extreme"})


def test_the_shipped_commitment_table_makes_acceptmoe_smaller_than_the_natural_union():
    for generation in _engine().generate(
        pocket.prompts(each=1), selector="acceptmoe", max_new_tokens=NEW_TOKENS
    ):
        statistics = generation.statistics
        assert (statistics.used < statistics.natural_union).any()
