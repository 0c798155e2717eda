"""Answers in OpenAI's harmony format, which GPT-OSS speaks: which part of one is for the user.

An answer is a row of messages, `<|start|>role<|channel|>name<|message|>content<|end|>`, of which
the prompt has written the first `<|start|>assistant`. The model reasons in the channel "analysis",
calls tools in "commentary" and answers in "final". It speaks harmony if its tokenizer has the
tokens `<|channel|>` and `<|message|>`; what any other model writes is final throughout.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from acceptmoe_jax.text.tokenizer import Tokenizer

FINAL = "final"
ANALYSIS = "analysis"

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_MARKS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, "<|end|>", "<|return|>", "<|call|>")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model wrote, by channel; calls of tools are in neither text.

    Attributes:
      final: the answer itself; empty if the generation ended before it began.
      analysis: the reasoning, a line break between its messages; empty outside harmony.
    """

    final: str
    analysis: str


def read_answer(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> Answer:
    """The answer in emitted tokens, which may end anywhere.

    An answer that leaves the format, by not naming any channel, is final as a whole.

    Args:
      tokenizer: of the model.
      prompt_ids: what the model read; it decides what the first tokens are.
      ids: what the model emitted, a stop token included or not.
    """
    reader = ChannelReader(tokenizer, prompt_ids)
    if reader.in_header and not reader.has_format(ids):
        return Answer(tokenizer.decode(ids), "")
    runs = [
        (channel, [token for token, _ in run])
        for channel, run in itertools.groupby(zip(ids, reader.push(ids)), key=lambda pair: pair[1])
    ]
    final = [token for channel, run in runs if channel == FINAL for token in run]
    analysis = [tokenizer.decode(run) for channel, run in runs if channel == ANALYSIS]
    return Answer(tokenizer.decode(final), "\n".join(analysis))


class ChannelReader:
    """Tells of token after token which channel it is content of."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        """Begins behind a prompt: in the header that it left open, or in plain text."""
        marks = {tokenizer.token_id(mark): mark for mark in _MARKS}
        marks.pop(None, None)
        self._marks = marks if {_CHANNEL, _MESSAGE} <= set(marks.values()) else {}
        self._stop_ids = tokenizer.stop_ids
        self._spell = functools.partial(tokenizer.decode, skip_special_tokens=False)
        self._header: list[int] | None = None  # its tokens so far, while inside one
        self._channel: str | None = FINAL  # of the content, while outside
        self.push(prompt_ids)

    @property
    def in_header(self) -> bool:
        return self._header is not None

    def has_format(self, ids: Sequence[int]) -> bool:
        """Whether any of the tokens names a channel or opens a message."""
        return any(self._marks.get(token) in (_CHANNEL, _MESSAGE) for token in ids)

    def push(self, ids: Sequence[int]) -> list[str | None]:
        """Reads on: the channel of each token, None for headers, ends and other roles' content."""
        return [self._read(token) for token in ids]

    def shown(self, ids: Sequence[int]) -> list[int]:
        """Reads on: the tokens, those without a place in the final text as ones that show nothing.

        Stop tokens stay what they are.
        """
        return [
            token if channel == FINAL or token in self._stop_ids else next(iter(self._marks))
            for token, channel in zip(ids, self.push(ids))
        ]

    def _read(self, token: int) -> str | None:
        mark = self._marks.get(token)
        if mark == _START:
            self._header = []
        elif mark in (_CHANNEL, _CONSTRAIN):
            self._header = [*(self._header or []), token]
        elif mark == _MESSAGE:
            self._channel = self._named(self._header or [])
            self._header = None
        elif mark is not None:
            self._header = self._channel = None
        elif self._header is None:
            return self._channel
        else:
            self._header.append(token)
        return None

    def _named(self, header: Sequence[int]) -> str | None:
        """The channel of `assistant to=functions.f<|channel|>commentary <|constrain|>json`."""
        role, _, channel = self._spell(header).replace(_CONSTRAIN, " ").partition(_CHANNEL)
        if channel.split():
            return channel.split()[0]
        return FINAL if role.split()[:1] in ([], ["assistant"]) else None
