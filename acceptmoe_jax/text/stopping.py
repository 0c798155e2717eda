"""Where a generation ends: stop tokens, stop strings and the limit, inside an accepted run too.

Speculation emits tokens in runs. A run is cut at the first token that ends the generation; that
token is still emitted and counted, and what the run holds behind it never existed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from acceptmoe_jax.errors import UserError

StopReason = Literal["stop_token", "stop_string", "length"]
Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"  # what decoding shows for bytes that are no whole character
# A window that begins inside a character shows at most this many wrong characters for it.
_BROKEN_HEAD = 3


class Cut(NamedTuple):
    """`kept` of a run's tokens were emitted; `reason` says why the generation ends, if it does."""

    kept: tuple[int, ...]
    reason: StopReason | None


@dataclasses.dataclass(frozen=True)
class StopRules:
    """What ends a generation.

    Attributes:
      stop_ids: tokens that end it.
      stop_strings: texts that end it, wherever token borders fall; the text is cut before them.
      max_new_tokens: the limit, at least 1; the first token after prefill counts.
    """

    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    max_new_tokens: int

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens should be at least 1, not {self.max_new_tokens}")
        if not all(self.stop_strings):
            raise UserError("a stop string cannot be empty")

    def cut(self, emitted: Sequence[int], run: Sequence[int], decode: Decode) -> Cut:
        """Cuts a newly accepted run.

        Args:
          emitted: all tokens of the generation before the run, none of which ended it.
          run: the new tokens, in order.
          decode: ids -> text.

        Returns:
          The tokens of the run up to and including the one that ends the generation. Where one
          token does so in several ways, a stop token counts before a stop string, and that before
          the limit.
        """
        room = max(self.max_new_tokens - len(emitted), 0)
        kept, reason = tuple(run), None
        if len(kept) >= room:
            kept, reason = kept[:room], "length"
        string_end = self._stop_string_end(emitted, kept, decode)
        if string_end is not None:
            kept, reason = kept[:string_end], "stop_string"
        token_end = next((i + 1 for i, token in enumerate(kept) if token in self.stop_ids), None)
        if token_end is not None:
            kept, reason = kept[:token_end], "stop_token"
        return Cut(kept, reason)

    def trim(self, text: str) -> str:
        """The text before the first stop string; all of it where there is none."""
        starts = (text.find(stop) for stop in self.stop_strings)
        return text[: min((start for start in starts if start >= 0), default=None)]

    def _stop_string_end(
        self, emitted: Sequence[int], run: Sequence[int], decode: Decode
    ) -> int | None:
        """How many tokens of the run complete the first stop string; None if none is complete.

        Only a tail of `emitted` is decoded: enough for a stop string that began in it.
        """
        if not self.stop_strings or not run:
            return None
        needed = max(map(len, self.stop_strings)) + _BROKEN_HEAD
        width = needed
        while width < len(emitted) and len(decode(emitted[-width:])) < needed:
            width *= 2  # special tokens and parts of characters show little text
        tail = list(emitted[-width:])

        def complete(count: int) -> bool:
            text = decode([*tail, *run[:count]])
            return any(stop in text for stop in self.stop_strings)

        if not complete(len(run)):
            return None
        return next(count for count in range(1, len(run) + 1) if complete(count))


class TextStream:
    """Shows a generation as it grows; what has been shown never changes.

    Held back: the end of a text that may be a part of a character or the beginning of a stop
    string. For decoders that need no context (byte-level ones).
    """

    def __init__(self, decode: Decode, rules: StopRules):
        self._decode = decode
        self._rules = rules
        self._tokens: list[int] = []  # since the last border of characters
        self._shown_of_tokens = 0  # characters of their text that have moved on to `_held`
        self._held = ""  # may begin a stop string
        self._stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is now certain, often empty."""
        self._tokens.extend(tokens)
        text = self._decode(self._tokens)
        certain = text.removesuffix(_REPLACEMENT)  # an incomplete character shows as one of these
        self._held += certain[self._shown_of_tokens :]
        self._shown_of_tokens = len(certain)
        if certain == text:
            self._tokens.clear()
            self._shown_of_tokens = 0
        return self._release(self._possible_stop())

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        self._held += self._decode(self._tokens)[self._shown_of_tokens :]
        self._tokens.clear()
        self._shown_of_tokens = 0
        return self._release(0)

    def _possible_stop(self) -> int:
        """The length of the longest end of `_held` that begins a stop string."""
        return max(
            (
                size
                for stop in self._rules.stop_strings
                for size in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )

    def _release(self, keep: int) -> str:
        if self._stopped:
            return ""
        shown = self._rules.trim(self._held)
        self._stopped = shown != self._held
        if not self._stopped:
            shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown
