"""Rounds once more, with the host's own work and no other.

`Recording` keeps what the host was told while an engine decoded. `Rehearsal` makes the same calls
in the same order, but its programs have the same arguments and results and compute nothing, and its
experts are a few bytes: what remains is what the host does. On a CPU that cannot be read off a real
round, because XLA runs small programs inside the call that dispatches them.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.offload import transfers
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.offload.host_store import HostStore
from acceptmoe_jax.runtime import layer_forward
from acceptmoe_jax.runtime.compiled import CompiledPrograms
from acceptmoe_jax.runtime.offloaded import OffloadedRunner
from acceptmoe_jax.runtime.state import Weights
from pallas_kernels.masked_expert_gemm import ExpertBank


@dataclasses.dataclass
class Request:
    """A prompt's rounds.

    Attributes:
      state: shapes of the first round's state.
      args, options: of `round`, after the state.
      told: what the host read, layer after layer and round after round.
      rounds: how many.
    """

    state: Any
    args: tuple
    options: dict[str, Any]
    told: list[np.ndarray] = dataclasses.field(default_factory=list)
    rounds: int = 0


class Recording:
    """The requests of an engine, and the shapes of what its programs returned.

    Attributes:
      requests: that had rounds, in order.
      results: by a program's key.
    """

    def __init__(self):
        self.requests: list[Request] = []
        self.results: dict[Any, Any] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Records rounds, apart from what prefill and audits read."""
        run, read = CompiledPrograms.run, layer_forward.read_told
        round_, begin_request = OffloadedRunner.round, OffloadedRunner.begin_request
        current: Request | None = None
        in_round = False

        def recorded_run(programs, key, *args, **options):
            result = run(programs, key, *args, **options)
            if key not in self.results:
                self.results[key] = _shapes(result)
            return result

        def recorded_read(told):
            numbers = read(told)
            if in_round:
                current.told.append(numbers)
            return numbers

        def recorded_begin(runner):
            nonlocal current
            current = None
            begin_request(runner)

        def recorded_round(runner, state, *args, **options):
            nonlocal current, in_round
            if current is None:
                current = Request(_shapes(state), args, options)
                self.requests.append(current)
            current.rounds += 1
            in_round = True
            done = round_(runner, state, *args, **options)
            in_round = False
            return done

        with (
            mock.patch.object(CompiledPrograms, "run", recorded_run),
            mock.patch.object(layer_forward, "read_told", recorded_read),
            mock.patch.object(OffloadedRunner, "begin_request", recorded_begin),
            mock.patch.object(OffloadedRunner, "round", recorded_round),
        ):
            yield


class Rehearsal:
    """Recorded requests once more, without any work but the host's.

    Args:
      recording: of `runner`.
      weights: of its target and head.

    Attributes:
      runner: the one that rehearses.
    """

    def __init__(self, recording: Recording, runner: OffloadedRunner, weights: Weights):
        self._requests = recording.requests
        config = OffloadConfig(runner.config.slots, runner.config.eviction)
        store = _tiny_store(runner.store)
        with mock.patch.object(transfers, "_scatter", _write_nothing):
            self.runner = OffloadedRunner(runner.setup, weights, store, config)
        self.runner.compiled = _StandIns(recording.results)

    def run(self) -> None:
        """All requests, each from empty tables."""
        for request in self._requests:
            told, read = iter(request.told), layer_forward.read_told

            def rehearsed_read(ours):
                read(ours)
                return next(told)

            with mock.patch.object(layer_forward, "read_told", rehearsed_read):
                self.runner.begin_request()
                state = jax.tree.map(_zeros, request.state)
                for _ in range(request.rounds):
                    state, done = self.runner.round(state, *request.args, **request.options)
                    jax.block_until_ready(done)


class _StandIns(CompiledPrograms):
    """Programs with the arguments and results of recorded ones; all they do is fill in zeros."""

    def __init__(self, results: dict[Any, Any]):
        super().__init__()
        self._results = results

    def compile(self, key, function, args, donate):
        shapes = self._results[key]

        def stand_in(*args):
            donated = collections.defaultdict(list)
            for leaf in jax.tree.leaves([args[place] for place in donate]):
                donated[leaf.shape, leaf.dtype].append(leaf)

            def result(shape):
                same = donated[shape.shape, shape.dtype]
                return same.pop(0) if same else _zeros(shape)

            return jax.tree.map(result, shapes)

        # Otherwise an argument without a use would not be passed.
        program = jax.jit(stand_in, donate_argnums=donate, keep_unused=True)
        return program.lower(*args).compile()


def _write_nothing(layout, pool, records, indices) -> ExpertBank:
    """In place of `transfers._scatter`; the barrier makes a use of every argument."""
    del layout
    pool, _, indices = jax.lax.optimization_barrier((pool, records, indices))
    return pool.replace(slot_of=indices[len(records) :])


def _tiny_store(store: HostStore) -> HostStore:
    """Experts with as many leaves, of one element each."""

    def bank(experts: int) -> ExpertBank:
        leaves = [
            jnp.zeros((experts, *(1 for _ in place.shape)), place.dtype)
            for place in store.layout.places
        ]
        weights = jax.tree.unflatten(store.layout.structure, leaves)
        return ExpertBank(**weights, slot_of=jnp.arange(experts, dtype=jnp.int32))

    return HostStore.from_banks(
        [
            bank(len(store.layers[layer])) if layer in store.layers else None
            for layer in range(max(store.layers) + 1)
        ]
    )


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
