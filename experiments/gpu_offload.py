"""The section of `experiments.gpu_check` that runs layers whose experts are in host memory.

Four layers of a published target, with the runner of decoding: its pinned records, residency tables
and transfers, selection, and the layers' programs but for attention, which no transfer overlaps.
The host reads which experts a layer uses when the layer before is done, as in decoding.

Random weights route nearly evenly, so the routers' logits are a seeded trace: the sum of three
float32 normals, of the standard deviations 0.5 for the expert in its layer, for good; 1 for the
expert in its layer and verification, correlated by 0.55 from one verification to the next; 0.87 for
the row besides. Selection prunes by the real residency. With 48 slots this gives, a layer and
verification, against (published):

                            Qwen3-30B-A3B              GPT-OSS-120B
    Standard SD   used      60  (52 to 72)             41
                  loads     28  (24.4, Coder 20.6)     16  (12.0)
    AcceptMoE     used      26  (23 to 34)             17
                  loads     6.3 (6.4, Coder 4.7)       3.6 (2.9)

`hidden` is the share of the transfers' time by which a verification is shorter than its transfers
alone and the rest alone, one after the other.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from acceptmoe_jax.models.published import Published
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.offload.host_store import HostStore
from acceptmoe_jax.offload.loads import Loads
from acceptmoe_jax.offload.transfers import with_slots
from acceptmoe_jax.runtime import abstract, layerwise, stages
from acceptmoe_jax.runtime.layer_forward import read_told
from acceptmoe_jax.runtime.offloaded import OffloadedRunner
from acceptmoe_jax.runtime.random_weights import random_weights
from acceptmoe_jax.runtime.state import Setup, Weights, empty_state
from acceptmoe_jax.selection import Commitment, SelectorConfig
from experiments import gpu_steps
from experiments.gpu_plan import Item, Plan, Row
from pallas_kernels.implementations import Implementations, implementations
from pallas_kernels.masked_expert_gemm import ExpertBank

COLUMNS = {
    "target": "",
    "kernels": "",
    "method": "",
    "used": ".1f",
    "hit_rate": ".1%",
    "waves": ".2f",
    "megabytes": ".1f",
    "milliseconds": ".2f",
    "transfer_milliseconds": ".2f",
    "compute_milliseconds": ".2f",
    "gigabytes_per_second": ".1f",
    "wait_share": ".0%",
    "hidden": ".0%",
    "error": "",
}
LAYERS, SLOTS = 4, 48
_DTYPE = jnp.bfloat16
_METHODS = ("native", "acceptmoe")
# Of the trace: see above.
_OF_LAYER, _OF_VERIFICATION, _OF_ROW = 0.5, 1.0, 0.87
_CORRELATION = 0.55
# What makes the published accepted length of 4.39.
PHAT = (1.0, 0.87, 0.77, 0.66, 0.58, 0.51)
# Verifications that fill the slots and do not count, and that count.
FILLING, COUNTED = 8, 32


def offload(plan: Plan) -> Iterator[Item]:
    """Both methods on the trace of each target, with the device's kernels."""
    use = implementations()
    filling, counted = (1, 2) if plan.rehearsal else (FILLING, COUNTED)
    for published in gpu_steps.targets(plan):
        runner = functools.cache(functools.partial(_runner, published, use))
        for method in _METHODS:
            labels = {"target": published.name, "kernels": use.experts, "method": method}
            measure = functools.partial(_method_rows, runner, method, filling, counted)
            yield Item(labels, measure)


def _runner(published: Published, use: Implementations) -> OffloadedRunner:
    """With random experts in pinned memory. Attention does not run: it has no numbers."""
    setup = abstract.with_layers(abstract.published_setup(published, use), LAYERS)
    weights = abstract.abstract_weights(setup, _DTYPE, mxfp4=published.mxfp4)
    store = HostStore.from_banks(random_weights(Weights({}, weights.banks)).banks)
    return OffloadedRunner(setup, weights.replace(banks=()), store, OffloadConfig(SLOTS))


def logits_trace(
    setup: Setup, verifications: int, seed: int = 0
) -> Float[np.ndarray, "verifications L T E"]:
    """The routers' logits."""
    rng = np.random.default_rng(seed)
    layers, experts = setup.target.num_layers, setup.target.num_experts
    drawn = rng.standard_normal((verifications, layers, 1, experts))
    context = drawn[:1]
    for fresh in drawn[1:]:
        following = _CORRELATION * context[-1] + np.sqrt(1 - _CORRELATION**2) * fresh
        context = np.concatenate([context, following[None]])
    of_layer = rng.standard_normal((layers, 1, experts))
    of_row = rng.standard_normal((verifications, layers, setup.tree.nodes, experts))
    logits = _OF_LAYER * of_layer + _OF_VERIFICATION * context + _OF_ROW * of_row
    return logits.astype(np.float32)


