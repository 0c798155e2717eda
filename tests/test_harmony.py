"""Harmony: chats and answers as OpenAI's own package has them, and what of an answer is shown."""

import json
import types

import pytest
from absl import flags
from absl.testing import flagsaver

from acceptmoe_jax import Engine
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.pocket import chat, tokenizer as pocket_tokenizer
from acceptmoe_jax.runtime.requests import Request
from acceptmoe_jax.runtime.statistics import DecodeStatistics
from acceptmoe_jax.text import harmony
from acceptmoe_jax.text.stopping import StopRules
from acceptmoe_jax.text.tokenizer import Tokenizer
from experiments import engine_flags
from tests.chat_cases import write_standin
from tests.harmony_cases import ANSWERS, CHATS, STOP_IDS, TEXTS, needs_gpt_oss, unpack_gpt_oss

USER = {"role": "user", "content": "What is 7 * 8?"}
REASONED = "<|channel|>analysis<|message|>END is near.<|end|><|start|>assistant"
ANSWERED = "<|channel|>final<|message|>It is 56. END of it."


@pytest.fixture(scope="session")
def recorded(data_dir) -> dict:
    return json.loads((data_dir / "chat_harmony.json").read_text())


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    """A pocket model's, with a vocabulary of little more than bytes."""
    directory = tmp_path_factory.mktemp("small")
    trained = pocket_tokenizer.train_tokenizer(TEXTS, chat.HARMONY, 290)
    pocket_tokenizer.save_tokenizer(trained, directory)
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> Tokenizer:
    """GPT-OSS's, with the template of the pocket models."""
    directory = unpack_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))
    (directory / "chat_template.jinja").write_text(chat.HARMONY.template)
    return Tokenizer.from_directory(directory)


def expected(recorded: dict, name: str) -> harmony.Answer:
    """The final text is that of all final messages, and of those that name no channel."""
    channels = recorded["answers"][name]
    final = "".join(channels.get("final", []) + channels.get("None", []))
    return harmony.Answer(final, "\n".join(channels.get("analysis", [])))


def read(tokenizer: Tokenizer, text: str, prompt: str | None = None) -> harmony.Answer:
    """The answer to a chat, or to a prompt written out."""
    prompt_ids = tokenizer.encode_chat([USER]) if prompt is None else tokenizer.encode(prompt)
    return harmony.read_answer(tokenizer, prompt_ids, tokenizer.encode(text))


# As openai-harmony has it.


@pytest.mark.parametrize("name", CHATS)
def test_pocket_chats_are_written_as_openai_harmony_writes_them(small, recorded, name):
    messages, variables = CHATS[name]
    assert small.render_chat(messages, **variables) == recorded["chats"][name]["text"]


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_have_the_channels_that_openai_harmony_finds(small, recorded, name):
    assert read(small, ANSWERS[name]) == expected(recorded, name)


@needs_gpt_oss
def test_gpt_oss_ids_are_those_of_openai_harmony(gpt_oss, recorded):
    for name, (messages, variables) in CHATS.items():
        assert gpt_oss.encode_chat(messages, **variables) == recorded["chats"][name]["ids"], name
    for case in recorded["texts"]:
        assert gpt_oss.encode(case["text"]) == case["ids"]
        assert gpt_oss.decode(case["ids"]) == case["text"]


@needs_gpt_oss
def test_gpt_oss_stops_at_the_list_of_its_generation_config(gpt_oss, recorded):
    assert gpt_oss.stop_ids == set(STOP_IDS)
    tokens = ("<|return|>", "<|endoftext|>", "<|call|>")
    assert [gpt_oss.token_id(token) for token in tokens] == STOP_IDS
    assert set(recorded["stop_ids"]) <= gpt_oss.stop_ids


@needs_gpt_oss
def test_gpt_oss_answers_have_the_channels_that_openai_harmony_finds(gpt_oss, recorded):
    for name, text in ANSWERS.items():
        assert read(gpt_oss, text) == expected(recorded, name), name


# Answers that no parser of the format expects.


def test_an_answer_without_the_format_is_final_as_a_whole(small):
    assert read(small, "It is 56.<|return|>") == harmony.Answer("It is 56.", "")


def test_a_channel_may_open_without_its_start(small):
    answer = read(small, "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>56")
    assert answer == harmony.Answer("56", "hm")


def test_nothing_counts_between_an_end_and_the_next_header(small):
    answer = read(small, "<|channel|>final<|message|>56<|end|>noise<|start|>assistant")
    assert answer == harmony.Answer("56", "")


def test_what_a_model_writes_for_others_is_no_answer(small):
    answer = read(
        small,
        "<|channel|>final<|message|>56<|end|><|start|>user<|message|>Why?<|end|>"
        "<|start|>functions.times to=assistant<|channel|>commentary<|message|>56<|end|>",
    )
    assert answer == harmony.Answer("56", "")


def test_a_text_that_is_no_chat_goes_on_as_final(small):
    assert read(small, " dogs", prompt="cats and") == harmony.Answer(" dogs", "")


def test_a_prompt_may_open_the_channel_itself(small):
    opened = "<|start|>assistant<|channel|>analysis<|message|>7 *"
    answer = read(small, " 8<|end|><|start|>assistant<|channel|>final<|message|>56", opened)
    assert answer == harmony.Answer("56", " 8")


