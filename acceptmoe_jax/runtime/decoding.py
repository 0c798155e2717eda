"""The loop of decoding: prompts go through lanes, one forward after another, until all have ended.

With one lane, prompts run one after the other. With more, each lane holds a sequence of its own,
with its own tree and expert sets, all lanes share a forward, and the next prompt takes the lane of
one that has ended.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.offload.loads import Loads
from acceptmoe_jax.runtime import evict
from acceptmoe_jax.runtime.evict import EvictConfig
from acceptmoe_jax.runtime.offloaded import OffloadedRunner
from acceptmoe_jax.runtime.quality_gate import AuditConfig, QualityGate
from acceptmoe_jax.runtime.requests import Request
from acceptmoe_jax.runtime.resident import ResidentRunner
from acceptmoe_jax.runtime.state import DecodeState, empty_state
from acceptmoe_jax.runtime.verification import Verification
from acceptmoe_jax.selection import Commitment, SelectorConfig
from acceptmoe_jax.speculation import CostTable, SamplingConfig, choose_length

_CHUNKS = (64, 256, 1024)  # rows of a prefill program; the smallest that holds what is left
_SMALLEST_CACHE = 256  # rows; caches grow by doubling, so few programs are compiled


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How a run decodes.

    Attributes:
      selector: the policy; None decodes autoregressively.
      sampling: how the target's tokens are drawn.
      seed: of the draws; a prompt's depend on its place among the prompts too.
      audit: when to verify natively as well.
      evict: cut the trees before they are verified.
      lanes: prompts that decode at the same time.
      record: give observers router logits and sets.
    """

    selector: SelectorConfig | None
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0
    audit: AuditConfig = AuditConfig()
    evict: EvictConfig | None = None
    lanes: int = 1
    record: bool = False


