"""Replays selection policies on recorded verifications, without the model.

The trees, router logits and accepted paths are the recorded run's; what a policy would have chosen
for them is computed by `selection.select` itself, so the policy that was recorded gives its own
sets again. Another policy is judged on the blocks of the recorded run, not on those that it would
have come to by itself. With slots, each layer's LRU residency is carried from one verification to
the next, as pruning reads it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax import selection
from acceptmoe_jax.selection import Commitment, SelectorConfig
from acceptmoe_jax.traces import lru
from acceptmoe_jax.traces.format import Verifications
from acceptmoe_jax.traces.reader import Trace
from acceptmoe_jax.traces.statistics import committed

_CHUNK = 32  # verifications a program; the last ones are padded, so that one is compiled
_GROUP = 4 * _CHUNK  # verifications of which whole requests are read before they are replayed


@struct.dataclass
class Blocks:
    """What a replay reads of `Verifications`.

    Attributes:
      first: verifications that begin a request, with no expert on the device; read with slots.
    """

    logits: Float[Array, "N L T E"]
    depth: Int[Array, "N T"]
    score: Float[Array, "N T"]
    valid: Bool[Array, "N T"]
    path: Int[Array, "N n+1"]
    length: Int[Array, "N"]
    first: Bool[Array, "N"]

    @classmethod
    def of(cls, verifications: Verifications, first: bool = False) -> "Blocks":
        """Of one request's; `first` says whether it begins with no expert on the device."""
        begins = np.arange(len(verifications)) == 0
        names = [field.name for field in dataclasses.fields(cls) if field.name != "first"]
        return cls(**{n: getattr(verifications, n) for n in names}, first=begins & first)


@struct.dataclass
class ReplayResult:
    """What a policy makes of each verification and layer; the first fields are counts.

    Attributes:
      natural_union: experts that at least one node routes to naturally.
      before_pruning, eligible, used: |S|, |S'| and the experts that live picks go to.
      rerouting_budget: natural assignments outside S.
      displaced: natural assignments outside S'.
      path_picks, path_picks_kept: (row, expert) pairs of natural routing on the accepted rows, and
        those whose expert is in S'.
      path_experts, path_experts_kept: distinct experts among those pairs, and those in S'.
      hits, misses, waves: on the unique used experts; None without slots.
      eligible_set, used_set: S' and the used experts themselves, where they were asked for.
      recency: of each layer after the last verification (see `lru.empty`); None without slots.
    """

    natural_union: Int[Array, "N L"]
    before_pruning: Int[Array, "N L"]
    eligible: Int[Array, "N L"]
    used: Int[Array, "N L"]
    rerouting_budget: Int[Array, "N L"]
    displaced: Int[Array, "N L"]
    path_picks: Int[Array, "N L"]
    path_picks_kept: Int[Array, "N L"]
    path_experts: Int[Array, "N L"]
    path_experts_kept: Int[Array, "N L"]
    hits: Int[Array, "N L"] | None = None
    misses: Int[Array, "N L"] | None = None
    waves: Int[Array, "N L"] | None = None
    eligible_set: Bool[Array, "N L E"] | None = None
    used_set: Bool[Array, "N L E"] | None = None
    recency: Int[Array, "L E"] | None = None

    @property
    def recall(self) -> float | None:
        """Share of the accepted rows' natural picks whose expert is in S'; None of no picks."""
        return _share(self.path_picks_kept, self.path_picks)

    @property
    def set_recall(self) -> float | None:
        """Share of the accepted path's distinct natural experts that are in S'."""
        return _share(self.path_experts_kept, self.path_experts)

    @property
    def hit_rate(self) -> float | None:
        """`hits / (hits + misses)`; None if nothing was used or without slots."""
        return None if self.hits is None else _share(self.hits, self.hits + self.misses)

    def traffic(self, expert_bytes: int) -> int | None:
        """Bytes that the misses move; None without slots."""
        return (
            None if self.misses is None else int(np.sum(self.misses, dtype=np.int64)) * expert_bytes
        )


def replay_blocks(
    blocks: Blocks,
    commitment: Commitment,
    recency: Int[Array, "L E"] | None = None,
    *,
    config: SelectorConfig,
    slots: int | None = None,
    sets: bool = False,
) -> ReplayResult:
    """All layers of consecutive verifications at once; pure and jittable, the rest is static.

    Args:
      blocks: verifications in their order. One without a valid node uses no expert and leaves the
        residency as it is.
      commitment: what nodes are weighed by.
      recency: of each layer before the first verification, with slots.
      config: the policy.
      slots: C, experts a layer on the device; None where all of them are.
      sets: return the sets themselves too.
    """
    layer = functools.partial(_layer, config=config, slots=slots, sets=sets)
    # Over L: the logits and the recency have it, a block's tree is every layer's.
    layers = jax.vmap(layer, in_axes=(0, None, None, 0 if slots is not None else None))
    if slots is None:
        results, _ = jax.vmap(layers, in_axes=(0, 0, None, None))(
            blocks.logits, blocks, commitment, None
        )
        return results

    def step(recency, block):
        recency = jnp.where(block.first, lru.empty(recency.shape[-1]), recency)
        results, recency = layers(block.logits, block, commitment, recency)
        return recency, results

    recency, results = jax.lax.scan(step, recency, blocks)
    return results.replace(recency=recency)


