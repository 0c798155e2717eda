"""One pass of a target over a block of rows, a program a layer or two, driven by the host.

What the host does here it does in every layer, so it does little: the keys and functions of the
programs are made once a forward, and an array more or less matters (some 2 us each as a result,
0.5 as an argument, 9 as a NumPy argument).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from acceptmoe_jax.runtime import layerwise
from acceptmoe_jax.runtime.stages import NO_COMMITMENT, Block
from acceptmoe_jax.runtime.state import DecodeState, LayerRecord
from acceptmoe_jax.selection import Commitment, SelectorConfig
from pallas_kernels.masked_expert_gemm import ExpertBank


class LayerForward:
    """A pass over a block, layer by layer.

    Args:
      runner: an `OffloadedRunner`, whose programs, pools and transfers it uses.
      state: its caches are consumed.
      block, views: as the program that began the forward returned them.
      selector: the policy.
      commitment: how likely nodes are to be committed.
      record: keep what the routers said.
      streams: whether experts go past the residency tables.

    Attributes:
      caches: of the layers, as they are by now.
    """

    def __init__(
        self,
        runner: Any,
        state: DecodeState,
        block: Block,
        views: Sequence,
        selector: SelectorConfig,
        commitment: Commitment = NO_COMMITMENT,
        *,
        record: bool = False,
        streams: bool = False,
    ):
        setup = runner.setup
        self.caches = list(state.caches)
        self.streams = streams
        self._runner = runner
        self._load = runner.stream if streams else runner.load
        self._start = state.length
        self._block = block
        self._views = dict(zip(setup.target.windows, views))
        self._commitment = commitment
        shape = (len(block.tokens), state.caches[0].k.shape[0])  # T, S
        slots = runner.config.slots
        self._route_static = (selector, slots, record)
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(commitment))
        self._route_key = (*self._route_static, *shape, shapes)
        self._shape = shape
        self._experts = {
            last: functools.partial(layerwise.run_experts, setup, last) for last in (False, True)
        }

    def run(
        self, x: jax.Array
    ) -> tuple[
        jax.Array,
        tuple[jax.Array, ...],
        tuple[jax.Array, ...],
        tuple[LayerRecord | None, ...],
    ]:
        """The last layer's output, those of the captured layers, and what MoE layers told and
        recorded."""
        setup = self._runner.setup
        captured, told, records = [], [], []
        for layer in range(setup.target.num_layers):
            if layer in setup.target.dense_layers:
                x = self._first_half(layerwise.run_dense, self._shape, (), layer, x)
            else:
                slot_of = self._runner.pools[layer].slot_of
                routed = self._first_half(
                    layerwise.route,
                    self._route_key,
                    self._route_static,
                    layer,
                    x,
                    self._commitment,
                    slot_of,
                )
                told.append(routed.told)
                records.append(routed.record)
                x = self._experts_of(layer, routed.replace(record=None))
            if layer in setup.capture:
                captured.append(x)
        return x, tuple(captured), tuple(told), tuple(records)

    def _first_half(self, function, key, static, layer, x, *args):
        """A layer up to its experts, or all of a dense one; takes and puts back its cache."""
        runner = self._runner
        window = runner.setup.target.window(layer)
        self.caches[layer], result = runner.compiled.run(
            (function, window, key),
            functools.partial(function, runner.setup, layer, *static),
            runner.layers[layer],
            self.caches[layer],
            x,
            self._block,
            self._views[window],
            self._start,
            *args,
            donate=(1,),
        )
        return result

    def _experts_of(self, layer: int, routed: layerwise.Routed) -> jax.Array:
        """The layer's output."""
        run, key, functions = self._runner.compiled.run, self._shape, self._experts
        result = None

        def compute(experts: Sequence[int], bank: ExpertBank, *, last: bool) -> None:
            nonlocal result
            del experts  # the program sees which are due and in the bank
            first = result is None
            result = run(
                (layerwise.run_experts, last, first, bank.num_slots, key),
                functions[last],
                result,
                routed,
                bank,
                donate=() if last or first else (0,),
            )

        told = read_told(routed.told)
        self._load(layer, told[: told[-1]].tolist(), compute)
        return result


def read_told(told: jax.Array) -> np.ndarray:
    """The one read of a layer by the host, which waits for its route."""
    return np.asarray(told)
