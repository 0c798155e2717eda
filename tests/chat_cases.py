"""Chats to render, and a small tokenizer with a template that uses what templates use.

The program that records transformers' renderings and the tests that compare with them share these.
"""

import json
import pathlib
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|pad|>", "<|open|>", "<|close|>"]

# Block trimming, loop controls, JSON without HTML escapes, namespaces, special tokens, optional
# variables and the marks for training.
TEMPLATE = """
{%- set seen = namespace(system=false) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'tool' and not tools %}
        {{- raise_exception('a tool answers, but no tools were given') }}
    {%- endif %}
    {%- if message.role == 'system' %}{% set seen.system = true %}{% endif %}
    {% if loop.first and tools %}
Tools: {{ tools | tojson(indent=2) }} {{ tools | tojson }}
    {% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|open|>assistant\\n' }}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}
{{ '<|open|>' + message['role'] }}{% if message.name is defined %} {{ message.name }}{% endif %}

{{ message.content | trim }}{{ eos_token }}{{ unk_token }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt -%}
<|open|>assistant
{% if thinking is defined and thinking is false %}(no thinking){% endif %}
{%- endif %}
"""

_USER = {"role": "user", "content": ' 2 < 3 & "wörld" 😀\n'}
_SYSTEM = {"role": "system", "content": "Be brief."}
_ANSWER = {"role": "assistant", "content": "Yes."}
_SKIPPED = {"role": "skip", "content": "unseen"}
_TOOLS = [{"name": "f", "parameters": {"x": "<int> & é"}}]

# name -> (messages, variables); each also holds for a template that ignores what it does not know.
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([_USER], {}),
    "system": ([_SYSTEM, _USER], {}),
    "no_generation_prompt": ([_USER, _ANSWER], {"add_generation_prompt": False}),
    "several_turns": ([_SYSTEM, _USER, _SKIPPED, _ANSWER, _USER], {}),
    "tools": ([_USER], {"tools": _TOOLS}),
    "no_thinking": ([_USER], {"thinking": False, "enable_thinking": False}),
    "null_values": ([{**_USER, "name": None}, _ANSWER, {**_USER, "name": "Ada"}], {}),
}


def write_standin(directory: pathlib.Path) -> None:
    """Writes a byte-level BPE tokenizer of 300 tokens, with `TEMPLATE`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a small tokenizer for small tests, stop here"] * 9, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|close|>",
        "pad_token": {"__type": "AddedToken", "content": "<|pad|>", "special": True},
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
