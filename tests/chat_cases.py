"""Chats to render, and a small tokenizer with a template that uses what templates use.

The program that records transformers' renderings and the tests that compare with them share these.
"""

import json
import lzma
import os
import pathlib
import shutil
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|pad|>", "<|open|>", "<|close|>"]

# Block trimming, loop controls, JSON without HTML escapes, namespaces, special tokens, optional
# variables, the marks for training; macros that call themselves, read variables of the chat and
# give them defaults, as those of GPT-OSS do.
TEMPLATE = """
{%- macro type_of(spec) -%}
    {%- if spec.type is defined and spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(' | ') }}
    {%- elif spec.properties -%}
        {{- '{' }}
        {%- for name, inner in spec.properties.items() -%}
            {{- name + ('' if name in (spec.required or []) else '?') + ': ' + type_of(inner) }}
            {%- if not loop.last %}, {% endif -%}
        {%- endfor -%}
        {{- '}' }}
    {%- else -%}
        {{- spec.type }}
    {%- endif -%}
{%- endmacro %}
{%- macro opening() -%}
    {%- if reasoning_effort is not defined %}
        {%- set reasoning_effort = 'usual' %}
    {%- endif %}
    {{- 'Effort: ' + reasoning_effort + strftime_now('%%') + '\\n' }}
{%- endmacro %}
{%- if signature or reasoning_effort is defined %}
    {{- opening() + type_of(signature or {'type': 'none'}) }}
{%- endif %}
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
_SIGNATURE = {
    "properties": {
        "x": {"type": ["number", "null"]},
        "y": {"properties": {"z": {"type": "text"}}, "required": ["z"]},
    }
}
_TOOLS = [{"name": "f", "parameters": {"x": "<int> & é"}}]

# name -> (messages, variables); each also holds for a template that ignores what it does not know.
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([_USER], {}),
    "system": ([_SYSTEM, _USER], {}),
    "no_generation_prompt": ([_USER, _ANSWER], {"add_generation_prompt": False}),
    "several_turns": ([_SYSTEM, _USER, _SKIPPED, _ANSWER, _USER], {}),
    "tools": ([_USER], {"tools": _TOOLS}),
    "effort": ([_SYSTEM, _USER], {"reasoning_effort": "high"}),
    "signature": ([_USER], {"signature": _SIGNATURE}),
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


# The tokenizers of published models (7 MB and more) are not part of this project.
_SHARED = pathlib.Path(
    os.environ.get("ACCEPTMOE_SHARED", pathlib.Path(__file__).parents[2] / "shared")
)
_TOKENIZERS = _SHARED / "data" / "tokenizers"


def needs_tokenizer(name: str) -> pytest.MarkDecorator:
    """Skips a test where the tokenizer of that folder is not there."""
    return pytest.mark.skipif(
        not (_TOKENIZERS / name).is_dir(),
        reason=f"set ACCEPTMOE_SHARED to a folder with data/tokenizers/{name}",
    )


def unpack_tokenizer(name: str, directory: pathlib.Path) -> None:
    """Puts the files of a published tokenizer into `directory`, as a download has them."""
    for path in (_TOKENIZERS / name).iterdir():
        if path.suffix == ".xz":
            with lzma.open(path) as packed:
                (directory / path.stem).write_bytes(packed.read())
        else:
            shutil.copy(path, directory)
