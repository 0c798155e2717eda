"""A model's tokenizer, chat template and stop tokens, read from its directory.

The same files and the same rules as transformers' fast tokenizers and `apply_chat_template`,
without transformers: `tokenizer.json` runs in the tokenizers package, the template in a sandboxed
jinja2, because a template from the hub is a stranger's program.
"""

import dataclasses
import datetime
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import tokenizers

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import read_json

# Names under which templates may find special tokens.
_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text <-> ids, chats -> ids.

    Attributes:
      directory: where it came from, for messages.
      stop_ids: ids that end a generation; may be empty.
      special_tokens: `eos_token` and the like, as templates see them.
      template_variables: what the chat template reads; empty without one.
    """

    directory: pathlib.Path
    stop_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    template_variables: frozenset[str]
    _tokenizer: tokenizers.Tokenizer
    _template: jinja2.Template | None

    @classmethod
    def from_directory(cls, directory: str | os.PathLike) -> "Tokenizer":
        """Reads `tokenizer.json`, and what there is of the template, config and generation files.

        Raises:
          UserError: naming the file, if `tokenizer.json` is missing or a file is damaged.
        """
        directory = pathlib.Path(directory)
        tokenizer = _read_tokenizer(directory / "tokenizer.json")
        config = _read_optional(directory / "tokenizer_config.json")
        special_tokens = {
            name: text
            for name in _SPECIAL_TOKENS
            if (text := _token_text(config.get(name))) is not None
        }
        stop_ids = _read_stop_ids(directory)
        if stop_ids is None and "eos_token" in special_tokens:
            eos_id = tokenizer.token_to_id(special_tokens["eos_token"])
            stop_ids = None if eos_id is None else frozenset({eos_id})
        template, variables = _read_template(directory, config)
        return cls(
            directory,
            stop_ids or frozenset(),
            special_tokens,
            variables,
            tokenizer,
            template,
        )

    @property
    def vocab_size(self) -> int:
        """Ids that stand for a token; a model's vocabulary is often padded beyond it."""
        return self._tokenizer.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, with what the tokenizer itself adds around one (often nothing)."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; a character cut in two shows as U+FFFD, an id of no token as nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token written out, such as "<|im_end|>"."""
        return self._tokenizer.token_to_id(token)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The chat as text, by the model's template.

        Args:
          messages: `{"role": ..., "content": ...}` each.
          add_generation_prompt: end with the opening of the assistant's answer.
          **variables: for the template, such as `tools`, `enable_thinking` or `reasoning_effort`;
            it ignores those that are not among its `template_variables`.

        Raises:
          UserError: if there is no template, or if it refuses these messages.
        """
        if self._template is None:
            raise UserError(f"{self.directory} has no chat template; give plain prompts instead")
        # Templates print a null content as "None", but know how to do without one.
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        variables = {"tools": None, "documents": None, **self.special_tokens, **variables}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(
                f"the chat template of {self.directory} refuses the messages: {error}"
            ) from None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of `render_chat`; nothing is added, the template has written all special tokens."""
        text = self.render_chat(messages, add_generation_prompt, **variables)
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> jinja2.Environment:
    """The environment that templates on the hub are written for (transformers')."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which the models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise UserError(f"{path} does not exist; the model needs its tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"{path} is not a valid tokenizer: {error}") from None
    # Some files carry the settings of their training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_template(
    directory: pathlib.Path, config: Mapping[str, Any]
) -> tuple[jinja2.Template | None, frozenset[str]]:
    """The chat template, if there is one, and the variables that it reads."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    else:
        path = directory / "tokenizer_config.json"
        source = config.get("chat_template")
    match source:
        case None:
            return None, frozenset()
        case str(text):
            pass
        case [*named] if "default" in (texts := _named_templates(named)):
            text = texts["default"]
        case _:
            raise UserError(f"{path}: chat_template is neither a text nor a list with a default")
    environment = template_environment()
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
        return environment.from_string(text), frozenset(variables)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"{path}: the chat template is not valid jinja (line {error.lineno}): {error.message}"
        ) from None


def _named_templates(entries: Sequence[Any]) -> dict[str, str]:
    """The list form, `[{"name": "default", "template": ...}, ...]`, as a dict."""
    named = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(text)}:
                named[name] = text
    return named


def _read_stop_ids(directory: pathlib.Path) -> frozenset[int] | None:
    """`eos_token_id` (one id or a list) of the first file that has one."""
    for name in ("generation_config.json", "config.json"):
        value = _read_optional(directory / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in ids):
            raise UserError(f"{directory / name}: eos_token_id should hold ids, not {value!r}")
        return frozenset(ids)
    return None


def _read_optional(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold an object")
    return value


def _token_text(token: Any) -> str | None:
    """A special token of tokenizer_config.json, written as a string or as `{"content": ...}`."""
    return token.get("content") if isinstance(token, dict) else token
