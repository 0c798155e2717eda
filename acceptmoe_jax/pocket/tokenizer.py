"""The pocket checkpoints' tokenizers: byte-level BPE with single digits, and what is saved of them.

Digits are never merged, so that arithmetic sees one digit a token; a leading space is folded into
the first digit (" 12" is " 1", "2"). Prompt and completion are parted by special tokens, so the
tokens of one never depend on the other.
"""

import os
import pathlib
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from acceptmoe_jax.files import write_atomically, write_json
from acceptmoe_jax.pocket import chat

# Words, single digits and runs of punctuation, each with at most one leading space; then blanks.
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(
    texts: Iterable[str], chat_format: chat.ChatFormat, vocab_size: int = 1536
) -> tokenizers.Tokenizer:
    """Trains the BPE on `texts`; all 256 bytes are in the vocabulary, so any text round-trips.

    The format's special tokens come first: `chat.format_of` tells the format by them.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(chat_format.special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: tokenizers.Tokenizer, directory: str | os.PathLike, max_length: int = 2048
) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json into `directory`.

    And chat_template.jinja, where the format keeps its template in that file.

    Args:
      tokenizer: as `train_tokenizer` returns it.
      directory: made if it does not exist.
      max_length: `model_max_length` of tokenizer_config.json, in tokens.
    """
    directory = pathlib.Path(directory)
    chat_format = chat.format_of(tokenizer)
    write_atomically(directory / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    end, padding = chat_format.stop_tokens[0], chat.END_OF_TEXT
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": end,
        "pad_token": padding,
        "additional_special_tokens": [
            token for token in chat_format.special_tokens if token not in (end, padding)
        ],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if chat_format.template_in_file:
        write_atomically(directory / "chat_template.jinja", chat_format.template)
    else:
        config["chat_template"] = chat_format.template
    write_json(directory / "tokenizer_config.json", config)
    write_json(
        directory / "generation_config.json",
        {
            "eos_token_id": list(map(tokenizer.token_to_id, chat_format.stop_tokens)),
            "pad_token_id": tokenizer.token_to_id(padding),
            "do_sample": False,
        },
    )