class DecodingRun:
    """Decodes requests to their ends.

    Args:
      runner: of the programs.
      commitment: for policies that weigh nodes.
      config: how to decode.
      dtype: of the caches.
      costs: what EVICT has measured, by policy, cache rows and settings; added to.
      on_tokens: called with a request's index and its new tokens after every forward.
      observe: called with a request's index and each of its verifications.
    """

    def __init__(
        self,
        runner: ResidentRunner | OffloadedRunner,
        commitment: Commitment,
        config: DecodeConfig,
        dtype: jnp.dtype,
        costs: dict[Any, CostTable],
        on_tokens: Callable[[int, tuple[int, ...]], None],
        observe: Callable[[int, Verification], None],
    ):
        self.runner = runner
        self.config = config
        self.gate = QualityGate(config.audit)
        self._commitment = commitment
        self._dtype = dtype
        self._costs = costs
        self._on_tokens = on_tokens
        self._observe = observe
        self._width = 0  # lanes in use

    def run(self, requests: Sequence[Request]) -> None:
        """Decodes all requests, which hold their answers after it."""
        waiting = collections.deque(requests)
        width = self._width = min(self.config.lanes, len(requests))
        shared_rows = max(map(self._rows, requests), default=0) if width > 1 else None
        lanes: list[Request | None] = [None] * width
        states = None
        while True:
            for lane in range(width):
                while lanes[lane] is None and waiting:
                    request = waiting.popleft()
                    state = self._prefill(request, shared_rows or self._rows(request))
                    self._emit(request, (int(state.last_token),))
                    if request.stop_reason is None:
                        lanes[lane] = request
                        states = self._placed(states, lane, state)
            if not any(lanes):
                return
            if width > 1:
                active = np.array([request is not None for request in lanes])
                states = states.replace(active=jnp.asarray(active))
            states = self._forward(states, lanes)
            lanes = [r if r is not None and r.stop_reason is None else None for r in lanes]

    def _rows(self, request: Request) -> int:
        """Cache rows that a request may need, a power of two."""
        ids = request.prompt_ids
        padded = sum(size for _, size in _split(ids))
        spare = self.runner.setup.spare_rows
        return _cache_rows(max(len(ids) + request.max_new_tokens + spare, padded))

    def _prefill(self, request: Request, rows: int) -> DecodeState:
        self.runner.begin_request()
        ids, statistics = request.prompt_ids, request.statistics
        key = jax.random.fold_in(jax.random.key(self.config.seed), request.index)
        state = empty_state(self.runner.setup, rows, self._dtype, key)
        for at, size in _split(ids):
            part = ids[at : at + size]
            tokens = np.zeros(size, np.int32)
            tokens[: len(part)] = part
            following = ids[at + size] if at + size < len(ids) else -1
            args = (state, jnp.asarray(tokens), jnp.int32(len(part)), jnp.int32(following))
            with self._timed([request]) as timed:
                state = self.runner.prefill(*args, self.config.sampling)
                jax.block_until_ready(state.length)
            statistics.prefill_seconds += timed.seconds
            statistics.prefill_bytes += timed.loads.streamed.bytes
        return state

    def _placed(self, states, lane, state) -> DecodeState:
        if self._width == 1:
            return state
        if states is None:
            states = self.runner.lanes(state, self._width)
        return self.runner.place(states, lane, state)

    def _forward(self, states: DecodeState, lanes: Sequence[Request | None]) -> DecodeState:
        """One forward of the target for every lane."""
        if self.config.selector is None:
            return self._plain_forward(states, lanes)
        return self._tree_forward(states, lanes)

    def _plain_forward(self, states, lanes):
        with self._timed(lanes) as timed:
            states, counts = self.runner.step(states, self.config.sampling)
            results = jax.device_get((states.last_token, counts))
        for request, token, counted in self._by_lane(lanes, *results):
            depths = np.zeros(1, int)
            request.statistics.add_forward(1, counted, depths, timed.seconds, timed.loads)
            # Plain decoding is native by definition.
            request.statistics.add_audit(1, agreeing=1, kl=0.0, natural=1)
            self._emit(request, (int(token),))
        return states

    def _tree_forward(self, states, lanes):
        selector, costs = self.config.selector, None
        if self.gate.closed:
            selector = self.runner.setup.native()
        if self.config.evict is not None:
            with self._timed(lanes):
                costs = self._costs_of(states, selector)
        with self._timed(lanes) as timed:
            states, done = self._round(states, selector, costs)
            results = jax.device_get((done.tree, done.acceptance, done.counts))
        audit = None
        if self.gate.is_due():
            with self._timed(lanes):
                states, audit = self.runner.audit(states, done, self.config.sampling)
        fell_back = self.gate.closed
        results += jax.device_get((done.record, audit))
        for request, tree, accepted, counts, record, audited in self._by_lane(lanes, *results):
            length, statistics = int(accepted.length), request.statistics
            depths = tree.depth[tree.valid]
            statistics.add_forward(length, counts, depths, timed.seconds, timed.loads)
            statistics.fallback_verifications += fell_back
            if audited is not None:
                agreeing, natural = int(audited.agreeing), int(audited.natural_length)
                statistics.add_audit(length, agreeing, float(audited.kl), natural)
                self.gate.add(length, agreeing)
            self._observe(request.index, Verification.from_round(tree, accepted, record))
            self._emit(request, tuple(map(int, accepted.tokens[:length])))
        return states

    def _round(self, states, selector, costs):
        """One round; with `costs`, of as many nodes as pay."""
        config = self.config
        if costs is None:
            args = (self._commitment, selector, config.sampling, config.record)
            return self.runner.round(states, *args)
        states, tree = self.runner.draft(states)
        score, valid = jax.device_get((tree.score, tree.valid))
        nodes = choose_length(score, valid, costs, config.evict.root_bonus)
        return self._verify(states, tree, selector, nodes)

    def _verify(self, states, tree, selector, nodes):
        config = self.config
        args = (self._commitment, selector, config.sampling, nodes, config.record)
        return self.runner.verify(states, tree, *args)

    def _costs_of(self, state, selector) -> CostTable:
        """What each length costs under this policy and with such caches; measured when first
        asked for, on a copy of the state."""
        key = (selector, state.caches[0].k.shape[0], self.config.sampling, self.config.evict)
        if key in self._costs:
            return self._costs[key]
        start = jax.device_get((state.length, state.last_token))
        copy = jax.tree.map(jnp.copy, state)

        def run_round(nodes: int) -> None:
            nonlocal copy
            length, last_token = map(jnp.asarray, start)
            copy, tree = self.runner.draft(copy.replace(length=length, last_token=last_token))
            jax.device_get((tree.score, tree.valid))
            copy, done = self._verify(copy, tree, selector, nodes)
            jax.device_get((done.tree, done.acceptance, done.counts))

        nodes = self.runner.setup.tree.nodes
        self._costs[key] = evict.profile(run_round, nodes, self.config.evict)
        self.runner.begin_request()  # the request finds the experts that it would have found
        return self._costs[key]

    def _emit(self, request: Request, run: tuple[int, ...]) -> None:
        self._on_tokens(request.index, request.emit(run))

    def _by_lane(self, lanes, *results) -> Iterator[tuple]:
        """(request, its part of each result) of the lanes that decode."""
        for lane, request in enumerate(lanes):
            if request is None:
                continue
            if self._width == 1:
                yield request, *results
            else:
                yield request, *jax.tree.map(lambda leaf: leaf[lane], results)

    @contextlib.contextmanager
    def _timed(self, lanes: Sequence[Request | None]) -> Iterator["_Timed"]:
        """Times a forward without what it had to compile; each lane that decodes has its share."""
        requests = [request for request in lanes if request is not None]
        timed = _Timed()
        loads, compiled = self.runner.loads, self.runner.compiled.seconds
        begin = time.perf_counter()
        yield timed
        elapsed = time.perf_counter() - begin
        compiling = self.runner.compiled.seconds - compiled
        timed.seconds = (elapsed - compiling) / len(requests)
        timed.loads = self.runner.loads - loads
        for request in requests:
            request.statistics.compile_seconds += compiling / len(requests)


@dataclasses.dataclass
class _Timed:
    """What a forward took, for each of its requests; more than one never load experts."""

    seconds: float = 0.0
    loads: Loads = Loads()


def _split(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Prefill chunks as (first token, rows); the last one may be padded."""
    chunks, at = [], 0
    while at < len(ids):
        left = len(ids) - at
        size = next((chunk for chunk in _CHUNKS if chunk >= left), _CHUNKS[-1])
        chunks.append((at, size))
        at += size
    return chunks


def _cache_rows(needed: int) -> int:
    rows = _SMALLEST_CACHE
    while rows < needed:
        rows *= 2
    return rows