def _method_rows(
    make_runner: Callable[[], OffloadedRunner], method: str, filling: int, counted: int
) -> list[Row]:
    """A pass over the trace that compiles and is recorded, and three that are timed."""
    runner = make_runner()
    target = runner.setup.target
    selector = runner.setup.native()
    if method != "native":
        selector = dataclasses.replace(selector, policy=method)
    layers = _Layers(runner, selector, logits_trace(runner.setup, filling + counted))

    def timed(verify: Callable[[int], None]) -> tuple[float, Loads]:
        """(seconds, loads) of the verifications that count."""
        runner.begin_request()
        for index in range(filling):
            verify(index)
        before, begin = runner.loads, time.perf_counter()
        for index in range(filling, filling + counted):
            verify(index)
        return time.perf_counter() - begin, runner.loads - before

    timed(layers.record)
    seconds, loads = timed(layers.verify)
    transferring, _ = timed(layers.transfer)
    layers.prepare_compute()
    computing, _ = timed(layers.compute)
    of_layers = counted * target.num_layers
    return [
        {
            "verifications": counted,
            "layers": target.num_layers,
            "experts": target.num_experts,
            "slots": SLOTS,
            "used": (loads.table.hits + loads.table.misses) / of_layers,
            "loads": loads.table.loads / of_layers,
            "hit_rate": loads.table.hit_rate,
            "waves": loads.table.waves / of_layers,
            "megabytes": 1e-6 * loads.traffic.bytes / counted,
            "milliseconds": 1e3 * seconds / counted,
            "transfer_milliseconds": 1e3 * transferring / counted,
            "compute_milliseconds": 1e3 * computing / counted,
            "gigabytes_per_second": 1e-9 * loads.traffic.bytes / transferring,
            "wait_share": loads.traffic.wait_seconds / seconds,
            "hidden": (transferring + computing - seconds) / transferring,
        }
    ]


@dataclasses.dataclass(frozen=True)
class _Part:
    """Experts of a layer that are computed together, in which slots, and whether none follow."""

    experts: Sequence[int]
    slot_of: np.ndarray
    last: bool


@dataclasses.dataclass(frozen=True)
class _Record:
    """What a layer did in a verification: the residency it began with, and its parts."""

    resident: np.ndarray
    experts: list[int]
    parts: list[_Part] = dataclasses.field(default_factory=list)


class _Layers:
    """The layers of the verifications of a trace, one after the other, whole and in part."""

    def __init__(self, runner: OffloadedRunner, selector: SelectorConfig, logits: np.ndarray):
        setup = runner.setup
        self._runner = runner
        self._logits = [list(map(jnp.asarray, layers)) for layers in logits]
        self._x = jax.random.normal(
            jax.random.key(0), (setup.tree.nodes, setup.target.hidden_size), _DTYPE
        )
        state = empty_state(setup, setup.spare_rows, _DTYPE)
        block = stages.tree_block(state, gpu_steps.random_tree(setup))
        self._route = jax.jit(
            functools.partial(_route, setup, selector, block, Commitment(jnp.array(PHAT)))
        )
        self._records: dict[tuple[int, int], _Record] = {}  # (verification, layer)
        self._pools: dict[int, ExpertBank] = {}  # of each layer, as `transfer` leaves it
        self._banks: dict[tuple[int, int], list[ExpertBank]] = {}  # one a part

    def record(self, index: int) -> None:
        """`verify`, which compiles, and is what the others repeat."""
        tables = self._runner.tables

        def begins(layer: int, resident: np.ndarray, experts: list[int]) -> None:
            self._records[index, layer] = _Record(resident, experts)

        def computes(layer: int, experts: Sequence[int], last: bool) -> None:
            part = _Part(experts, tables[layer].slot_of, last)
            self._records[index, layer].parts.append(part)

        self._verify(index, begins, computes)

    def verify(self, index: int) -> None:
        """Everything."""
        self._verify(index, lambda *_: None, lambda *_: None)

    def transfer(self, index: int) -> None:
        """The loads alone, into the slots; each layer begins when the one before is done."""
        for layer in self._runner.tables:

            def compute(experts: Sequence[int], bank: ExpertBank, *, last: bool) -> None:
                self._pools[layer] = bank

            self._runner.load(layer, self._records[index, layer].experts, compute)
            jax.block_until_ready(self._pools[layer])

    def prepare_compute(self) -> None:
        """For `compute`, after the last `transfer`: what is in memory by then takes no time."""
        self._banks = {
            (index, layer): [with_slots(self._pools[layer], part.slot_of) for part in record.parts]
            for (index, layer), record in self._records.items()
        }

    def compute(self, index: int) -> None:
        """Selection and experts alone: the same slots, whichever experts are in them by now."""
        x = self._x
        for place, layer in enumerate(self._runner.tables):
            record = self._records[index, layer]
            routed = self._route(self._logits[index][place], x, record.resident)
            read_told(routed.told)
            x = None
            for part, bank in zip(record.parts, self._banks[index, layer], strict=True):
                x = self._experts(x, routed, bank, part.last)
        jax.block_until_ready(x)

    def _verify(self, index: int, begins: Callable, computes: Callable) -> None:
        x = self._x
        for place, (layer, table) in enumerate(self._runner.tables.items()):
            resident = table.resident
            routed = self._route(self._logits[index][place], x, resident)
            told = read_told(routed.told)
            experts = told[: told[-1]].tolist()
            begins(layer, resident, experts)
            x = None

            def compute(part: Sequence[int], bank: ExpertBank, *, last: bool) -> None:
                nonlocal x
                computes(layer, part, last)
                x = self._experts(x, routed, bank, last)

            self._runner.load(layer, experts, compute)
        jax.block_until_ready(x)

    def _experts(self, picked, routed, bank: ExpertBank, last: bool):
        return self._runner.compiled.run(
            (last, picked is None),
            functools.partial(layerwise.run_experts, self._runner.setup, last),
            picked,
            routed,
            bank,
            donate=() if last or picked is None else (0,),
        )


def _route(
    setup: Setup,
    selector: SelectorConfig,
    block: stages.Block,
    commitment: Commitment,
    logits: Float[Array, "T E"],
    x: Float[Array, "T D"],
    resident: np.ndarray,
):
    """`layerwise.route` without attention, and with these logits."""
    chosen, counts = stages.choose_experts(setup, selector, block, commitment, logits, resident)
    wide = x.astype(jnp.float32)
    h = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True))
    return layerwise.Routed.of(x, h.astype(x.dtype), chosen, counts)
