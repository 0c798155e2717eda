"""One prompt on its way to an answer, and the answer."""

import dataclasses
from collections.abc import Sequence

from acceptmoe_jax.runtime.statistics import DecodeStatistics
from acceptmoe_jax.text import harmony
from acceptmoe_jax.text.stopping import StopReason, StopRules
from acceptmoe_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one prompt.

    Attributes:
      prompt_ids: what the target read.
      token_ids: what it emitted, the stop token included.
      text: decoded, cut before a stop string, without special tokens; of a model that speaks
        harmony (GPT-OSS) the final channel alone, empty if the answer ended before it.
      reasoning: what such a model wrote in its analysis channel; else empty.
      stop_reason: why it ended.
      statistics: what was counted on the way.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    reasoning: str
    stop_reason: StopReason
    statistics: DecodeStatistics


class Request:
    """A prompt being answered.

    Attributes:
      index: its place among the prompts.
      prompt_ids: what the target reads.
      statistics: of it so far.
      stop_reason: why it ended; None while it has not.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: tuple[int, ...],
        rules: StopRules,
        tokenizer: Tokenizer,
        statistics: DecodeStatistics,
    ):
        self.index = index
        self.prompt_ids = prompt_ids
        self.statistics = statistics
        self.stop_reason: StopReason | None = None
        self._rules = rules
        self._tokenizer = tokenizer
        self._channels = harmony.ChannelReader(tokenizer, prompt_ids)
        self._emitted: list[int] = []
        self._shown: list[int] = []  # what stop strings are looked for in

    @property
    def max_new_tokens(self) -> int:
        return self._rules.max_new_tokens

    def emit(self, run: Sequence[int]) -> tuple[int, ...]:
        """Adds an accepted run, cut where the answer ends in it; returns what was kept."""
        shown = self._channels.shown(run)
        kept, self.stop_reason = self._rules.cut(self._shown, shown, self._tokenizer.decode)
        self._shown.extend(kept)
        run = tuple(run[: len(kept)])
        self._emitted.extend(run)
        return run

    def generation(self) -> Generation:
        """The answer, once it has ended."""
        answer = harmony.read_answer(self._tokenizer, self.prompt_ids, self._emitted)
        return Generation(
            self.prompt_ids,
            tuple(self._emitted),
            self._rules.trim(answer.final),
            answer.analysis,
            self.stop_reason,
            self.statistics,
        )
