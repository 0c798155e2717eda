"""The sections of `experiments.gpu_check` that run single kernels, and copies from the host."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from experiments.gpu_plan import Item, Plan, Row
from pallas_kernels import speed
from pallas_kernels.devices import Device
from pallas_kernels.masked_expert_gemm import cases as expert_cases
from pallas_kernels.measure import device_of, median_seconds
from pallas_kernels.ops import OPS
from pallas_kernels.parity import parity_row

PARITY_COLUMNS = {
    "op": "",
    "shape": "",
    "dtype": "",
    "implementation": "",
    "largest_error": ".1e",
    "error_of_999_in_1000": ".1e",
    "tolerance": ".0e",
    "decisions_that_differ": "d",
    "within": "",
    "error": "",
}
TRANSFER_COLUMNS = {
    "what": "",
    "experts": "d",
    "megabytes": ".1f",
    "milliseconds": ".3f",
    "gigabytes_per_second": ".1f",
    "share_of_data_sheet": ".0%",
    "error": "",
}
OVERLAP_COLUMNS = {
    "shape": "",
    "experts": "d",
    "copy_milliseconds": ".3f",
    "compute_milliseconds": ".3f",
    "together_milliseconds": ".3f",
    "hidden": ".0%",
    "error": "",
}
_REAL_SHAPES = ("qwen3-30b-a3b", "gpt-oss-120b")
_SMALL_SHAPE = "awkward"
_WAVES = (1, 4, 16)  # experts copied at a time
_BUFFERS = 4  # so many waves take turns
_READ_BYTES = 2 << 30  # many times any L2


def _shapes(plan: Plan) -> tuple[str, ...]:
    return (_SMALL_SHAPE,) if plan.rehearsal else _REAL_SHAPES


# --- Parity and speed ---------------------------------------------------------------------------


def parity(plan: Plan, kernels: str) -> Iterator[Item]:
    """Every op, shape and dtype of one kind of kernel, real shapes first."""
    cases = [
        (op, shape, dtype)
        for op in OPS.values()
        for shape in ((_SMALL_SHAPE,) if plan.rehearsal else op.shapes)
        for dtype in op.dtypes(op.shapes[shape])[: 1 if plan.rehearsal else None]
    ]
    for op, shape, dtype in sorted(cases, key=lambda case: case[1] not in _REAL_SHAPES):
        for name in op.kernels(kernels):
            labels = {"op": op.name, "shape": shape, "dtype": dtype, "implementation": name}
            yield Item(labels, functools.partial(_parity_rows, labels, plan.rehearsal))


def _parity_rows(labels: Row, interpret: bool) -> list[Row]:
    return [parity_row(**labels, interpret=interpret)]


def kernel_speed(plan: Plan, kernels: str) -> Iterator[Item]:
    """One kind of kernel next to plain XLA, at the real shapes and all set sizes."""
    for op in OPS.values():
        for shape, named in op.shapes.items():
            if shape == _SMALL_SHAPE if plan.rehearsal else shape.startswith(_REAL_SHAPES):
                names = (*speed.plain(op.name, op.dtypes(named)[0]), *op.kernels(kernels))
                measure = functools.partial(_speed_rows, op.name, shape, names, plan)
                yield Item({"op": op.name, "shape": shape}, measure)


def _speed_rows(op: str, shape: str, names: tuple[str, ...], plan: Plan) -> list[Row]:
    bench = speed.bench(op, shape, sizes=plan.sizes)
    return speed.speed_rows(bench, names, plan.rounds, _device(), interpret=plan.rehearsal)


def _device() -> Device | None:
    return device_of(jax.devices()[0].device_kind)


# --- Copies -------------------------------------------------------------------------------------


def transfers(plan: Plan) -> Iterator[Item]:
    """What the memory and the link to the host yield, whatever the kernels do."""
    size = _READ_BYTES >> 10 if plan.rehearsal else _READ_BYTES
    yield Item({"what": "read by an XLA sum"}, functools.partial(_read_rows, size, plan.rounds))
    for shape in _shapes(plan):
        for experts in _WAVES:
            labels = {"what": f"pinned host to device, {shape}", "experts": experts}
            yield Item(labels, functools.partial(_copy_rows, shape, experts, plan.rounds))


def _read_rows(size: int, rounds: int) -> list[Row]:
    numbers = jnp.ones(size // 4, jnp.float32)
    seconds = median_seconds({"": functools.partial(jax.jit(jnp.sum), numbers)}, rounds)[""]
    return [_rates(size, seconds, "memory_bandwidth")]


def _copy_rows(shape: str, experts: int, rounds: int) -> list[Row]:
    copy, size = _wave(shape, experts)
    return [_rates(size, median_seconds({"": copy}, rounds)[""], "link_bandwidth")]


def _rates(size: int, seconds: float, data_sheet: str) -> Row:
    device = _device()
    return {
        "megabytes": size / 1e6,
        "milliseconds": 1e3 * seconds,
        "gigabytes_per_second": size / seconds / 1e9,
        "share_of_data_sheet": device and size / seconds / getattr(device, data_sheet),
    }


def _wave(name: str, experts: int) -> tuple[Callable[[], list[jax.Array]], int]:
    """(copies so many experts from pinned host memory, their bytes); each from a place of its own,
    all of them in one `device_put`."""
    shape = expert_cases.SHAPES[name]
    sizes = [expert_cases.moved_bytes(shape, shape.dtypes[0], used) for used in (0, 1)]
    expert = sizes[1] - sizes[0]
    (device,) = jax.devices()[:1]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    on_device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    bits = jax.random.bits(jax.random.key(0), (expert,), jnp.uint8)
    waves = itertools.cycle(
        [[jax.device_put(bits, pinned) for _ in range(experts)] for _ in range(_BUFFERS)]
    )
    return lambda: jax.device_put(next(waves), on_device), experts * expert


def overlap(plan: Plan) -> Iterator[Item]:
    """Copies of the next wave while the experts of this one run."""
    for shape in _shapes(plan):
        for experts in _WAVES:
            measure = functools.partial(_overlap_rows, shape, experts, plan)
            yield Item({"shape": shape, "experts": experts}, measure)


def _overlap_rows(shape: str, experts: int, plan: Plan) -> list[Row]:
    copy, _ = _wave(shape, experts)
    bench = speed.bench("masked_expert_gemm", shape)
    (load,) = bench.loads
    implementations = next(iter(plan.kernels.values()))
    layer = jax.jit(bench.function(implementations.experts, interpret=plan.rehearsal))
    alone = median_seconds({"copy": copy, "layer": lambda: layer(*load.layers[0])}, plan.rounds)
    # As many layers as take about as long as the copy: what can be hidden at best is all of it.
    repeats = math.ceil(alone["copy"] / alone["layer"])

    def compute():
        return [layer(*load.layers[at % len(load.layers)]) for at in range(repeats)]

    runs = {"copy": copy, "compute": compute, "together": lambda: (copy(), compute())}
    seconds = median_seconds(runs, plan.rounds)
    shorter = min(seconds["copy"], seconds["compute"])
    return [
        {f"{name}_milliseconds": 1e3 * taken for name, taken in seconds.items()}
        | {"hidden": (seconds["copy"] + seconds["compute"] - seconds["together"]) / shorter}
    ]
