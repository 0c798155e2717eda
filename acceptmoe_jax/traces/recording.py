"""Records an engine's verifications as a trace, request by request."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.experts import bank_weights
from acceptmoe_jax.offload.host_store import ExpertLayout
from acceptmoe_jax.runtime.engine import Engine, Prompt
from acceptmoe_jax.runtime.verification import Verification
from acceptmoe_jax.selection import SelectorConfig
from acceptmoe_jax.traces.format import TraceSettings
from acceptmoe_jax.traces.reader import Trace
from acceptmoe_jax.traces.writer import TraceWriter


def record(
    engine: Engine,
    directory: str | os.PathLike,
    prompts: Mapping[str, Prompt],
    *,
    selector: str | SelectorConfig = "native",
    max_new_tokens: int = 256,
    chat: bool | None = None,
    chat_variables: Mapping[str, Any] | None = None,
    on_request: Callable[[int], None] | None = None,
) -> Trace:
    """Decodes those prompts that the trace of a folder does not hold yet, and adds them.

    What was recorded before an interruption is kept, and the trace ends up as one without it.

    Args:
      engine: with a draft head.
      directory: of the trace; made if needed.
      prompts: by id.
      selector: the policy, or its name.
      max_new_tokens, chat, chat_variables: see `Engine.generate`.
      on_request: called with how many of `prompts` the trace holds, first and after each.

    Raises:
      UserError: if the folder holds a trace of other settings or prompts, or a damaged one; and
        as `Engine.generate`, before any decoding.
    """
    settings = trace_settings(engine, selector, max_new_tokens)
    writer = TraceWriter(directory, settings)
    encoded = {name: engine.encode(p, chat, chat_variables) for name, p in prompts.items()}
    missing = {name: ids for name, ids in encoded.items() if not writer.holds(name, ids)}
    held = len(prompts) - len(missing)
    if missing and len(writer) and settings.keeps_residency:
        raise UserError(
            f"{directory}: with keep_residency a request depends on those before it, so the trace "
            "cannot be continued; record it anew"
        )
    recorder = _Recorder(writer, missing, held, on_request or (lambda held: None))
    engine.generate(
        list(missing.values()),
        selector=settings.selector,
        max_new_tokens=max_new_tokens,
        on_tokens=recorder.on_tokens,
        observe=recorder.observe,
        record=True,
    )
    if missing:
        recorder.finish()
    return Trace.open(directory)


class _Recorder:
    """Gathers a request's verifications, and adds them when the next one begins.

    A request may have none: its answer then ends at the token that prefill yields.
    """

    def __init__(self, writer: TraceWriter, requests: Mapping[str, tuple[int, ...]], held, tell):
        self._writer = writer
        self._requests = list(requests.items())
        self._held, self._tell = held, tell
        self._finished = 0
        self._current: list[Verification] = []
        tell(held)

    def on_tokens(self, index: int, tokens: tuple[int, ...]) -> None:
        del tokens
        if index > self._finished:
            self.finish()

    def observe(self, index: int, verification: Verification) -> None:
        del index
        self._current.append(verification)

    def finish(self) -> None:
        prompt_id, token_ids = self._requests[self._finished]
        self._writer.add(prompt_id, token_ids, self._current)
        self._current = []
        self._finished += 1
        self._tell(self._held + self._finished)


def trace_settings(
    engine: Engine, selector: str | SelectorConfig, max_new_tokens: int
) -> TraceSettings:
    """What a trace of this engine is recorded with.

    Raises:
      UserError: as `Engine.selector`.
    """
    selector = engine.selector(selector)
    model, table, offload = engine.model, engine.commitment, engine.offload
    target_hash, head_hash = model.hashes
    return TraceSettings(
        target_hash=target_hash,
        head_hash=head_hash,
        target=model.target.directory.name,
        family=model.target.config["model_type"],
        dtype=engine.dtype.name,
        platform=jax.default_backend(),
        selector=selector,
        tree=model.setup.tree,
        phat=(1.0,) if table is None else table.phat,
        path=None if table is None else table.path,
        offload=None
        if offload is None
        else {
            "slots": offload.slots,
            "eviction": offload.eviction,
            "keep_residency": offload.keep_residency,
        },
        expert_bytes=_expert_bytes(engine),
        max_new_tokens=max_new_tokens,
        num_layers=len(model.setup.target.moe_layers),
        num_experts=model.setup.target.num_experts,
    )


def _expert_bytes(engine: Engine) -> int:
    if engine.model.store is not None:
        return engine.model.store.layout.nbytes
    bank = next(bank for bank in engine.model.weights.banks if bank is not None)
    return ExpertLayout.of(bank_weights(bank)).nbytes
