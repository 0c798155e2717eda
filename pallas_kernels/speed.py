"""How fast each op's implementations are: one layer's time at a named shape.

The time of the experts is measured over a range of set sizes; the other ops have no such size.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from acceptmoe_jax.selection import SelectionResult
from pallas_kernels.devices import Device
from pallas_kernels.masked_expert_gemm import cases as expert_cases
from pallas_kernels.measure import layered_seconds, layers_past_cache
from pallas_kernels.ops import OPS

Row = dict[str, Any]

DENSE = "dense"
COLUMNS = {
    "op": "",
    "shape": "",
    "dtype": "",
    "implementation": "",
    "used": "d",
    "microseconds": ".1f",
    "megabytes": ".2f",
    "floor_microseconds": ".1f",
    "share_of_bandwidth": ".0%",
    "ratio_to_first": ".2f",
    "error": "",
}


@dataclasses.dataclass(frozen=True)
class Load:
    """What an op works on, in each of several layers.

    Attributes:
      used: experts that the rows use; None for an op that runs none.
      layers: the op's arguments in each layer.
      bytes, flops: of a layer, as in `KernelCase`.
    """

    used: int | None
    layers: tuple[tuple, ...]
    bytes: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Bench:
    """An op at one shape, and what it is measured on."""

    op: str
    shape: str
    dtype: str
    loads: tuple[Load, ...]

    def function(self, implementation: str, interpret: bool = False) -> Callable[..., Any]:
        """The op by one of its implementations, of the arguments of a layer."""
        op = OPS[self.op]
        shape = op.shapes[self.shape]
        if implementation == DENSE:
            return functools.partial(_dense, activation=shape.activation)
        run = functools.partial(
            op.function(shape), implementation=implementation, interpret=interpret
        )
        return _what_a_step_takes(run) if self.op == "commitment_select" else run


def plain(op: str, dtype: str) -> tuple[str, ...]:
    """What plain XLA has to offer for an op, beside its reference.

    For experts that is a loop over the used ones and, unless they are packed, `DENSE`: every
    expert on every row, whatever the set.
    """
    dense = op == "masked_expert_gemm" and dtype != expert_cases.PACKED
    return (OPS[op].plain, *([DENSE] if dense else []))


def bench(op: str, shape: str, dtype: str | None = None, sizes: Sequence[int] = ()) -> Bench:
    """Makes the operands of an op at a named shape.

    Args:
      dtype: the shape's own by default.
      sizes: numbers of used experts, which masked_expert_gemm alone takes; the shape's own by
        default.

    Raises:
      ValueError: if the shape cannot use so many experts.
    """
    which, named = OPS[op], OPS[op].shapes[shape]
    dtype = dtype or which.dtypes(named)[0]
    if op == "masked_expert_gemm":
        return Bench(op, shape, dtype, _expert_loads(named, dtype, sizes or (named.used,)))
    size = which.bytes(named, dtype)
    keys = jax.random.split(jax.random.key(0), layers_past_cache(size))
    layers = tuple(which.arguments(key, named, dtype) for key in keys)
    return Bench(op, shape, dtype, (Load(None, layers, size, which.flops(named)),))


def _expert_loads(
    shape: expert_cases.ExpertShape, dtype: str, sizes: Sequence[int]
) -> tuple[Load, ...]:
    """One bank a layer, which all set sizes share."""
    count = layers_past_cache(expert_cases.moved_bytes(shape, dtype, min(sizes)))
    rows_and_banks = [
        expert_cases.random_arguments(key, shape, dtype)[:2]
        for key in jax.random.split(jax.random.key(0), count)
    ]
    return tuple(
        Load(
            used=used,
            layers=tuple(
                (*operands, *expert_cases.routing(shape, used, seed=layer))
                for layer, operands in enumerate(rows_and_banks)
            ),
            bytes=expert_cases.moved_bytes(shape, dtype, used),
            flops=expert_cases.product_flops(shape),
        )
        for used in sizes
    )


def _what_a_step_takes(select: Callable[..., SelectionResult]) -> Callable[..., tuple]:
    """Without the results that only a test reads: each is one more buffer to hand out."""

    def run(*arguments):
        chosen = select(*arguments)
        return (
            chosen.expert_ids,
            chosen.weights,
            chosen.used_ids,
            chosen.used_count,
            chosen.assignments,
            chosen.eligible,
        )

    return run


def _dense(x_TD, bank, expert_ids_Tk, weights_Tk, used_ids_E, used_count, *, activation):
    """masked_expert_gemm with every slot on every row, weights that are not picked at zero."""
    del used_ids_E, used_count
    rows = jnp.arange(x_TD.shape[0])[:, None]
    weights_TC = jnp.zeros((x_TD.shape[0], bank.num_slots), x_TD.dtype)
    weights_TC = weights_TC.at[rows, bank.slot_of[expert_ids_Tk]].set(weights_Tk.astype(x_TD.dtype))
    gate = jnp.einsum("td,cfd->ctf", x_TD, bank.gate)
    up = jnp.einsum("td,cfd->ctf", x_TD, bank.up)
    if bank.gate_bias is not None:
        gate, up = gate + bank.gate_bias[:, None], up + bank.up_bias[:, None]
    y_TD = jnp.einsum("tc,ctf,cdf->td", weights_TC, activation(gate, up), bank.down)
    return y_TD if bank.down_bias is None else y_TD + weights_TC @ bank.down_bias


def speed_rows(
    measured: Bench,
    implementations: Sequence[str],
    rounds: int,
    device: Device | None,
    *,
    interpret: bool = False,
    on_visit: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Measures the implementations side by side; a row for each of them and each load.

    Args:
      rounds: see `median_seconds`.
      device: whose data sheet gives the floors; None knows none.
      on_visit: called `rounds + 1` times a row.
    """
    functions = {name: measured.function(name, interpret) for name in implementations}
    variants = {
        (load.used, name): (function, load.layers)
        for load in measured.loads
        for name, function in functions.items()
    }
    seconds, errors = layered_seconds(variants, rounds, on_visit)
    rows = []
    for load in measured.loads:
        first = seconds.get((load.used, implementations[0]))
        for name in implementations:
            taken = seconds.get((load.used, name))
            rows.append(
                {
                    "op": measured.op,
                    "shape": measured.shape,
                    "dtype": measured.dtype,
                    "implementation": name,
                    "used": load.used,
                    "layers_in_turn": len(load.layers),
                    **_figures(load, taken, first, device),
                    "error": errors.get((load.used, name)),
                }
            )
    return rows


def _figures(
    load: Load, seconds: float | None, first: float | None, device: Device | None
) -> dict[str, float | None]:
    floor = None if device is None else device.floor_seconds(load.bytes, load.flops)
    share = None
    if seconds is not None and device is not None:
        share = load.bytes / seconds / device.memory_bandwidth
    return {
        "microseconds": None if seconds is None else 1e6 * seconds,
        "megabytes": load.bytes / 1e6,
        "floor_microseconds": None if floor is None else 1e6 * floor,
        "share_of_bandwidth": share,
        "ratio_to_first": None if None in (seconds, first) else seconds / first,
    }
