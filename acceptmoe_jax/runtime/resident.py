"""Decoding with every expert on the device: one compiled program a round."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from acceptmoe_jax.offload.loads import Loads
from acceptmoe_jax.runtime import programs
from acceptmoe_jax.runtime.compiled import CompiledPrograms
from acceptmoe_jax.runtime.state import Audit, DecodeState, LayerCounts, Round, Setup, Weights
from acceptmoe_jax.selection import SelectorConfig


class ResidentRunner:
    """Runs the programs of `programs`, compiled for the shapes that they are first called with.

    Every state that is passed in is consumed.
    """

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

    def prefill(self, state: DecodeState, tokens, count, next_token) -> DecodeState:
        """See `programs.prefill_chunk`."""
        return self._run(programs.prefill_chunk, state, tokens, count, next_token)

    def step(self, state: DecodeState) -> tuple[DecodeState, LayerCounts]:
        """See `programs.autoregressive_step`."""
        return self._run(programs.autoregressive_step, state)

    def round(
        self, state: DecodeState, phat: jax.Array, selector: SelectorConfig, record: bool = False
    ) -> tuple[DecodeState, Round]:
        """See `programs.speculative_round`."""
        static = {"selector": selector, "record": record}
        return self._run(programs.speculative_round, state, phat, **static)

    def audit(self, state: DecodeState, done: Round) -> tuple[DecodeState, Audit]:
        """See `programs.audit_round`."""
        return self._run(programs.audit_round, state, done)

    def _run(self, function, *args, **static) -> Any:
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(args))
        bound = functools.partial(function, self.setup, **static)
        key = (function, shapes, tuple(static.items()))
        return self.compiled.run(key, bound, self.weights, *args, donate=(1,))
