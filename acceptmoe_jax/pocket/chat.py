"""How the chats of a pocket model are written: special tokens, chat template and stop tokens.

A format is its template: training documents are what the template renders, so that a user's chat
and a training document cannot differ.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

import jinja2
import tokenizers

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.pocket.records import Record, hash_share
from acceptmoe_jax.text.tokenizer import template_environment

END_OF_TEXT = "<|endoftext|>"  # ends a plain text, and pads


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """One way to write chats.

    Attributes:
      special_tokens: in the order of their ids, from 0; the first is `END_OF_TEXT`.
      template: jinja source, as `Tokenizer.render_chat` reads it.
      template_in_file: keep it in chat_template.jinja rather than in tokenizer_config.json.
      stop_tokens: what ends a generation, for generation_config.json; the first ends an answer.
      variables: the values a training document may give each variable of the template.
    """

    special_tokens: tuple[str, ...]
    template: str
    template_in_file: bool
    stop_tokens: tuple[str, ...]
    variables: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def render(self, record: Record) -> tuple[str, str]:
        """The record as a chat, cut where the model begins to write: prompt and completion.

        Each variable of the template gets a value that follows from the prompt alone.
        """
        drawn = {
            name: values[int(len(values) * hash_share(f"{name}/{record.prompt}"))]
            for name, values in self.variables.items()
        }
        messages = [
            {"role": "user", "content": record.prompt},
            {"role": "assistant", "content": record.completion},
        ]
        template = _compiled(self.template)
        prompt = template.render(messages=messages[:1], add_generation_prompt=True, **drawn)
        whole = template.render(messages=messages, add_generation_prompt=False, **drawn)
        return prompt, whole.removeprefix(prompt)

    def plain_pieces(self, record: Record) -> list[str]:
        """What stands between the special tokens of the rendered record."""
        special = "|".join(map(re.escape, self.special_tokens))
        return [piece for piece in re.split(special, "".join(self.render(record))) if piece]


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    return template_environment().from_string(template)


# Prompt and completion each behind a token of their own, and nothing else.
PLAIN = ChatFormat(
    special_tokens=(END_OF_TEXT, "<|user|>", "<|assistant|>", "<|end|>"),
    template=(
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
        "{% else %}<|user|>{{ message['content'] }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    template_in_file=False,
    stop_tokens=("<|end|>", END_OF_TEXT),
)

# The messages of OpenAI's harmony format, which GPT-OSS speaks, without tools, dates or identity.
# Reasoning is kept for the answer it belongs to, and dropped once the chat goes on. A pocket model
# reads a reasoning effort and answers alike under each: it was trained without reasoning.
HARMONY = ChatFormat(
    special_tokens=(
        END_OF_TEXT,
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|call|>",
        "<|constrain|>",
    ),
    template="""\
{%- set effort = reasoning_effort | default("medium", true) %}
{%- if effort not in ("low", "medium", "high") %}
    {{- raise_exception("reasoning_effort is low, medium or high, not " ~ effort) }}
{%- endif %}
{{- "<|start|>system<|message|>Reasoning: " ~ effort ~ "<|end|>" }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "<|start|>user<|message|>" ~ message.content ~ "<|end|>" }}
    {%- elif message.role in ("developer", "system") %}
        {{- "<|start|>developer<|message|># Instructions\\n\\n" ~ message.content ~ "<|end|>" }}
    {%- elif message.role == "assistant" %}
        {%- set last = loop.last and not add_generation_prompt %}
        {%- if message.thinking and last %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" ~ message.thinking ~ "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" ~ message.content }}
        {{- "<|return|>" if last else "<|end|>" }}
    {%- else %}
        {{- raise_exception("a message is the user's, assistant's, developer's or system's") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start|>assistant" }}
{%- endif %}
""",
    template_in_file=True,
    stop_tokens=("<|return|>", END_OF_TEXT, "<|call|>"),
    variables={"reasoning_effort": ("low", "medium", "high")},
)


def format_of(tokenizer: tokenizers.Tokenizer) -> ChatFormat:
    """The format that a pocket model's tokenizer was trained for, told by its special tokens.

    Raises:
      UserError: if it is no pocket model's.
    """
    for chat_format in (PLAIN, HARMONY):
        tokens = chat_format.special_tokens
        if [tokenizer.id_to_token(index) for index in range(len(tokens))] == list(tokens):
            return chat_format
    raise UserError("the tokenizer is no pocket model's: it has the special tokens of no format")
