"""Tokenizers, chat templates as transformers renders them, and stop ids."""

import json
import pathlib

import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.text.tokenizer import Tokenizer
from tests.chat_cases import (
    CASES,
    SPECIAL_TOKENS,
    needs_tokenizer,
    unpack_tokenizer,
    write_standin,
)

USER = [{"role": "user", "content": "hello"}]

needs_qwen3 = needs_tokenizer("qwen3")


@pytest.fixture(scope="session")
def recorded(data_dir) -> dict:
    return json.loads((data_dir / "chat_qwen3.json").read_text())["cases"]


@pytest.fixture
def standin(tmp_path) -> pathlib.Path:
    write_standin(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("qwen3")
    unpack_tokenizer("qwen3", directory)
    return Tokenizer.from_directory(directory)


def edit_config(directory: pathlib.Path, **changes) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_json(path: pathlib.Path, value) -> None:
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("name", CASES)
def test_a_template_renders_as_in_transformers(standin, recorded, name):
    messages, variables = CASES[name]
    text = Tokenizer.from_directory(standin).render_chat(messages, **variables)
    assert text == recorded[name]["standin"]


@needs_qwen3
@pytest.mark.parametrize("name", CASES)
def test_qwen3_chats_are_the_ids_of_transformers(qwen3, recorded, name):
    messages, variables = CASES[name]
    assert qwen3.render_chat(messages, **variables) == recorded[name]["qwen3"]
    assert qwen3.encode_chat(messages, **variables) == recorded[name]["qwen3_ids"]


@needs_qwen3
def test_qwen3_stops_at_its_eos_token_and_reads_padded_ids_as_nothing(qwen3):
    assert qwen3.stop_ids == {151645}
    assert qwen3.vocab_size == 151669
    assert qwen3.decode([9707, 151900]) == "Hello"


def test_text_survives_encoding_and_decoding(standin):
    tokenizer = Tokenizer.from_directory(standin)
    text = "stop here, wörld 😀\n\ttab  <|close|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.removesuffix("<|close|>")


def test_special_tokens_of_a_chat_are_single_ids(standin):
    tokenizer = Tokenizer.from_directory(standin)
    ids = tokenizer.encode_chat(USER, add_generation_prompt=False)
    assert ids[0] == tokenizer.token_id("<|open|>") == SPECIAL_TOKENS.index("<|open|>")
    assert ids[-1] == tokenizer.token_id("<|close|>")
    assert tokenizer.decode(ids) == "user\nhello"


def test_settings_of_the_tokenizers_training_do_not_cut_prompts(standin):
    raw = json.loads((standin / "tokenizer.json").read_text())
    raw["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    write_json(standin / "tokenizer.json", raw)
    tokenizer = Tokenizer.from_directory(standin)
    assert tokenizer.decode(tokenizer.encode("longer than three")) == "longer than three"


def test_the_template_file_wins_over_the_config(standin):
    (standin / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    assert Tokenizer.from_directory(standin).render_chat(USER) == "file: hello"


def test_the_default_of_named_templates_is_used(standin):
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    edit_config(standin, chat_template=named)
    assert Tokenizer.from_directory(standin).render_chat(USER) == "yes"


def test_templates_may_tell_the_date(standin):
    edit_config(standin, chat_template="{{ strftime_now('%d %m') | length }}")
    assert Tokenizer.from_directory(standin).render_chat(USER) == "5"


def test_the_variables_that_a_template_reads_are_known(standin):
    known = Tokenizer.from_directory(standin).template_variables
    assert {"messages", "tools", "reasoning_effort", "thinking"} <= known
    assert not known & {"enable_thinking", "strftime_now", "seen", "type_of"}
    edit_config(standin, chat_template=None)
    assert not Tokenizer.from_directory(standin).template_variables


def test_a_template_cannot_leave_its_sandbox(standin):
    edit_config(standin, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(UserError, match="refuses the messages.*unsafe"):
        Tokenizer.from_directory(standin).render_chat(USER)


def test_a_template_cannot_change_the_messages(standin):
    edit_config(standin, chat_template="{{ messages.append(1) }}")
    with pytest.raises(UserError, match="refuses the messages"):
        Tokenizer.from_directory(standin).render_chat(USER)


def test_what_a_template_raises_reaches_the_user(standin):
    messages = [{"role": "tool", "content": "42"}]
    with pytest.raises(UserError, match="refuses the messages: a tool answers, but no tools"):
        Tokenizer.from_directory(standin).render_chat(messages)


def test_no_template_is_an_error_only_for_chats(standin):
    edit_config(standin, chat_template=None)
    tokenizer = Tokenizer.from_directory(standin)
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("hello")
    with pytest.raises(UserError, match="has no chat template"):
        tokenizer.encode_chat(USER)


@pytest.mark.parametrize("template", [3, [], [{"name": "rag", "template": "x"}], ["default"]])
def test_a_template_in_no_known_form_is_refused(standin, template):
    edit_config(standin, chat_template=template)
    with pytest.raises(UserError, match="tokenizer_config.json: chat_template is neither"):
        Tokenizer.from_directory(standin)


def test_a_template_that_is_no_jinja_is_refused(standin):
    (standin / "chat_template.jinja").write_text("line\n{% if %}")
    with pytest.raises(UserError, match=r"chat_template.jinja: .*not valid jinja \(line 2\)"):
        Tokenizer.from_directory(standin)


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="tokenizer.json does not exist"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json is not a valid tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_a_lone_tokenizer_file_is_enough(standin):
    (standin / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(standin)
    assert tokenizer.encode("hello")
    assert tokenizer.stop_ids == frozenset()


def test_stop_ids_come_from_the_generation_config_first(standin):
    def stop_ids():
        return Tokenizer.from_directory(standin).stop_ids

    assert stop_ids() == {2}  # eos_token of tokenizer_config.json
    write_json(standin / "config.json", {"eos_token_id": 7})
    assert stop_ids() == {7}
    write_json(standin / "generation_config.json", {"eos_token_id": None})
    assert stop_ids() == {7}
    write_json(standin / "generation_config.json", {"eos_token_id": [5, 6]})
    assert stop_ids() == {5, 6}
    write_json(standin / "generation_config.json", {"eos_token_id": 0})
    assert stop_ids() == {0}


@pytest.mark.parametrize("value", ["<|close|>", [1, None], 1.0, True])
def test_stop_ids_that_are_no_ids_are_refused(standin, value):
    write_json(standin / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(UserError, match="generation_config.json: eos_token_id should hold ids"):
        Tokenizer.from_directory(standin)


def test_a_damaged_generation_config_is_named(standin):
    (standin / "generation_config.json").write_text("[1]")
    with pytest.raises(UserError, match="generation_config.json does not hold an object"):
        Tokenizer.from_directory(standin)
