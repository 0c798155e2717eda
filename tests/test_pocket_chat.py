"""The chat formats of pocket models: templates, training documents and what is saved of them."""

import collections
import json

import pytest
import tokenizers

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.pocket import chat, corpus, families, tokenizer as pocket_tokenizer
from acceptmoe_jax.pocket.records import Record
from acceptmoe_jax.text.tokenizer import Tokenizer
from tests import pocket

FORMATS = {"plain": chat.PLAIN, "harmony": chat.HARMONY}
RECORD = Record("function_from_docstring", "def f(x):\n", "    return x", "")
USER = {"role": "user", "content": "What is 7 * 8?"}
ANSWER = {"role": "assistant", "content": "56", "thinking": "A product."}


def trained(chat_format: chat.ChatFormat, vocab_size: int) -> tokenizers.Tokenizer:
    texts = corpus.tokenizer_texts(0, chat_format, count=2_000)
    return pocket_tokenizer.train_tokenizer(texts, chat_format, vocab_size)


@pytest.fixture(scope="module", params=FORMATS)
def chat_format(request) -> chat.ChatFormat:
    return FORMATS[request.param]


@pytest.fixture(scope="module")
def tokenizer(chat_format) -> tokenizers.Tokenizer:
    """Of the format, with the vocabulary of the shipped checkpoints."""
    return trained(chat_format, 1536)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory) -> Tokenizer:
    """As a program reads it from a checkpoint."""
    folder = tmp_path_factory.mktemp("harmony")
    pocket_tokenizer.save_tokenizer(trained(chat.HARMONY, 1536), folder)
    return Tokenizer.from_directory(folder)


# Every format.


def test_the_vocabulary_has_the_asked_size_and_special_tokens_first(tokenizer, chat_format):
    assert tokenizer.get_vocab_size() == 1536
    for index, token in enumerate(chat_format.special_tokens):
        assert tokenizer.token_to_id(token) == index


def test_a_tokenizer_knows_its_format(tokenizer, chat_format):
    assert chat.format_of(tokenizer) is chat_format


def test_a_saved_checkpoint_renders_what_training_read(tokenizer, chat_format, tmp_path):
    pocket_tokenizer.save_tokenizer(tokenizer, tmp_path)
    saved = Tokenizer.from_directory(tmp_path)
    record = families.generate(families.FAMILIES[0], "train", 0, 1)[0]
    (document,) = corpus.record_documents(tokenizer, [record])
    messages = [{"role": "user", "content": record.prompt}]
    answered = [*messages, {"role": "assistant", "content": record.completion}]
    choices = [{}]
    for name, values in chat_format.variables.items():
        choices = [{**choice, name: value} for choice in choices for value in values]
    rendered = [
        (
            saved.encode_chat(messages, **choice),
            saved.encode_chat(answered, add_generation_prompt=False, **choice),
        )
        for choice in choices
    ]
    prompt, whole = next(pair for pair in rendered if pair[1] == list(document.tokens))
    assert whole[: len(prompt)] == prompt
    assert list(document.loss_weights) == (
        [0.0] + [0.1] * (len(prompt) - 1) + [1.0] * (len(whole) - len(prompt))
    )


def test_a_prompt_that_ends_in_a_newline_keeps_its_tokens_before_any_completion(
    tokenizer, chat_format
):
    prompt, completion = chat_format.render(RECORD)
    (document,) = corpus.record_documents(tokenizer, [RECORD])
    assert list(document.tokens) == tokenizer.encode(prompt + completion).ids
    alone = tokenizer.encode(prompt).ids
    assert list(document.tokens[: len(alone)]) == alone


def test_every_answer_ends_in_the_first_stop_token(tokenizer, chat_format):
    (document,) = corpus.record_documents(tokenizer, [RECORD])
    assert tokenizer.id_to_token(document.tokens[-1]) == chat_format.stop_tokens[0]


def test_the_saved_files_name_the_stop_tokens_and_the_padding(tokenizer, chat_format, tmp_path):
    pocket_tokenizer.save_tokenizer(tokenizer, tmp_path / "made", max_length=512)
    config = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == chat_format.stop_tokens[0]
    assert config["pad_token"] == "<|endoftext|>"
    assert config["model_max_length"] == 512
    generation = json.loads((tmp_path / "made" / "generation_config.json").read_text())
    stops = [tokenizer.token_to_id(token) for token in chat_format.stop_tokens]
    assert generation["eos_token_id"] == stops
    assert generation["pad_token_id"] == 0
    assert Tokenizer.from_directory(tmp_path / "made").stop_ids == set(stops)


