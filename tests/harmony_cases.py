"""Chats, answers and texts in the harmony format, for its recorder and the tests that compare.

`tests/data/chat_harmony.json` holds what the openai-harmony package makes of them.
"""

import json
import pathlib
from typing import Any

from tests.chat_cases import needs_tokenizer, unpack_tokenizer

_USER = {"role": "user", "content": "What is 7 * 8?\n"}
_FURTHER = {"role": "user", "content": "And 7 * 9, naïve wörld 😀?"}
_DEVELOPER = {"role": "developer", "content": "Be brief."}
_ANSWER = {"role": "assistant", "content": "56"}
_REASONED = {**_ANSWER, "thinking": "A product: 7 * 8 = 56."}

# name -> (messages, variables), as `chat_cases.CASES`.
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([_USER], {}),
    "low_effort": ([_USER], {"reasoning_effort": "low"}),
    "developer": ([_DEVELOPER, _USER], {"reasoning_effort": "high"}),
    "answered": ([_USER, _ANSWER], {"add_generation_prompt": False}),
    "reasoned": ([_DEVELOPER, _USER, _REASONED], {"add_generation_prompt": False}),
    "further": ([_USER, _ANSWER, _FURTHER], {}),
    "reasoning_of_an_earlier_turn": ([_USER, _REASONED, _FURTHER], {}),
    "answered_twice": (
        [_USER, _ANSWER, _FURTHER, _ANSWER],
        {"add_generation_prompt": False},
    ),
}

_ANALYSIS = "<|channel|>analysis<|message|>7 * 8 = 56."
_NEXT = "<|end|><|start|>assistant"
_FINAL = "<|channel|>final<|message|>It is 56."

# What a model may write behind a prompt's `<|start|>assistant`.
ANSWERS: dict[str, str] = {
    "final": f"{_FINAL}<|return|>",
    "analysis_and_final": f"{_ANALYSIS}{_NEXT}{_FINAL}<|return|>",
    "two_analyses": f"{_ANALYSIS}{_NEXT}{_ANALYSIS}{_NEXT}{_FINAL}<|return|>",
    "two_finals": f"{_FINAL}{_NEXT}{_FINAL}<|return|>",
    "preamble": f"<|channel|>commentary<|message|>I compute.{_NEXT}{_FINAL}<|return|>",
    "constrained": '<|channel|>final <|constrain|>json<|message|>{"a": 56}<|return|>',
    "constrained_at_once": '<|channel|>final<|constrain|>json<|message|>{"a": 56}<|return|>',
    "call": f"{_ANALYSIS}{_NEXT} to=functions.times<|channel|>commentary <|constrain|>json"
    '<|message|>{"a": 7}<|call|>',
    "call_named_in_the_channel": "<|channel|>commentary to=functions.times <|constrain|>json"
    '<|message|>{"a": 7}<|call|>',
    "cut_in_the_analysis": _ANALYSIS,
    "cut_behind_the_analysis": f"{_ANALYSIS}<|end|>",
    "cut_in_the_header": f"{_ANALYSIS}{_NEXT}<|channel|>final",
    "cut_in_the_answer": f"{_ANALYSIS}{_NEXT}{_FINAL}",
    "no_channel": "<|message|>It is 56.<|return|>",
}

# For token ids: blanks, digits, case, scripts, joined characters, contractions.
TEXTS: tuple[str, ...] = (
    "The total is $29.00, isn't it? WE'LL see 70,000 or 1234567890.",
    "def f(x):\n    return x[::-1]\n\n\n\t# done  \n",
    "naïve café ½ ٣٤ 日本語 🙂👩‍👩‍👧\u2028\x00",
    "   leading and trailing   ",
    r"$\frac{1}{2} \cdot 3$ \boxed{12} HTTPServerError camelCaseWord",
)

needs_gpt_oss = needs_tokenizer("gpt_oss")
# As generation_config.json of the models on the hub has them: return, endoftext, call.
STOP_IDS = [200002, 199999, 200012]


def unpack_gpt_oss(directory: pathlib.Path) -> pathlib.Path:
    """The tokenizer of GPT-OSS, as `unpack_tokenizer` gives it, with its stop ids."""
    unpack_tokenizer("gpt_oss", directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP_IDS}))
    return directory
