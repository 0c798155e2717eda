"""Every expert in pinned host memory, packed in one record: an array a (layer, expert).

A record is never a slice of a stacked pinned array: XLA may then compute in host memory. Packing
makes moving an expert one copy whatever its leaves (9 of them with MXFP4 and biases), so scales
and biases cannot be left behind by their weights.

Host memory beyond the pinned records is one expert's: `jax.device_put` into pinned memory copies
on a GPU and waits for the copy here; the CPU backend adopts the buffer that was filled. A cast or
an interleaved tensor (GPT-OSS) holds one tensor of that expert besides.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.experts import bank_weights
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.expert_reading import read_expert
from acceptmoe_jax.weights.loading import TreePlan
from acceptmoe_jax.weights.safetensors_io import aligned_empty
from pallas_kernels.masked_expert_gemm import ExpertBank

Record = Shaped[Array, "record"]

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_LIMIT = 64  # GiB: XLA's own
# XLA's pool grows by doubling and fragments, and serves other transfers too.
_POOL_MARGIN = 1.1


@dataclasses.dataclass(frozen=True)
class LeafPlace:
    """Where a leaf of an expert lies in its record.

    Attributes:
      begin: its first byte.
      shape: of one expert's leaf.
      dtype: of the leaf.
    """

    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """How the leaves of one expert are packed in a record, the same for every expert.

    Attributes:
      structure: of a bank's weights (`bank_weights`); its leaves in order have the `places`.
      places: without gaps wherever the leaves' sizes allow aligned ones, as at all real sizes.
      dtype: of a record: that of the largest leaf, so the bulk is moved and written as it is.
      nbytes: of a record; what a load moves.
    """

    structure: jax.tree_util.PyTreeDef
    places: tuple[LeafPlace, ...]
    dtype: np.dtype
    nbytes: int

    @classmethod
    def of(cls, weights: Any) -> "ExpertLayout":
        """The layout for the weights of a bank: arrays or `jax.ShapeDtypeStruct`s `[C, ...]`."""
        leaves, structure = jax.tree.flatten(weights)
        unit = max(leaf.dtype.itemsize for leaf in leaves)
        places, end = [], 0
        for leaf in leaves:
            place = LeafPlace(end, tuple(leaf.shape[1:]), np.dtype(leaf.dtype))
            places.append(place)
            end += -(-place.nbytes // unit) * unit
        largest = max(places, key=lambda place: place.nbytes)
        return cls(structure, tuple(places), largest.dtype, end)

    @property
    def items(self) -> int:
        """The length of a record."""
        return self.nbytes // self.dtype.itemsize

    def empty_record(self) -> np.ndarray:
        """An uninitialised record on the host."""
        return aligned_empty((self.items,), self.dtype)

    def views(self, record: np.ndarray) -> list[np.ndarray]:
        """The leaves of a host record, to read or to fill in place."""
        raw = record.view(np.uint8)
        return [
            raw[place.begin : place.begin + place.nbytes].view(place.dtype).reshape(place.shape)
            for place in self.places
        ]

    def unpack(self, record: Record) -> list[Array]:
        """The leaves of a device record, inside jit."""
        return [self._unpack(record, place) for place in self.places]

    def _unpack(self, record: Record, place: LeafPlace) -> Array:
        size, wanted = self.dtype.itemsize, place.dtype.itemsize
        unit = max(size, wanted)
        begin, end = place.begin // size, -(-(place.begin + place.nbytes) // unit) * unit // size
        items = record[begin:end]
        if place.dtype != self.dtype:
            if wanted > size:
                items = items.reshape(-1, wanted // size)
            items = jax.lax.bitcast_convert_type(items, place.dtype).reshape(-1)
        return items[: math.prod(place.shape)].reshape(place.shape)


@dataclasses.dataclass(frozen=True)
class HostStore:
    """The experts of a target in pinned host memory.

    Attributes:
      layout: of every record.
      layers: layer -> the record of each expert, by id.
    """

    layout: ExpertLayout
    layers: Mapping[int, tuple[Record, ...]]

    @classmethod
    def from_banks(cls, banks: Sequence[ExpertBank | None]) -> "HostStore":
        """Copies banks that hold every expert, wherever its slot is; None is a dense layer.

        Banks on a GPU are copied by way of the host, a layer at a time.

        Raises:
          UserError: see `check_host_memory`.
          ValueError: if the layers differ in shapes or dtypes.
        """
        weights = {i: bank_weights(bank) for i, bank in enumerate(banks) if bank is not None}
        slot_of = {i: np.asarray(banks[i].slot_of) for i in weights}
        on_host: dict[int, list[np.ndarray]] = {}  # the layer that is being copied

        def fill(layer: int, expert: int, leaves: list[np.ndarray]) -> None:
            if layer not in on_host:
                on_host.clear()
                on_host[layer] = jax.device_get(jax.tree.leaves(weights[layer]))
            for source, out in zip(on_host[layer], leaves):
                out[...] = source[slot_of[layer][expert]]

        experts = {layer: len(slots) for layer, slots in slot_of.items()}
        return cls._filled(_common_layout(weights), experts, fill)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        plans: Mapping[int, TreePlan],
        progress: Callable[[int], None] | None = None,
    ) -> "HostStore":
        """Reads every expert straight into its record; only pinned memory holds all of them.

        Args:
          checkpoint: checked against its plans (`check_complete`).
          plans: layer -> the plan of its bank.
          progress: called with the bytes of every expert that was read.

        Raises:
          UserError: see `check_host_memory`, and if the layers' experts differ in format.
        """
        try:
            layout = _common_layout({layer: _abstract(plan) for layer, plan in plans.items()})
        except ValueError as error:
            raise UserError(f"{checkpoint.source}: {error}") from None

        def fill(layer: int, expert: int, leaves: list[np.ndarray]) -> None:
            read_expert(checkpoint, plans[layer], expert, leaves)
            if progress is not None:
                progress(layout.nbytes)

        experts = {layer: plan.leaves[0].shape[0] for layer, plan in plans.items()}
        return cls._filled(layout, experts, fill)

    @classmethod
    def _filled(
        cls,
        layout: ExpertLayout,
        experts: Mapping[int, int],
        fill: Callable[[int, int, list[np.ndarray]], None],
    ) -> "HostStore":
        """Makes `experts[layer]` records a layer; `fill` writes the leaves of one."""
        check_host_memory(sum(experts.values()) * layout.nbytes)

        def record(layer: int, expert: int) -> Record:
            host = layout.empty_record()
            fill(layer, expert, layout.views(host))
            return _pin(host)

        return cls(
            layout,
            {layer: tuple(record(layer, i) for i in range(n)) for layer, n in experts.items()},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(len(records) for records in self.layers.values()) * self.layout.nbytes

    def records(self, layer: int, experts: Iterable[int]) -> list[Record]:
        """The records of these experts of a layer, in the order given."""
        return [self.layers[layer][expert] for expert in experts]


def check_host_memory(bytes_needed: int) -> None:
    """Checks that XLA lets so many bytes be pinned; only its GPU backends have a limit.

    Raises:
      UserError: naming the variable that raises the limit, and a value that is enough.
    """
    if jax.default_backend() != "gpu":
        return
    text = os.environ.get(HOST_LIMIT, str(_DEFAULT_LIMIT))
    try:
        limit = int(text)
    except ValueError:
        raise UserError(f"{HOST_LIMIT}={text} is no whole number") from None
    needed = -int(-bytes_needed * _POOL_MARGIN // (1 << 30))
    if needed > limit:
        raise UserError(
            f"the experts take {bytes_needed / (1 << 30):.1f} GiB of pinned host memory, but XLA "
            f"would pin {limit} GiB: set {HOST_LIMIT}={needed} before the program starts"
        )


def _common_layout(weights: Mapping[int, Any]) -> ExpertLayout:
    """The one layout of all layers' weights; ValueError if there are several."""
    layouts = {layer: ExpertLayout.of(tree) for layer, tree in weights.items()}
    (first, layout), *others = layouts.items()
    for layer, other in others:
        if other != layout:
            raise ValueError(f"the experts of layers {first} and {layer} differ in format")
    return layout


def _abstract(plan: TreePlan) -> Any:
    return jax.tree.unflatten(
        plan.structure, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves]
    )


def _pin(record: np.ndarray) -> Record:
    """The record in pinned memory; waits, so that at most one expert is on the host twice."""
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.block_until_ready(jax.device_put(record, pinned))
