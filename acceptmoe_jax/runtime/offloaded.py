"""Decoding with the experts in host memory: a program a layer, and transfers between them.

Each MoE layer has C slots on the device and a residency table. A verification selects with the
residency as it is, routes, loads what is missing and computes, in waves if the used experts
exceed the slots. A wave's hits are computed while its misses, and those of the next wave, are on
the link. Prefill and audits use experts by the dozen that the next verification does not need:
they stream through a buffer of their own, and leave the tables as they are.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.offload import EVICTION_POLICIES, Counts, ResidencyTable
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.offload.host_store import HostStore
from acceptmoe_jax.offload.loads import Loads
from acceptmoe_jax.offload.transfers import (
    GROUP,
    Staged,
    Traffic,
    Transfers,
    empty_pool,
    is_consumed,
    with_slots,
)
from acceptmoe_jax.runtime import layerwise, stages
from acceptmoe_jax.runtime.compiled import CompiledPrograms
from acceptmoe_jax.runtime.layer_forward import LayerForward
from acceptmoe_jax.runtime.state import Audit, DecodeState, LayerCounts, Round, Setup, Weights
from acceptmoe_jax.selection import Commitment, SelectorConfig
from acceptmoe_jax.speculation import GREEDY, DraftTree, SamplingConfig
from pallas_kernels.masked_expert_gemm import ExpertBank

Compute = Callable[..., None]  # (experts, bank, *, last)


class OffloadedRunner:
    """Runs the programs of `layerwise` and moves experts between them.

    Every state that is passed in is consumed. An exception leaves the tables consistent; the
    request that it struck is lost, and the next one works.

    Args:
      setup: of the programs.
      weights: without banks.
      store: the experts.
      config: slots, eviction and link.
    """

    def __init__(
        self,
        setup: Setup,
        weights: Weights,
        store: HostStore,
        config: OffloadConfig,
    ):
        self.setup = setup
        self.store = store
        self.compiled = CompiledPrograms()
        self.config = config
        self.transfers = Transfers(store.layout, config.link)
        policy = EVICTION_POLICIES[config.eviction]
        self.tables = {
            layer: ResidencyTable(setup.target.num_experts, config.slots, policy)
            for layer in store.layers
        }
        # Addressed by their tables: from a pool, selection knows the residency.
        self.pools = {layer: self._empty_pool(config.slots) for layer in store.layers}
        self._stream = self._empty_pool(GROUP)
        self._streamed = Traffic()
        layers = range(setup.target.num_layers)
        self.layers = [weights.target[f"layers_{layer}"] for layer in layers]
        ends = {k: v for k, v in weights.target.items() if not k.startswith("layers_")}
        self._ends = weights.replace(target=ends, banks=())
        for pool in (self._stream, next(iter(self.pools.values()))):
            self.transfers.compile(pool)

    @property
    def loads(self) -> Loads:
        """Totals; those of a part are a difference of two readings."""
        table = sum((table.counts for table in self.tables.values()), Counts())
        return Loads(table, self.transfers.traffic - self._streamed, self._streamed)

    def begin_request(self) -> None:
        """Empties every table unless they are to be kept; mends what a failed transfer left."""
        for layer, table in self.tables.items():
            if not self.config.keep_residency:
                table.reset()
            if is_consumed(self.pools[layer]):
                residents = {
                    at: self.store.layers[layer][slot.expert]
                    for at, slot in enumerate(table.slots)
                    if slot.expert is not None
                }
                self.pools[layer] = self.transfers.rebuild(
                    table.num_slots, residents, table.slot_of
                )
            else:
                self.pools[layer] = with_slots(self.pools[layer], table.slot_of)
        if is_consumed(self._stream):
            self._stream = self._empty_pool(GROUP)

    def prefill(
        self, state: DecodeState, tokens, count, next_token, sampling: SamplingConfig = GREEDY
    ) -> DecodeState:
        """See `programs.prefill_chunk`; streams."""
        block, x, views = self._begin(layerwise.begin_chunk, _without_draft(state), tokens, count)
        forward = LayerForward(self, state, block, views, self.setup.native(), streams=True)
        x, captured, *_ = forward.run(x)
        args = (block, next_token, x, captured)
        return self._end(layerwise.end_chunk, sampling, forward, state, state.draft, *args)

    def step(
        self, state: DecodeState, sampling: SamplingConfig = GREEDY
    ) -> tuple[DecodeState, LayerCounts]:
        """See `programs.autoregressive_step`."""
        row = (state.last_token[None], jnp.int32(1))
        block, x, views = self._begin(layerwise.begin_chunk, _without_draft(state), *row)
        forward = LayerForward(self, state, block, views, self.setup.native())
        args = forward.run(x)
        return self._end(layerwise.end_step, sampling, forward, state, state.draft, *args)

    def round(
        self,
        state: DecodeState,
        commitment: Commitment,
        selector: SelectorConfig,
        sampling: SamplingConfig = GREEDY,
        record: bool = False,
    ) -> tuple[DecodeState, Round]:
        """See `programs.speculative_round`; pruning sees the residency before a layer's loads."""
        state, tree = self.draft(state)
        return self.verify(state, tree, commitment, selector, sampling, None, record)

    def draft(self, state: DecodeState) -> tuple[DecodeState, DraftTree]:
        """See `programs.draft`."""
        draft, tree = self._begin(layerwise.draft, state.draft, _without_draft(state), donate=(1,))
        return state.replace(draft=draft), tree

    def verify(
        self,
        state: DecodeState,
        tree: DraftTree,
        commitment: Commitment,
        selector: SelectorConfig,
        sampling: SamplingConfig,
        nodes: int | None,
        record: bool = False,
    ) -> tuple[DecodeState, Round]:
        """See `programs.verify`."""
        tree, block, x, views = self._begin(
            layerwise.begin_round, _without_draft(state), tree, static=(nodes,)
        )
        forward = LayerForward(self, state, block, views, selector, commitment, record=record)
        args = (tree, *forward.run(x))
        return self._end(layerwise.end_round, sampling, forward, state, state.draft, *args)

    def audit(
        self, state: DecodeState, done: Round, sampling: SamplingConfig = GREEDY
    ) -> tuple[DecodeState, Audit]:
        """See `programs.audit_round`; the tables do not notice."""
        saved = self._program(stages.accepted_rows, (), state.caches, done)
        block, x, views = self._begin(
            layerwise.begin_audit, _without_draft(state), done.tree, done.start
        )
        before = stages.before_round(state, done)
        forward = LayerForward(self, before, block, views, self.setup.native(), streams=True)
        x, captured, *_ = forward.run(x)
        args = (done, saved, x, captured)
        return self._end(layerwise.end_audit, sampling, forward, state, state.draft, *args)

    def stream(self, layer: int, experts: Sequence[int], compute: Compute) -> None:
        """Computes experts of a layer by way of the stream's buffer, resident ones in place.

        Args:
          compute: called with a part of the experts, a bank that holds them, and whether it is
            the last part; once without experts if there are none.
        """
        before = self.transfers.traffic
        table = self.tables[layer]
        slot_of = table.slot_of
        resident = [expert for expert in experts if slot_of[expert] != table.num_slots]
        absent = [expert for expert in experts if slot_of[expert] == table.num_slots]
        groups = [absent[at : at + GROUP] for at in range(0, len(absent), GROUP)]
        loads = _Pipeline(self, layer, groups)
        if resident or not absent:
            compute(resident, self.pools[layer], last=not absent)
        for at, group in enumerate(groups):
            slot_of = np.full(len(slot_of), GROUP, np.int32)
            slot_of[group] = np.arange(len(group))
            self._stream = loads.flush(self._stream, range(len(group)), slot_of)
            compute(group, self._stream, last=at == len(groups) - 1)
        self._streamed += self.transfers.traffic - before

    def load(self, layer: int, experts: Sequence[int], compute: Compute) -> None:
        """Computes experts of a layer in its slots, wave by wave; see `stream`."""
        table = self.tables[layer]
        waves = table.plan(experts)
        groups = [
            wave.loads[at : at + GROUP] for wave in waves for at in range(0, len(wave.loads), GROUP)
        ]
        if not waves:  # every pick was dropped
            compute((), self.pools[layer], last=True)
        loads = _Pipeline(self, layer, groups)
        for wave in waves:
            slots = table.begin(wave)
            last = wave is waves[-1]
            try:
                if wave.hits:
                    compute(wave.hits, self.pools[layer], last=last and not wave.loads)
                table.finish_loads(wave)
                if wave.loads:
                    slot_of = table.slot_of
                    for at in range(0, len(slots), GROUP):
                        self.pools[layer] = loads.flush(
                            self.pools[layer], slots[at : at + GROUP], slot_of
                        )
                    compute(wave.loads, self.pools[layer], last=last)
            except BaseException:
                table.abort(wave)
                raise
            table.end(wave)

    def _empty_pool(self, slots: int) -> ExpertBank:
        return empty_pool(self.store.layout, slots, self.setup.target.num_experts)

    def _begin(self, function, *args, static: tuple = (), donate: tuple[int, ...] = ()) -> Any:
        return self._program(function, static, self._ends, *args, donate=donate)

    def _end(
        self, function, sampling, forward: LayerForward, state: DecodeState, draft, *args
    ) -> Any:
        """What follows the last layer consumes the caches and what the head carries."""
        rest = state.replace(caches=(), draft=None)
        args = (self._ends, tuple(forward.caches), draft, rest, *args)
        return self._program(function, (sampling,), *args, donate=(1, 2))

    def _program(self, function, static: tuple, *args, donate: tuple[int, ...] = ()) -> Any:
        """A program at an end of a forward, keyed by the shapes of what it is given."""
        leaves, structure = jax.tree.flatten(args[1:])
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        bound = functools.partial(function, self.setup, *static)
        key = (function, static, structure, shapes)
        return self.compiled.run(key, bound, *args, donate=donate)


class _Pipeline:
    """Groups of a layer's experts on the link, one ahead of the one that is written."""

    def __init__(self, runner: OffloadedRunner, layer: int, groups: Sequence[Sequence[int]]):
        self._transfers = runner.transfers
        self._records = (runner.store.records(layer, group) for group in groups)
        self._staged = self._stage()

    def flush(self, pool: ExpertBank, slots: Sequence[int], slot_of: np.ndarray) -> ExpertBank:
        """Writes the next group."""
        staged, self._staged = self._staged, self._stage()
        return self._transfers.flush(pool, staged, slots, slot_of)

    def _stage(self) -> Staged | None:
        records = next(self._records, None)
        return None if records is None else self._transfers.stage(records)


def _without_draft(state: DecodeState) -> DecodeState:
    """What a forward begins with: of the caches it reads only how many rows they have."""
    return state.replace(caches=state.caches[:1], draft=None)
