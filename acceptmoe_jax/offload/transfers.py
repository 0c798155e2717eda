"""The one place that moves experts, from pinned host memory into a layer's slots.

A slot pool is an `ExpertBank` with C slots. A load has two phases:

    staged = transfers.stage(records)                        # the link starts, the host goes on
    pool = transfers.flush(pool, staged, slots, slot_of)     # into the slots, in place

What overlaps. `stage` returns while its bytes are still on the link: they move beside everything
that the device has been given before and is given until the flush, such as the computation of the
wave before, or of other layers. Several stages may be in flight; the link serves them in order.
`flush` makes the host wait for its staged bytes, a group of `GROUP` records at a time, and then
hands the device a write that the device runs after what it was given earlier: the computation that
follows needs the weights and overlaps with none of this. So a wave's own loads are hidden only if
they were staged before the wave before it was computed, and what remains is `wait_seconds`.

A modelled link adds its own time on top of the real transfer: the bytes of a record arrive no
sooner than bytes over bandwidth after the link was free for them. The time between `stage` and
`flush` counts towards it, so a modelled link overlaps like a real one.

Device memory: the pool and what is staged. The pool is donated and a flush writes in place; on the
CPU alone a flush copies its group once more, and under jax 0.10 the leaves of a bfloat16 pool too.
One that raises may have consumed its pool: see `is_consumed` and `Transfers.rebuild`.
"""

import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from acceptmoe_jax.models.experts import bank_weights
from acceptmoe_jax.offload.host_store import ExpertLayout, Record
from pallas_kernels.masked_expert_gemm import ExpertBank

# Records that one program writes at most. Larger groups would save few dispatches, and make the
# device wait longer for the first write of a wave.
GROUP = 8
# What groups are padded to, each size a program. Not 1: of a scatter of one row, XLA's GPU code
# makes an update of a slice that it copies first.
_SIZES = (2, 4, GROUP)


