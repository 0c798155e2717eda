"""Records what the openai-harmony package renders, tokenizes and parses, for tests without it.

    python -m tests.record_harmony --encodings_dir=DIR [--output=tests/data/chat_harmony.json]

Needs openai-harmony, and a folder with GPT-OSS's o200k_base.tiktoken. The file holds the package's
version; text and ids of `harmony_cases.CHATS`, under a system message that says nothing but the
reasoning effort; the texts in the channels of `ANSWERS`; the ids of `TEXTS`; the stop tokens.
"""

import importlib.metadata
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import openai_harmony as harmony
from absl import app, flags

from acceptmoe_jax.files import write_json
from tests.harmony_cases import ANSWERS, CHATS, TEXTS

_ENCODINGS_DIR = flags.DEFINE_string("encodings_dir", None, "Folder of o200k_base.tiktoken.")
_OUTPUT = flags.DEFINE_string("output", "tests/data/chat_harmony.json", "File to write.")


def record(encodings_dir: str | os.PathLike) -> dict[str, Any]:
    """Everything that is recorded, but for the version."""
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(encodings_dir)
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    chats = {}
    for name, (messages, variables) in CHATS.items():
        ids = _render(encoding, messages, **variables)
        chats[name] = {"text": encoding.decode_utf8(ids), "ids": ids}
    return {
        "chats": chats,
        "answers": {name: _channels(encoding, text) for name, text in ANSWERS.items()},
        "texts": [{"text": text, "ids": encoding.encode(text)} for text in TEXTS],
        "stop_ids": sorted(encoding.stop_tokens_for_assistant_actions()),
    }


def _render(
    encoding: harmony.HarmonyEncoding,
    messages: Sequence[Mapping[str, str]],
    reasoning_effort: str = "medium",
    add_generation_prompt: bool = True,
) -> list[int]:
    system = harmony.SystemContent(
        model_identity=None,
        reasoning_effort=harmony.ReasoningEffort(reasoning_effort.capitalize()),
        knowledge_cutoff=None,
        channel_config=None,
    )
    make = harmony.Message.from_role_and_content
    rendered = [make(harmony.Role.SYSTEM, system)]
    for message in messages:
        match message["role"]:
            case "user":
                rendered.append(make(harmony.Role.USER, message["content"]))
            case "developer":
                content = harmony.DeveloperContent.new().with_instructions(message["content"])
                rendered.append(make(harmony.Role.DEVELOPER, content))
            case "assistant":
                texts = {"analysis": message.get("thinking"), "final": message["content"]}
                rendered += [
                    make(harmony.Role.ASSISTANT, text).with_channel(channel)
                    for channel, text in texts.items()
                    if text is not None
                ]
    chat = harmony.Conversation.from_messages(rendered)
    if add_generation_prompt:
        return encoding.render_conversation_for_completion(chat, harmony.Role.ASSISTANT)
    # Left to itself the package drops the reasoning of a chat's first answer, even if it is the
    # last; the template on the hub keeps that of the last.
    config = harmony.RenderConversationConfig(auto_drop_analysis=False)
    return encoding.render_conversation_for_training(chat, config)


def _channels(encoding: harmony.HarmonyEncoding, text: str) -> dict[str | None, list[str]]:
    """Contents of the messages of each channel; a message cut short counts."""
    parser = harmony.StreamableParser(encoding, role=harmony.Role.ASSISTANT)
    for token in encoding.encode(text, allowed_special="all"):
        parser.process(token)
    contents = [(message.channel, message.content[0].text) for message in parser.messages]
    if parser.current_content:
        contents.append((parser.current_channel, parser.current_content))
    return {
        str(channel): [content for of, content in contents if of == channel]
        for channel in dict(contents)
    }


def main(argv: list[str]) -> None:
    del argv
    version = importlib.metadata.version("openai-harmony")
    recorded = record(pathlib.Path(_ENCODINGS_DIR.value))
    write_json(_OUTPUT.value, {"openai_harmony": version} | recorded)


if __name__ == "__main__":
    flags.mark_flag_as_required("encodings_dir")
    app.run(main)
