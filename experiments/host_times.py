"""The host's calls while a forward runs layer by layer, timed from outside the library.

`watched` puts clocks around the runtime's own functions for as long as it lasts; each moment
counts for the innermost of them.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from acceptmoe_jax.offload import ResidencyTable
from acceptmoe_jax.offload.host_store import HostStore
from acceptmoe_jax.offload.transfers import Transfers
from acceptmoe_jax.runtime import layer_forward, layerwise
from acceptmoe_jax.runtime.compiled import CompiledPrograms
from acceptmoe_jax.runtime.layer_forward import LayerForward

# Parts of a layer's time, in its order.
TABLE, ROUTE, READ, STAGE, WAIT, WRITE, EXPERTS, OTHER = PARTS = (
    "residency table",
    "call of route",
    "wait for route, and its read",
    "device_put of loads",
    "wait for loads",
    "calls that write loads",
    "calls of run_experts",
    "other Python",
)
_WATCHED = {
    ResidencyTable: dict.fromkeys(("plan", "begin", "finish_loads", "end", "slot_of"), TABLE),
    HostStore: {"records": STAGE},
    Transfers: {"stage": STAGE, "flush": WRITE, "_wait": WAIT},
    layer_forward: {"read_told": READ},
}
_PROGRAMS = {layerwise.route: ROUTE, layerwise.run_experts: EXPERTS}


class Layers:
    """Times of the MoE layers of rounds; a dense layer counts for the MoE layer before it.

    Attributes:
      samples: seconds by part, one mapping a layer; empty mappings where parts are not watched.
      forwards: seconds of all layers of each round.
      loads: experts staged in each round.
    """

    def __init__(self):
        self.samples: list[dict[str, float]] = []
        self.forwards: list[float] = []
        self.loads: list[int] = []
        # Of a forward and of the calls in progress: seconds of watched calls inside.
        self._inner: list[float] | None = None

    def timed(self, part: str, function: Callable) -> Callable:
        """The function, whose own time counts for `part` while a round's layers run."""

        def call(*args, **options):
            if self._inner is None:
                return function(*args, **options)
            if part == ROUTE and ROUTE in self.samples[-1]:
                self.samples.append(collections.defaultdict(float))
            begin = time.perf_counter()
            self._inner.append(0.0)
            result = function(*args, **options)
            seconds = time.perf_counter() - begin
            self.samples[-1][part] += seconds - self._inner.pop()
            self._inner[-1] += seconds
            return result

        return call

    def counted(self, stage: Callable) -> Callable:
        """`Transfers.stage`, whose records of rounds are counted."""

        def call(moves, records):
            if self._inner is not None:
                self.loads[-1] += len(records)
            return stage(moves, records)

        return call

    def forward(self, run: Callable) -> Callable:
        """`LayerForward.run`, whose own time is shared out over its layers."""

        def call(forward, x):
            if forward.streams:  # prefill, or an audit
                return run(forward, x)
            before = len(self.samples)
            self.samples.append(collections.defaultdict(float))
            self.loads.append(0)
            self._inner, begin = [0.0], time.perf_counter()
            result = run(forward, x)
            self.forwards.append(time.perf_counter() - begin)
            own, self._inner = self.forwards[-1] - self._inner[0], None
            of_forward = self.samples[before:]
            for sample in of_forward:
                sample[OTHER] = own / len(of_forward)
            return result

        return call


@contextlib.contextmanager
def watched(parts: bool = True) -> Iterator[Layers]:
    """Times the layers of rounds.

    Args:
      parts: also what they consist of; the watching itself then counts for it, about a microsecond
        a call and twenty a layer.
    """
    layers = Layers()
    with contextlib.ExitStack() as stack:

        def replace(owner, name, value):
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(LayerForward, "run", layers.forward(LayerForward.run))
        replace(Transfers, "stage", layers.counted(Transfers.stage))
        if parts:
            replace(CompiledPrograms, "run", _timed_programs(layers, CompiledPrograms.run))
            for owner, names in _WATCHED.items():
                for name, part in names.items():
                    replace(owner, name, _timed_attribute(layers, part, vars(owner)[name]))
        yield layers


def _timed_attribute(layers: Layers, part: str, attribute: Any) -> Any:
    if isinstance(attribute, property):
        return property(layers.timed(part, attribute.fget))
    return layers.timed(part, attribute)


def _timed_programs(layers: Layers, run: Callable) -> Callable:
    timed = {function: layers.timed(part, run) for function, part in _PROGRAMS.items()}

    def call(programs, key, *args, **options):
        return timed.get(key[0], run)(programs, key, *args, **options)

    return call