@dataclasses.dataclass(frozen=True)
class Link:
    """What experts come over.

    Attributes:
      gbps: of a modelled link, 1e9 bytes a second; None for the real one alone.

    Raises:
      ValueError: if `gbps` is not positive.
    """

    gbps: float | None = None

    def __post_init__(self):
        if self.gbps is not None and not self.gbps > 0:
            raise ValueError(f"a link moves more than {self.gbps} GB/s")

    @property
    def simulated(self) -> bool:
        return self.gbps is not None

    def seconds(self, nbytes: int) -> float:
        """What the model takes for so many bytes."""
        return nbytes / (1e9 * self.gbps) if self.simulated else 0.0

    def __str__(self) -> str:
        return f"{self.gbps:g} GB/s (simulated)" if self.simulated else "real"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What was moved and waited for.

    Attributes:
      loads: records staged.
      bytes: of them. A failed `stage` counts nothing; one whose flush fails has moved its bytes.
      flushes: programs that wrote a group of records into a pool.
      wait_seconds: for which `flush` held the host back until its bytes were there.
    """

    loads: int = 0
    bytes: int = 0
    flushes: int = 0
    wait_seconds: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        """Both together, such as two requests'."""
        return self._with(operator.add, other)

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        """What happened since an earlier reading."""
        return self._with(operator.sub, earlier)

    def _with(self, combine: Callable[[Any, Any], Any], other: "Traffic") -> "Traffic":
        return Traffic(*map(combine, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclasses.dataclass(frozen=True)
class Staged:
    """Records on their way to the device, or there; for one `flush`.

    Attributes:
      records: on the device.
      begin: when a modelled link starts to move them, by the transfers' clock.
    """

    records: tuple[Record, ...]
    begin: float


class Transfers:
    """Moves experts of one layout, and counts what it moves.

    Its programs are compiled once for each layout, number of slots and padded number of records.

    Args:
      layout: of the records.
      link: what they come over.
      clock: seconds, from any origin.
      sleep: waits seconds of that clock.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        link: Link = Link(),
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.layout = layout
        self.link = link
        self._clock = clock
        self._sleep = sleep
        self._link_free = -float("inf")  # when the modelled link is done with all it was given
        self._programs: dict[tuple[int, int], Callable] = {}  # (C, records)
        self._loads = self._flushes = 0
        self._wait_seconds = 0.0

    @property
    def traffic(self) -> Traffic:
        """Totals; those of a part are a difference of two readings."""
        moved = self._loads * self.layout.nbytes
        return Traffic(self._loads, moved, self._flushes, self._wait_seconds)

    def stage(self, records: Sequence[Record]) -> Staged:
        """Starts moving records to the device; does not wait for them.

        If it raises, nothing was counted and the link is as it was.

        Args:
          records: of a `HostStore`; at least one.
        """
        if not records:
            raise ValueError("nothing to stage")
        begin = max(self._clock(), self._link_free)
        moved = tuple(_to_device(list(records)))
        self._loads += len(moved)
        self._link_free = begin + self.link.seconds(len(moved) * self.layout.nbytes)
        return Staged(moved, begin)

    def flush(
        self,
        pool: ExpertBank,
        staged: Staged,
        slots: Sequence[int],
        slot_of: Int32[np.ndarray, "E"],
    ) -> ExpertBank:
        """Writes staged records into slots, in place; all other slots keep their bits.

        Args:
          pool: consumed.
          staged: not flushed before.
          slots: distinct, one a record.
          slot_of: the table as it is once these slots are written.

        Returns:
          The pool, addressed by `slot_of`. What computes with it runs after the write.
        """
        if len(slots) != len(staged.records):
            raise ValueError(f"{len(staged.records)} records for {len(slots)} slots")
        for begin in range(0, len(slots), GROUP):
            end = min(begin + GROUP, len(slots))
            self._wait(staged, begin, end)
            pool = self._write(pool, staged.records[begin:end], slots[begin:end], slot_of)
        return pool

    def load(
        self,
        pool: ExpertBank,
        records: Sequence[Record],
        slots: Sequence[int],
        slot_of: Int32[np.ndarray, "E"],
    ) -> ExpertBank:
        """Stages and flushes any number of records; at most two groups are staged at a time.

        The link is never idle: a group is on it while the one before is waited for and written.
        Arguments and result are those of `stage` and `flush`.
        """
        groups = [slice(at, at + GROUP) for at in range(0, max(len(records), 1), GROUP)]
        staged = self.stage(records[groups[0]])
        for group, following in zip(groups, [*groups[1:], None]):
            current = staged
            if following is not None:
                staged = self.stage(records[following])
            pool = self.flush(pool, current, slots[group], slot_of)
        return pool

    def rebuild(
        self, num_slots: int, residents: Mapping[int, Record], slot_of: Int32[np.ndarray, "E"]
    ) -> ExpertBank:
        """A new pool with what the table says is resident, for one that was consumed.

        Args:
          num_slots: C.
          residents: slot -> the record that belongs there.
          slot_of: the table.
        """
        pool = empty_pool(self.layout, num_slots, len(slot_of))
        if not residents:
            return with_slots(pool, slot_of)
        return self.load(pool, list(residents.values()), list(residents), slot_of)

    def compile(self, pool: ExpertBank) -> None:
        """Compiles all programs for pools like this one (it may be abstract) ahead of their use."""
        for count in _SIZES:
            self._program(pool, count)

    def _wait(self, staged: Staged, begin: int, end: int) -> None:
        before = self._clock()
        jax.block_until_ready(staged.records[begin:end])
        arrival = staged.begin + self.link.seconds(end * self.layout.nbytes)
        if self.link.simulated and (left := arrival - self._clock()) > 0:
            self._sleep(left)
        self._wait_seconds += self._clock() - before

    def _write(self, pool, records, slots, slot_of) -> ExpertBank:
        num_slots = pool.num_slots
        count = next(size for size in _SIZES if size >= len(records))
        padding = count - len(records)
        indices = np.empty(count + len(slot_of), np.int32)
        indices[: len(records)] = slots
        indices[len(records) : count] = range(num_slots, num_slots + padding)  # no slots
        indices[count:] = slot_of
        run = self._program(pool, count)
        # So small an array costs a tenth as an argument of what a transfer of its own would.
        with jax.transfer_guard_host_to_device("allow"):
            pool = run(pool, records + records[-1:] * padding, indices)
        self._flushes += 1
        return pool

    def _program(self, pool: ExpertBank, count: int) -> Callable:
        key = (pool.num_slots, count)
        if key not in self._programs:  # a dispatch need not hash the layout
            num_experts = pool.slot_of.shape[0]
            self._programs[key] = _compiled(self.layout, pool.num_slots, num_experts, count)
        return self._programs[key]


def empty_pool(layout: ExpertLayout, num_slots: int, num_experts: int) -> ExpertBank:
    """A pool of zeros in device memory, in which no expert has a slot.

    Args:
      layout: of the experts; the leaves have their dtypes and `[C, ...]` of their shapes.
      num_slots: C.
      num_experts: E.
    """
    zeros = functools.partial(jnp.zeros, device=_device())
    absent = jnp.full((num_experts,), num_slots, jnp.int32, device=_device())
    return _pool(layout, num_slots, zeros, absent)


def with_slots(pool: ExpertBank, slot_of: Int32[np.ndarray, "E"]) -> ExpertBank:
    """The pool addressed by another table, for one that changed without a load."""
    return pool.replace(slot_of=_to_device(np.array(slot_of, np.int32)))


def is_consumed(pool: ExpertBank) -> bool:
    """Whether a flush took the pool's memory, and so may have failed after that."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(pool))


def _pool(layout: ExpertLayout, num_slots: int, leaf: Callable, slot_of: Any) -> ExpertBank:
    leaves = [leaf((num_slots, *place.shape), place.dtype) for place in layout.places]
    return _bank(layout, leaves, slot_of)


def _bank(layout: ExpertLayout, leaves: Sequence[Any], slot_of: Any) -> ExpertBank:
    return ExpertBank(**jax.tree.unflatten(layout.structure, leaves), slot_of=slot_of)


@functools.cache
def _compiled(layout: ExpertLayout, num_slots: int, num_experts: int, count: int) -> Callable:
    on_device = functools.partial(jax.ShapeDtypeStruct, sharding=_device())
    pool = _pool(layout, num_slots, on_device, on_device((num_experts,), jnp.int32))
    records = (on_device((layout.items,), layout.dtype),) * count
    indices = on_device((count + num_experts,), jnp.int32)
    scatter = jax.jit(functools.partial(_scatter, layout), donate_argnums=0)
    return scatter.lower(pool, records, indices).compile()


def _scatter(
    layout: ExpertLayout,
    pool: ExpertBank,
    records: tuple[Record, ...],
    indices: Int[Array, "slots_and_table"],
) -> ExpertBank:
    slots, slot_of = indices[: len(records)], indices[len(records) :]
    # One scatter a leaf: for a GPU, XLA fuses the stacking into it, and nothing is copied twice.
    leaves = [
        leaf.at[slots].set(jnp.stack(new), mode="drop", unique_indices=True)
        for leaf, new in zip(jax.tree.leaves(bank_weights(pool)), zip(*map(layout.unpack, records)))
    ]
    return _bank(layout, leaves, slot_of)


@functools.cache
def _device() -> jax.sharding.Sharding:
    # With its memory named: from pinned memory a device alone is no destination.
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")


def _to_device(arrays: Any) -> Any:
    return jax.device_put(arrays, _device())