def replay(
    verifications: Verifications,
    commitment: Commitment,
    config: SelectorConfig,
    slots: int | None = None,
    *,
    recency: Int[Array, "L E"] | None = None,
    sets: bool = False,
) -> ReplayResult:
    """What a policy makes of one request; arrays of NumPy.

    Args:
      verifications: of the request.
      commitment: what nodes are weighed by: `TraceSettings.commitment()`, or that of another
        `CommitmentTable`.
      config: the policy.
      slots: C, experts a layer on the device; None where all of them are.
      recency: of each layer where the request begins: `ReplayResult.recency` of the one before if
        residency is kept; by default no expert is on the device.
      sets: return the sets themselves too.

    Raises:
      ValueError: if there are not between 1 and E slots, or the layers have fewer experts than
        the config needs.
    """
    return _in_chunks(Blocks.of(verifications), commitment, recency, config, slots, sets)


def replay_trace(
    trace: Trace,
    commitment: Commitment,
    config: SelectorConfig,
    slots: int | None = None,
    *,
    keep_residency: bool = False,
    sets: bool = False,
) -> Iterator[ReplayResult]:
    """What a policy makes of every request of a trace, in its order; reads a few at a time.

    Args:
      trace: the recorded requests.
      keep_residency: a request begins with the experts that the one before left.
      commitment, config, slots, sets: see `replay`.

    Yields:
      The result of each request. Its `recency` is None.

    Raises:
      ValueError: as `replay`.
      UserError: naming a damaged file of the trace.
    """
    recency = None
    for group in _groups(trace):
        blocks = [Blocks.of(verifications, not keep_residency) for verifications in group]
        result = _in_chunks(_concatenate(blocks), commitment, recency, config, slots, sets)
        recency, result = result.recency, result.replace(recency=None)
        ends = list(itertools.accumulate(len(verifications) for verifications in group))
        for begin, end in zip([0, *ends], ends):
            yield jax.tree.map(lambda array: array[begin:end], result)


def _layer(logits, block, commitment, recency, *, config, slots, sets):
    """One layer and verification: its result, and the recency after it."""
    num_experts = logits.shape[-1]
    resident = None if slots is None else lru.resident(recency)
    path_phat = None
    if config.weighs_paths:
        path_phat = selection.node_commitment(commitment, block.depth, block.score)
    chosen = selection.select(
        logits,
        block.depth,
        block.valid,
        commitment.phat,
        resident,
        config=config,
        path_phat=path_phat,
    )
    used = jnp.zeros(num_experts, bool).at[chosen.used_ids].set(True, mode="drop")
    on_path = committed(block.path, block.length, block.valid)
    accepted_TE = selection.selected_experts(chosen.natural_ids, on_path, num_experts)
    accepted = accepted_TE.any(axis=0)
    loads = {}
    if slots is not None:
        recency, counts = lru.load(recency, used, slots)
        loads = {name: getattr(counts, name) for name in ("hits", "misses", "waves")}
    kept_sets = {"eligible_set": chosen.eligible, "used_set": used} if sets else {}
    result = ReplayResult(
        natural_union=_count(chosen.assignments > 0),
        before_pruning=_count(chosen.eligible_before_pruning),
        eligible=_count(chosen.eligible),
        used=chosen.used_count,
        rerouting_budget=chosen.rerouting_budget,
        displaced=selection.displaced_assignments(chosen.eligible, chosen.assignments),
        path_picks=_count(accepted_TE),
        path_picks_kept=_count(accepted_TE & chosen.eligible),
        path_experts=_count(accepted),
        path_experts_kept=_count(accepted & chosen.eligible),
        **loads,
        **kept_sets,
    )
    return result, recency


def _count(mask: Bool[Array, "..."]) -> Int[Array, ""]:
    return mask.sum(dtype=jnp.int32)


_replay_blocks = jax.jit(replay_blocks, static_argnames=("config", "slots", "sets"))


def _in_chunks(blocks, commitment, recency, config, slots, sets) -> ReplayResult:
    total, num_layers, _, num_experts = blocks.logits.shape
    config.check_experts(num_experts)
    if slots is not None:
        if not 1 <= slots <= num_experts:
            raise ValueError(f"slots must lie between 1 and {num_experts} experts, got {slots}")
        if recency is None:
            recency = np.full((num_layers, num_experts), num_experts, np.int32)
    parts = []
    for begin in range(0, max(total, 1), _CHUNK):
        chunk = jax.tree.map(lambda array: _padded(array[begin : begin + _CHUNK]), blocks)
        part = _replay_blocks(chunk, commitment, recency, config=config, slots=slots, sets=sets)
        recency = part.recency
        parts.append(jax.device_get(part.replace(recency=None)))
    joined = jax.tree.map(lambda *arrays: np.concatenate(arrays)[:total], *parts)
    return joined.replace(recency=None if recency is None else np.asarray(recency))


def _padded(array: np.ndarray) -> np.ndarray:
    """`_CHUNK` verifications; those added have no valid node, and so no part in anything."""
    return np.concatenate([array, np.zeros((_CHUNK - len(array), *array.shape[1:]), array.dtype)])


def _concatenate(blocks: Sequence[Blocks]) -> Blocks:
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *blocks)


def _groups(trace: Trace) -> Iterator[list[Verifications]]:
    group: list[Verifications] = []
    for _, verifications in trace.requests():
        group.append(verifications)
        if sum(map(len, group)) >= _GROUP:
            yield group
            group = []
    if group:
        yield group


def _share(part, whole) -> float | None:
    total = _total(whole)
    return _total(part) / total if total else None


def _total(counts) -> int:
    return int(np.sum(counts, dtype=np.int64))
