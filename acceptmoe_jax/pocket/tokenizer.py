"""The pocket checkpoint's tokenizer: byte-level BPE with single digits, and its chat template.

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

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END)  # ids 0 to 3; padding is 0

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Words, single digits and runs of punctuation, each with at most one leading space; then blanks.
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1536) -> tokenizers.Tokenizer:
    """Trains the BPE on `texts`; all 256 bytes are in the vocabulary, so any text round-trips."""
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
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: tokenizers.Tokenizer, directory: str | os.PathLike, max_length: int = 2048
) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json into `directory`.

    Args:
      tokenizer: as `train_tokenizer` returns it.
      directory: made if it does not exist.
      max_length: `model_max_length` of tokenizer_config.json, in tokens.
    """
    directory = pathlib.Path(directory)
    write_atomically(directory / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [USER, ASSISTANT],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(
        directory / "generation_config.json",
        {
            "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)],
            "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
            "do_sample": False,
        },
    )