def test_other_models_answers_are_final_throughout(tmp_path):
    write_standin(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = "<|open|>assistant<|message|>a<|close|>b"
    ids = tokenizer.encode(text)
    assert harmony.ChannelReader(tokenizer, []).shown(ids) == ids
    answer = harmony.read_answer(tokenizer, tokenizer.encode_chat([USER]), ids)
    assert answer == harmony.Answer("assistant<|message|>ab", "")


# Stopping, token by token and in runs.


def stopped(tokenizer: Tokenizer, text: str, size: int) -> tuple[str, str | None]:
    """What is emitted of `text` in runs of `size` before END or a stop token, and the reason."""
    rules = StopRules(tokenizer.stop_ids, ("END",), max_new_tokens=1000)
    reader = harmony.ChannelReader(tokenizer, tokenizer.encode_chat([USER]))
    ids, shown, reason = tokenizer.encode(text), [], None
    while reason is None and len(shown) < len(ids):
        run = ids[len(shown) : len(shown) + size]
        kept, reason = rules.cut(shown, reader.shown(run), tokenizer.decode)
        shown.extend(kept)
    return tokenizer.decode(ids[: len(shown)], skip_special_tokens=False), reason


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_stop_strings_leave_the_reasoning_aside(small, size):
    emitted, reason = stopped(small, f"{REASONED}{ANSWERED}<|return|>", size)
    assert emitted == f"{REASONED}<|channel|>final<|message|>It is 56. END"
    assert reason == "stop_string"


@pytest.mark.parametrize("size", [1, 5, 100])
@pytest.mark.parametrize("stop", ["<|return|>", "<|call|>", "<|endoftext|>"])
def test_stop_tokens_end_an_answer_in_every_channel(small, stop, size):
    for begun in ("", "<|channel|>analysis", "<|channel|>analysis<|message|>hm", ANSWERED[:-11]):
        assert stopped(small, f"{begun}{stop}more", size) == (f"{begun}{stop}", "stop_token")


# The engine, its model's answer given.


class Scripted(Engine):
    """An engine without a model, which encodes prompts."""

    def __init__(self, tokenizer: Tokenizer):
        setup = types.SimpleNamespace(target=types.SimpleNamespace(vocab_size=290))
        self.model = types.SimpleNamespace(setup=setup, tokenizer=tokenizer)


def generate(
    tokenizer: Tokenizer,
    answer: str,
    prompt=USER["content"],
    max_new_tokens=256,
    stop_strings=(),
    on_tokens=lambda index, new: None,
    **chat_options,
):
    """The generation of a model that writes a given answer, three tokens at a time."""
    rules = StopRules(tokenizer.stop_ids, tuple(stop_strings), max_new_tokens)
    ids = Scripted(tokenizer).encode(prompt, **chat_options)
    request = Request(0, ids, rules, tokenizer, DecodeStatistics(0, 0))
    script, at = tokenizer.encode(answer), 0
    while request.stop_reason is None:
        run = script[at : at + 3] if at else script[:1]
        assert run, "the answer is at its end, and nothing stopped it"
        on_tokens(0, request.emit(run))
        at += len(run)
    return request.generation()


def test_a_generation_parts_its_text_from_its_reasoning(small):
    seen = []
    whole = f"{REASONED}{ANSWERED}<|return|>"
    generation = generate(small, whole, on_tokens=lambda _, new: seen.extend(new))
    assert (generation.text, generation.reasoning) == ("It is 56. END of it.", "END is near.")
    assert generation.stop_reason == "stop_token"
    assert list(generation.token_ids) == seen == small.encode(whole)


def test_a_stop_string_cuts_the_text_of_a_reasoned_answer(small):
    generation = generate(small, f"{REASONED}{ANSWERED}<|return|>", stop_strings=["END"])
    assert (generation.text, generation.reasoning) == ("It is 56. ", "END is near.")
    assert generation.stop_reason == "stop_string"


def test_an_answer_cut_while_it_reasons_has_no_text(small):
    limit = len(small.encode(REASONED)) - 6
    generation = generate(small, f"{REASONED}{ANSWERED}", max_new_tokens=limit)
    assert generation.text == "" and "END is near.".startswith(generation.reasoning)
    assert generation.reasoning and generation.stop_reason == "length"


def test_the_reasoning_effort_reaches_the_template(small):
    effort = {"reasoning_effort": "high"}
    for prompt in (USER["content"], [USER]):
        generation = generate(small, f"{ANSWERED}<|return|>", prompt, chat_variables=effort)
        asked = small.decode(generation.prompt_ids, skip_special_tokens=False)
        assert asked.startswith("<|start|>system<|message|>Reasoning: high<|end|>")


def test_a_setting_that_no_template_reads_is_refused(small, tmp_path):
    effort = {"chat_variables": {"reasoning_effort": "low"}}
    engine = Scripted(small)
    with pytest.raises(UserError, match="enable_thinking: the chat template of .* knows no such"):
        engine.encode("7 * 8", chat_variables={"enable_thinking": False})
    for prompt, chat_flag in (("7 * 8", False), ([40, 41], None)):
        with pytest.raises(UserError, match="reasoning_effort: .* the prompt is not rendered"):
            engine.encode(prompt, chat_flag, **effort)
    write_standin(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    bare = Scripted(Tokenizer.from_directory(tmp_path))
    with pytest.raises(UserError, match="reasoning_effort: .* the prompt is not rendered"):
        bare.encode("7 * 8", **effort)
    with pytest.raises(UserError, match="has no chat template"):
        bare.encode([USER], **effort)


def test_the_flag_is_the_templates_variable(small):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["generate", "--target=x", "--output_dir=x"], known_only=True)
    assert engine_flags.chat_options() == {"chat": None, "chat_variables": {}}
    with flagsaver.flagsaver(reasoning_effort="low"):
        options = engine_flags.chat_options()
    generation = generate(small, f"{ANSWERED}<|return|>", **options)
    assert generation.prompt_ids == tuple(small.encode_chat([USER], reasoning_effort="low"))
