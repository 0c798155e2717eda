"""The pocket checkpoint's tokenizer, real text and packed training rows."""

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
import tokenizers

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.pocket import (
    chat,
    corpus,
    drills,
    families,
    mathematics,
    real_text,
    tokenizer as pocket_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    texts = corpus.tokenizer_texts(0, chat.PLAIN, count=2_000)
    return pocket_tokenizer.train_tokenizer(texts, chat.PLAIN, 800)


@pytest.fixture(scope="module")
def documents(tokenizer) -> list[corpus.Document]:
    return corpus.training_documents(tokenizer, num_tokens=60_000, seed=5)


# Tokenizer.


def test_training_the_tokenizer_twice_gives_the_same_file(tokenizer):
    texts = corpus.tokenizer_texts(0, chat.PLAIN, count=2_000)
    again = pocket_tokenizer.train_tokenizer(texts, chat.PLAIN, 800)
    assert again.to_str() == tokenizer.to_str()


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("12 + 345", ["1", "2", "Ġ+", "Ġ3", "4", "5"]),
        (" 12", ["Ġ1", "2"]),
        ("x1 = 70,000.", ["x", "1", "Ġ=", "Ġ7", "0", ",", "0", "0", "0", "."]),
    ],
)
def test_digits_stand_alone_and_the_first_takes_the_space(tokenizer, text, tokens):
    assert tokenizer.encode(text).tokens == tokens


def test_each_digit_has_a_token_with_and_without_a_space(tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert all(f"{space}{digit}" in vocabulary for digit in range(10) for space in ("", "Ġ"))


def test_no_token_holds_a_digit_and_anything_but_one_space(tokenizer):
    for token in tokenizer.get_vocab():
        assert (
            not any(map(str.isdigit, token))
            or len(token.removeprefix("Ġ")) == 1
            or not token.isascii()
        ), token


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n",
        "a\n\n\n   b \t\r\n",
        "  leading",
        "trailing  ",
        "naïve café ½ ٣٤",
        "日本語 🙂👩‍👩‍👧",
        "\x00\x7f\u2028",
        r"$\frac{1}{2} \cdot 3$ \boxed{12}",
        "def f(x):\n    return x[::-1]\n",
    ],
)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_random_unicode_round_trips(tokenizer):
    rng = random.Random(0)
    for _ in range(300):
        below_surrogates, above = rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)
        points = (rng.choice((rng.randrange(128), below_surrogates, above)) for _ in range(20))
        text = "".join(map(chr, points))
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


# Real text.


def test_chunks_keep_the_order_and_the_limit():
    lines = [f"line {index} {'x' * (index % 37)}\n" for index in range(200)] + ["y" * 500 + "\n"]
    runs = real_text.chunks(lines, limit=120)
    assert max(map(len, runs)) <= 120
    assert "\n".join(runs) + "\n" == "".join(lines[:-1])


def test_standard_library_text_is_there_and_real():
    texts = list(itertools.islice(real_text.stream(seed=0), 300))
    assert len(set(texts)) > 280
    assert sum("def " in text or "self" in text for text in texts) > 50


def test_gsm8k_is_read_without_calculator_marks(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(
        json.dumps(
            {
                "question": "Ann has 2 cats. Tom has 3. How many?",
                "answer": "They have 2+3=<<2+3=5>>5 cats.\n#### 5",
            }
        )
        + "\n"
    )
    (text,) = real_text.gsm8k_chunks(path)
    assert text == "Ann has 2 cats. Tom has 3. How many?\nThey have 2+3=5 cats.\n#### 5"
    mixed = list(itertools.islice(real_text.stream(0, path), 10))
    assert mixed.count(text) == 5


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "does not exist"),
        ("{}\n", "line 1"),
        ("not json\n", "line 1"),
        ("3\n", "line 1"),
    ],
)
def test_a_bad_gsm8k_file_is_named(tmp_path, content, message):
    path = tmp_path / "wrong.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"wrong.jsonl.*{message}"):
        real_text.gsm8k_chunks(path)


# Loss weights.


def test_prompts_weigh_a_tenth_and_completions_one(tokenizer):
    record = families.generate(mathematics.NAME, "train", 0, 1)[0]
    (document,) = corpus.record_documents(tokenizer, [record])
    split = list(document.tokens).index(tokenizer.token_to_id("<|assistant|>")) + 1
    assert list(document.loss_weights) == (
        [0.0] + [0.1] * (split - 1) + [1.0] * (len(document.tokens) - split)
    )
    answered = tokenizer.decode(document.tokens[split:], skip_special_tokens=False)
    assert answered == f"{record.completion}<|end|>"


