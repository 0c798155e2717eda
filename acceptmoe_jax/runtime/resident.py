"""Decoding with every expert on the device: one compiled program a round."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from acceptmoe_jax.offload.loads import Loads
from acceptmoe_jax.runtime import programs
from acceptmoe_jax.runtime.compiled import CompiledPrograms
from acceptmoe_jax.runtime.state import Audit, DecodeState, LayerCounts, Round, Setup, Weights
from acceptmoe_jax.selection import Commitment, SelectorConfig
from acceptmoe_jax.speculation import GREEDY, DraftTree, SamplingConfig


class ResidentRunner:
    """Runs the programs of `programs`, compiled for the shapes that they are first called with.

    A state is of one sequence, or of a batch of lanes (`lanes`), one sequence each. Every state
    that is passed in is consumed.
    """

    supports_batches = True

    def __init__(self, setup: Setup, weights: Weights):
        self.setup = setup
        self.weights = weights
        self.compiled = CompiledPrograms()

    @property
    def loads(self) -> Loads:
        """Nothing is moved."""
        return Loads()

    def begin_request(self) -> None:
        """Nothing that one request leaves behind concerns the next."""

    def lanes(self, state: DecodeState, width: int) -> DecodeState:
        """A batch of `width` lanes like this one, which stays."""
        return jax.tree.map(lambda leaf: jnp.stack([leaf] * width), state)

    def place(self, states: DecodeState, lane: int, state: DecodeState) -> DecodeState:
        """The batch with a sequence in a lane; consumes the batch alone."""
        key = (_place, *_shapes((states,)))
        return self.compiled.run(key, _place, states, jnp.int32(lane), state, donate=(0,))

    def prefill(
        self, state: DecodeState, tokens, count, next_token, sampling: SamplingConfig = GREEDY
    ) -> DecodeState:
        """See `programs.prefill_chunk`; of one sequence."""
        args = (state, tokens, count, next_token)
        return self._run(programs.prefill_chunk, *args, sampling=sampling)

    def step(
        self, state: DecodeState, sampling: SamplingConfig = GREEDY
    ) -> tuple[DecodeState, LayerCounts]:
        """See `programs.autoregressive_step`."""
        return self._run(programs.autoregressive_step, state, sampling=sampling)

    def round(
        self,
        state: DecodeState,
        commitment: Commitment,
        selector: SelectorConfig,
        sampling: SamplingConfig = GREEDY,
        record: bool = False,
    ) -> tuple[DecodeState, Round]:
        """See `programs.speculative_round`."""
        static = {"selector": selector, "sampling": sampling, "record": record}
        return self._run(programs.speculative_round, state, shared=(commitment,), **static)

    def draft(self, state: DecodeState) -> tuple[DecodeState, DraftTree]:
        """See `programs.draft`."""
        return self._run(programs.draft, state)

    def verify(
        self,
        state: DecodeState,
        tree: DraftTree,
        commitment: Commitment,
        selector: SelectorConfig,
        sampling: SamplingConfig,
        nodes: int,
        record: bool = False,
    ) -> tuple[DecodeState, Round]:
        """See `programs.verify`."""
        static = {"selector": selector, "sampling": sampling, "nodes": nodes, "record": record}
        return self._run(programs.verify, state, tree, shared=(commitment,), **static)

    def audit(
        self, state: DecodeState, done: Round, sampling: SamplingConfig = GREEDY
    ) -> tuple[DecodeState, Audit]:
        """See `programs.audit_round`."""
        return self._run(programs.audit_round, state, done, sampling=sampling)

    def _run(self, function, state: DecodeState, *args, shared=(), **static) -> Any:
        """Runs a program; `args` have an axis of lanes where the state has one, `shared` not."""
        bound = functools.partial(function, self.setup, **static)
        if jnp.ndim(state.length):
            axes = (None, *[0] * (1 + len(args)), *[None] * len(shared))
            bound = jax.vmap(bound, in_axes=axes)
        args = (state, *args, *shared)
        key = (function, *_shapes(args), tuple(static.items()))
        return self.compiled.run(key, bound, self.weights, *args, donate=(1,))


def _place(states, lane, state):
    return jax.tree.map(lambda lanes, one: lanes.at[lane].set(one), states, state)


def _shapes(args) -> tuple:
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
