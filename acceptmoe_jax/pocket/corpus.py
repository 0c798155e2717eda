"""Training rows: records, drills and real text as token documents, packed with segment masks."""

import dataclasses
import itertools
import os
import random
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers
from jaxtyping import Float32, Int32

from acceptmoe_jax.pocket import chat, drills, families, real_text
from acceptmoe_jax.pocket.records import Record

PROMPT_WEIGHT = 0.1
ROW_LENGTH = 128
_BATCH = 2_048  # documents encoded at a time


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Shares of documents by source; they need not sum to one."""

    word_problems: float = 0.20
    mathematics: float = 0.22
    function_from_docstring: float = 0.15
    function_from_text: float = 0.15
    drills: float = 0.25  # short documents: about 10 % of the tokens
    real_text: float = 0.03  # long documents: about 6 % of the tokens


DEFAULT_MIXTURE = Mixture()


@dataclasses.dataclass(frozen=True)
class Document:
    """Token ids, and for each token the loss weight of predicting it (0 for the first)."""

    tokens: Sequence[int]
    loss_weights: Sequence[float]


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Documents packed into rows of T positions.

    Attributes:
      tokens: ids; padding is 0.
      segments: 1, 2, ... for the documents of a row, 0 for padding.
      positions: position within the document, from 0.
      loss_weights: weight of predicting `tokens[r, t]`, from the tokens before it in its document;
        0 for a document's first token and for padding.
    """

    tokens: Int32[np.ndarray, "R T"]
    segments: Int32[np.ndarray, "R T"]
    positions: Int32[np.ndarray, "R T"]
    loss_weights: Float32[np.ndarray, "R T"]


def record_documents(tokenizer: tokenizers.Tokenizer, records: Sequence[Record]) -> list[Document]:
    """Chat documents of the tokenizer's format; weight 0.1 on prompts, 1 on completions.

    What the template writes before the model's turn counts to the prompt, what it writes in that
    turn (the stop token, for one) to the completion.
    """
    chat_format = chat.format_of(tokenizer)
    rendered = [chat_format.render(record) for record in records]
    prompts = _encode(tokenizer, [prompt for prompt, _ in rendered])
    completions = _encode(tokenizer, [completion for _, completion in rendered])
    return [
        Document(
            [*prompt, *completion],
            [0.0] + [PROMPT_WEIGHT] * (len(prompt) - 1) + [1.0] * len(completion),
        )
        for prompt, completion in zip(prompts, completions)
    ]


def drill_documents(
    tokenizer: tokenizers.Tokenizer, drawn: Sequence[drills.Drill]
) -> list[Document]:
    """Drills with weight 1 on the digits of results and 0 elsewhere."""
    pieces = _encode(tokenizer, [piece for drill in drawn for piece in drill.pieces])
    remaining = iter(pieces)
    documents = []
    for drill in drawn:
        tokens, weights = [], []
        for graded, ids in zip(drill.graded, remaining):
            tokens += ids
            weights += [float(graded)] * len(ids)
        documents.append(Document(tokens, weights))
    return documents


def text_documents(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str], row_length: int = ROW_LENGTH
) -> list[Document]:
    """Plain text with weight 1, cut to `row_length`; `<|endoftext|>` ends each uncut one."""
    end = tokenizer.token_to_id(chat.END_OF_TEXT)
    documents = []
    for ids in _encode(tokenizer, texts):
        tokens = [*ids, end][:row_length]
        documents.append(Document(tokens, [0.0] + [1.0] * (len(tokens) - 1)))
    return documents


def _encode(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


def pack(documents: Sequence[Document], row_length: int = ROW_LENGTH) -> PackedRows:
    """Packs documents by best fit, longest first: each goes to the fullest row that has room.

    Raises:
      ValueError: if a document is empty or longer than `row_length`.
    """
    rows: list[list[Document]] = []
    rows_with_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    occupied = 0  # bit r is set while rows_with_room[r] is not empty
    for document in sorted(documents, key=lambda document: -len(document.tokens)):
        length = len(document.tokens)
        if not 0 < length <= row_length:
            raise ValueError(f"a document of {length} tokens does not fit a row of {row_length}")
        enough = occupied >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                occupied &= ~(1 << room)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(document)
        rows_with_room[room - length].append(row)
        occupied |= 1 << (room - length)

    packed = PackedRows(
        *(
            np.zeros((len(rows), row_length), dtype)
            for dtype in (np.int32, np.int32, np.int32, np.float32)
        )
    )
    for index, row in enumerate(rows):
        start = 0
        for segment, document in enumerate(row, start=1):
            span = index, slice(start, start + len(document.tokens))
            packed.tokens[span] = document.tokens
            packed.segments[span] = segment
            packed.positions[span] = np.arange(len(document.tokens))
            packed.loss_weights[span] = document.loss_weights
            start += len(document.tokens)
    return packed


def training_documents(
    tokenizer: tokenizers.Tokenizer,
    num_tokens: int,
    seed: int,
    gsm8k_train: str | os.PathLike | None = None,
    mixture: Mixture = DEFAULT_MIXTURE,
) -> list[Document]:
    """Draws documents of the mixture until they hold at least `num_tokens` tokens."""
    rng = random.Random(f"corpus/{seed}")
    shares = dataclasses.asdict(mixture)
    streams = {family: families.stream(family, "train", seed) for family in families.FAMILIES}
    streams["drills"] = drills.stream(seed)
    streams["real_text"] = real_text.stream(seed, gsm8k_train)
    make = dict.fromkeys(families.FAMILIES, record_documents)
    make |= {"drills": drill_documents, "real_text": text_documents}

    documents, held = [], 0
    while True:
        sources = rng.choices(list(shares), list(shares.values()), k=_BATCH)
        drawn = {
            source: iter(
                make[source](
                    tokenizer, list(itertools.islice(streams[source], sources.count(source)))
                )
            )
            for source in shares
        }
        for source in sources:
            documents.append(next(drawn[source]))
            held += len(documents[-1].tokens)
            if held >= num_tokens:
                return documents


def training_rows(
    tokenizer: tokenizers.Tokenizer,
    num_tokens: int,
    seed: int,
    gsm8k_train: str | os.PathLike | None = None,
    mixture: Mixture = DEFAULT_MIXTURE,
) -> PackedRows:
    """Packed, shuffled rows with at least `num_tokens` tokens (padding not counted).

    Reproducible from the arguments, given one version of Python, whose standard library is part
    of the real text.

    Args:
      tokenizer: as `tokenizer.train_tokenizer` returns it.
      num_tokens: how many tokens of documents to draw.
      seed: of all random choices.
      gsm8k_train: path of GSM8K's train.jsonl; without it, real text is Python source alone.
      mixture: shares of documents.
    """
    documents = training_documents(tokenizer, num_tokens, seed, gsm8k_train, mixture)
    packed = pack(documents)
    order = np.random.default_rng(seed).permutation(len(packed.tokens))
    return PackedRows(
        *(getattr(packed, field.name)[order] for field in dataclasses.fields(PackedRows))
    )


def tokenizer_texts(
    seed: int,
    chat_format: chat.ChatFormat,
    count: int = 20_000,
    gsm8k_train: str | os.PathLike | None = None,
) -> Iterator[str]:
    """Texts to train the tokenizer on: all families and real text, training splits only.

    Records come as the format writes them, but for the special tokens, so that its recurring
    words become tokens.
    """
    for family in families.FAMILIES:
        for record in itertools.islice(families.stream(family, "train", seed), count // 4):
            yield from chat_format.plain_pieces(record)
    yield from itertools.islice(real_text.stream(seed, gsm8k_train), count // 20)