def test_drills_weigh_on_the_digits_of_results_alone(tokenizer):
    drill = drills.Drill(
        (" 12 + 5 =", " 17", ",", " 9 * 12 =", " 108", ","),
        (False, True, False, False, True, False),
    )
    (document,) = corpus.drill_documents(tokenizer, [drill])
    weighed = [
        tokenizer.id_to_token(token)
        for token, weight in zip(document.tokens, document.loss_weights)
        if weight
    ]
    assert weighed == ["Ġ1", "7", "Ġ1", "0", "8"]
    assert list(document.tokens) == tokenizer.encode(drill.text).ids


def test_every_drill_reads_as_its_text_does(tokenizer):
    drawn = list(itertools.islice(drills.stream(seed=2), 500))
    for drill, document in zip(drawn, corpus.drill_documents(tokenizer, drawn)):
        assert list(document.tokens) == tokenizer.encode(drill.text).ids


def test_text_weighs_one_and_ends_where_it_is_whole(tokenizer):
    short, long = corpus.text_documents(tokenizer, ["def f(): pass", "words " * 300], 37)
    end = tokenizer.token_to_id("<|endoftext|>")
    assert short.tokens[-1] == end
    assert len(long.tokens) == 37 and long.tokens[-1] != end
    for document in (short, long):
        assert list(document.loss_weights) == [0.0] + [1.0] * (len(document.tokens) - 1)


# Packing.


def _unpacked(rows: corpus.PackedRows) -> list[tuple]:
    """The documents of packed rows as (tokens, loss weights), checking segments and positions."""
    found = []
    for tokens, segments, positions, weights in zip(
        rows.tokens, rows.segments, rows.positions, rows.loss_weights
    ):
        count = segments.max()
        padding = segments == 0
        assert np.array_equal(segments[~padding], np.sort(segments[~padding]))
        assert not padding[: np.sum(~padding)].any()
        for packed in (tokens, positions, weights):
            assert not packed[padding].any()
        for segment in range(1, count + 1):
            inside = segments == segment
            assert np.array_equal(positions[inside], np.arange(inside.sum()))
            found.append((tuple(tokens[inside].tolist()), tuple(weights[inside].tolist())))
    return found


def test_packing_keeps_every_document_whole_and_in_order(documents):
    rows = corpus.pack(documents)
    expected = [
        (tuple(document.tokens), tuple(np.float32(document.loss_weights).tolist()))
        for document in documents
    ]
    assert sorted(_unpacked(rows)) == sorted(expected)


def test_packing_leaves_little_padding(documents):
    assert np.mean(corpus.pack(documents).segments > 0) > 0.97


def test_documents_that_fill_rows_exactly_leave_no_padding():
    documents = [corpus.Document([7] * length, [1.0] * length) for length in (3, 8, 5, 2, 6)]
    rows = corpus.pack(documents, row_length=8)
    assert rows.tokens.shape == (3, 8)
    assert (rows.segments > 0).all()


@pytest.mark.parametrize("length", (0, 9))
def test_a_document_that_no_row_can_hold_is_refused(length):
    with pytest.raises(ValueError, match=f"document of {length} tokens"):
        corpus.pack([corpus.Document([1] * length, [1.0] * length)], row_length=8)


# The mixture.


def test_training_rows_hold_the_asked_tokens_and_no_more(tokenizer):
    rows = corpus.training_rows(tokenizer, num_tokens=30_000, seed=1)
    assert 30_000 <= np.sum(rows.segments > 0) < 30_000 + corpus.ROW_LENGTH
    dtypes = [getattr(rows, field.name).dtype for field in dataclasses.fields(rows)]
    assert dtypes == [np.int32, np.int32, np.int32, np.float32]


def test_training_rows_follow_the_seed(tokenizer):
    one, same, other = (corpus.training_rows(tokenizer, 10_000, seed) for seed in (1, 1, 2))
    for field in dataclasses.fields(corpus.PackedRows):
        assert np.array_equal(getattr(one, field.name), getattr(same, field.name))
    assert sorted(_unpacked(one)) != sorted(_unpacked(other))


def test_the_mixture_decides_what_is_drawn(tokenizer):
    only_drills = dataclasses.replace(
        corpus.DEFAULT_MIXTURE,
        word_problems=0,
        mathematics=0,
        function_from_docstring=0,
        function_from_text=0,
        real_text=0,
    )
    documents = corpus.training_documents(tokenizer, 2_000, seed=0, mixture=only_drills)
    drawn = list(itertools.islice(drills.stream(0), len(documents)))
    assert [list(document.tokens) for document in documents] == [
        tokenizer.encode(drill.text).ids for drill in drawn
    ]


def test_no_test_prompt_is_in_the_training_documents(tokenizer, documents):
    trained = {tuple(document.tokens) for document in documents}
    assistant = tokenizer.token_to_id("<|assistant|>")
    trained = {tokens[: tokens.index(assistant)] for tokens in trained if assistant in tokens}
    assert len(trained) > 500
    for family in families.FAMILIES:
        tested = families.generate(family, "test", 0, 500)
        for document in corpus.record_documents(tokenizer, tested):
            tokens = tuple(document.tokens)
            assert tokens[: tokens.index(assistant)] not in trained