def test_every_record_fits_a_row(tokenizer):
    for family in families.FAMILIES:
        records = families.generate(family, "train", 3, 500)
        documents = corpus.record_documents(tokenizer, records)
        assert max(len(document.tokens) for document in documents) <= corpus.ROW_LENGTH


def test_a_tokenizer_of_no_format_is_refused():
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    other.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    with pytest.raises(UserError, match="no pocket model's"):
        chat.format_of(other)


# The plain format, in which the first checkpoint was trained.


def test_plain_documents_are_prompt_and_completion_behind_a_token_each():
    shipped = tokenizers.Tokenizer.from_file(str(pocket.TARGET / "tokenizer.json"))
    user, assistant, end = map(shipped.token_to_id, ("<|user|>", "<|assistant|>", "<|end|>"))
    for family in families.FAMILIES:
        records = families.generate(family, "train", 0, 20)
        for record, document in zip(records, corpus.record_documents(shipped, records)):
            prompt, completion = shipped.encode(record.prompt), shipped.encode(record.completion)
            assert document.tokens == [user, *prompt.ids, assistant, *completion.ids, end]


def test_the_plain_format_saves_the_files_of_the_shipped_checkpoint(tmp_path):
    shipped = tokenizers.Tokenizer.from_file(str(pocket.TARGET / "tokenizer.json"))
    pocket_tokenizer.save_tokenizer(shipped, tmp_path, max_length=1024)
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (pocket.TARGET / name).read_bytes()


# The harmony format.


def test_harmony_keeps_its_template_in_a_file_of_its_own(harmony):
    assert (harmony.directory / "chat_template.jinja").read_text() == chat.HARMONY.template
    config = json.loads((harmony.directory / "tokenizer_config.json").read_text())
    assert "chat_template" not in config


def test_harmony_chats_open_with_the_reasoning_effort(harmony):
    assert harmony.render_chat([USER]) == (
        "<|start|>system<|message|>Reasoning: medium<|end|>"
        "<|start|>user<|message|>What is 7 * 8?<|end|><|start|>assistant"
    )
    assert "Reasoning: high<|end|>" in harmony.render_chat([USER], reasoning_effort="high")


@pytest.mark.parametrize("effort", ["none", "Low", 3])
def test_harmony_refuses_an_effort_that_it_was_not_trained_on(harmony, effort):
    with pytest.raises(UserError, match="low, medium or high"):
        harmony.render_chat([USER], reasoning_effort=effort)


def test_harmony_drops_the_reasoning_of_earlier_turns(harmony):
    final = "<|start|>assistant<|channel|>final<|message|>56"
    last = harmony.render_chat([USER, ANSWER], add_generation_prompt=False)
    assert last.endswith(
        f"<|start|>assistant<|channel|>analysis<|message|>A product.<|end|>{final}<|return|>"
    )
    further = harmony.render_chat([USER, ANSWER, USER])
    assert "A product." not in further
    assert f"8?<|end|>{final}<|end|><|start|>user" in further


@pytest.mark.parametrize("role", ["developer", "system"])
def test_harmony_takes_instructions_as_the_developers(harmony, role):
    text = harmony.render_chat([{"role": role, "content": "Be brief."}, USER])
    instructed = "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
    assert f"medium<|end|>{instructed}<|start|>user" in text


def test_harmony_refuses_roles_that_it_does_not_know(harmony):
    with pytest.raises(UserError, match="refuses the messages: a message is"):
        harmony.render_chat([USER, {"role": "tool", "content": "56"}])


def test_the_words_of_harmony_are_single_tokens(harmony):
    efforts = [f" {effort}" for effort in ("low", "medium", "high")]
    for word in ("system", "user", "assistant", "final", "Reasoning", *efforts):
        assert len(harmony.encode(word)) == 1, word


def test_training_reads_every_effort_equally_often():
    records = families.generate(families.FAMILIES[0], "train", 0, 600)
    counts = collections.Counter(
        chat.HARMONY.render(record)[0].split("Reasoning: ")[1].split("<|end|>")[0]
        for record in records
    )
    assert sorted(counts) == ["high", "low", "medium"]
    assert min(counts.values()) > 150


def test_the_effort_follows_from_the_prompt_alone():
    other = Record("mathematics", RECORD.prompt, "another answer", "")
    assert chat.HARMONY.render(other)[0] == chat.HARMONY.render(RECORD)[0]
