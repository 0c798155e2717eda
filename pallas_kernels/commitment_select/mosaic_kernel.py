"""The Mosaic GPU kernel of commitment_select: one warpgroup a block.

Its layouts: in a tile of 32 rows by all experts a thread holds a quarter of one row, so that most
of a reduction over experts stays in the thread; a vector [E] is spread over the threads. From one
to the other, and where experts are compared with experts, vectors go through shared memory.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from acceptmoe_jax import selection
from acceptmoe_jax.selection.demand import CEIL_SLACK, MASS_SLACK
from pallas_kernels import mosaic_helpers as helpers
from pallas_kernels.commitment_select.arithmetic import (
    LOWEST_KEY,
    float_of_key,
    power,
    sort_keys,
)

ROWS = 32
# A warp has 8 of the rows, and 4 of its threads divide the columns of one in pairs.
_TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
_ROWS = _TILE.reduce(1)
_COLUMNS = _TILE.reduce(0)


def kernel(refs, out, scratch, *, config, num_experts):
    """Writes all of `out`.

    Args:
      refs: logits, -inf where they are padding, depth, valid, phat, resident, override and
        path_phat; masks are int8, rows whole tiles, and the last three refs may be None.
      out: a `SelectionResult` of refs, masks being int8.
      scratch: [E] of float32 and [E] of int32 in shared memory.
      num_experts: how many of the E are no padding.
    """
    logits_ref, _, _, _, resident_ref, override_ref, _ = refs
    experts = _Experts(logits_ref.shape[1], *scratch)
    blocks = [_Block(first, refs, experts) for first in range(0, logits_ref.shape[0], ROWS)]

    demand = scores = weighed = experts.full(0.0)
    assignments = roots = experts.full(0)
    for block in blocks:
        logits = block.logits()
        block.route(logits, out.natural_ids, config.top_k)
        parts = jnp.exp(logits - _over_rows(block.best[0], logits.shape))
        block.total = parts.sum(axis=1)
        alpha = _commitment_weights(block, blocks, config)
        plgpu.store(block.of(out.alpha), alpha, optimized=False)
        selected = block.taken & _over_rows(block.valid, logits.shape)
        possible = logits != -jnp.inf
        shares = parts * _over_rows(alpha / block.total, logits.shape)
        demand += experts.sum(jnp.where(selected & possible, shares, 0.0))
        assignments += experts.sum(jnp.where(selected, 1, 0))
        if config.weighs_paths:
            weighed += experts.sum(jnp.where(selected, _over_rows(alpha, logits.shape), 0.0))
        if config.anchor and block.first == 0:
            roots = experts.sum(jnp.where(selected & (experts.row == 0), 1, 0))
        if config.policy == "moe_spec":
            counted = possible & _over_rows(block.valid, logits.shape)
            probabilities = parts * _over_rows(1.0 / block.total, logits.shape)
            scores += experts.sum(jnp.where(counted, probabilities, 0.0))

    anchor = roots > 0
    q = selection.residual_distribution(demand, anchor)
    entropy = selection.entropy(q)
    size = _residual_size(experts, q, entropy, config)
    before = _policy_set(experts, scores, q, anchor, size, config)
    admitted = pruned = experts.full(0) > 0
    if resident_ref is not None and config.admits:
        outside = (experts.load(resident_ref) != 0) & ~before & (demand > 0)
        rank = experts.descending_rank(jnp.where(outside, demand, 0.0))
        admitted = outside & (rank < config.admit)
    with_admitted = before | admitted
    if resident_ref is not None and config.prunes:
        removable = before & (experts.load(resident_ref) == 0)
        if config.protect_anchor:
            removable &= ~anchor
        # As `selection.displacement`.
        cost = weighed if config.weighs_paths else assignments
        spendable = selection.displaced_assignments(before, cost)
        spendable += selection.displaced_assignments(~admitted, cost)
        pruned = _pruned(experts, with_admitted, removable, demand, cost, spendable, config.top_k)
    eligible = with_admitted & ~pruned
    if override_ref is not None:
        eligible = experts.load(override_ref) != 0

    for ref, values in (
        (out.demand, demand),
        (out.assignments, assignments),
        (out.anchor, anchor),
        (out.eligible_before_pruning, before),
        (out.admitted, admitted),
        (out.pruned, pruned),
        (out.eligible, eligible),
    ):
        plgpu.store(ref, values.astype(ref.dtype), optimized=False)
    out.entropy[...] = entropy
    out.effective_rank_size[...] = size
    out.rerouting_budget[...] = selection.displaced_assignments(before, assignments)

    inside = experts.over_rows(jnp.where(eligible, 1, 0)) > 0
    uses = experts.full(0)
    for block in blocks:
        logits = block.logits()
        highest, total = block.best[0], block.total
        if config.policy == "native" and override_ref is None:
            block.store_picks(out.expert_ids, block.ids)
        else:
            # Truncation finds its natural picks again: kept from before they would not fit.
            routed = logits if config.truncates else jnp.where(inside, logits, -jnp.inf)
            block.route(routed, out.expert_ids, config.top_k)
        weights = _weights(block, highest, total, config.norm_topk_prob)
        if config.truncates:
            weights = _truncated(block, experts, weights, inside, config.renormalize_truncated)
        block.store_picks(out.weights, weights)
        live = block.taken & inside & (logits != -jnp.inf)
        live &= _over_rows(block.valid, logits.shape)
        uses += experts.sum(jnp.where(live, 1, 0))
    used = uses > 0
    plgpu.store(out.used_ids, _used_ids(experts, used, num_experts), optimized=False)
    out.used_count[...] = jnp.where(used, 1, 0).sum()


class _Experts:
    """The axis of experts: vectors along it, and tiles in which they are the columns."""

    def __init__(self, count, floats_ref, integers_ref):
        self.count = count
        self.tile_shape = (ROWS, count)
        self._vector = plgpu.Layout.WG_STRIDED((count,), vec_size=1)
        self._floats_ref, self._integers_ref = floats_ref, integers_ref
        self.row, self.column = (
            plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, self.tile_shape, axis), _TILE)
            for axis in (0, 1)
        )

    def full(self, value):
        return plgpu.layout_cast(jnp.full((self.count,), value), self._vector)

    def load(self, ref):
        return helpers.load(ref, self._vector)

    def sum(self, tile):
        """Over the rows of a tile."""
        return self.load(self._staged(tile.sum(axis=0)))

    def min(self, tile):
        return self.load(self._staged(tile.min(axis=0)))

    def over_rows(self, vector):
        """A tile with the vector in each row."""
        return self._over_rows(self._staged(vector))

    def pairs(self, *vectors):
        """All pairs of experts, in tiles whose rows are some of them and whose columns are all.

        Until the last tile nothing else may go through shared memory.

        Args:
          vectors: one of floats or integers, or one of each.

        Yields:
          The rows' indices, the vectors' values for the rows, and those for the columns.
        """
        refs = [self._staged(vector) for vector in vectors]
        columns = [self._over_rows(ref) for ref in refs]
        for first in range(0, self.count, ROWS):
            values = [helpers.load(ref.at[pl.ds(first, ROWS)], _ROWS) for ref in refs]
            rows = [_over_rows(value, self.tile_shape) for value in values]
            yield self.row + first, rows, columns

    def _staged(self, vector):
        ref = self._floats_ref if vector.dtype == jnp.float32 else self._integers_ref
        plgpu.store(ref, vector, optimized=False)
        return ref

    def _over_rows(self, ref):
        values = helpers.load(ref, _COLUMNS)
        tile = jax.lax.broadcast_in_dim(values, self.tile_shape, (1,))
        return plgpu.layout_cast(tile, _TILE)

    def descending_rank(self, values):
        rank = 0
        for index, (theirs,), (mine,) in self.pairs(values):
            ahead = (theirs > mine) | ((theirs == mine) & (index < self.column))
            rank += jnp.where(ahead, 1, 0)
        return self.sum(rank)


class _Block:
    """32 rows: what is read and written of them, and where they were last routed."""

    def __init__(self, first, refs, experts):
        self.first = first
        self._experts = experts
        self._logits_ref, self._depth_ref, self._valid_ref, self._phat_ref, *_, path_ref = refs
        self._path_phat_ref = path_ref
        self.depth = helpers.load(self.of(self._depth_ref), _ROWS)
        self.valid = helpers.load(self.of(self._valid_ref), _ROWS) != 0

    def of(self, ref, *columns):
        return ref.at[(pl.ds(self.first, ROWS), *columns)]

    def logits(self):
        return helpers.load(self.of(self._logits_ref), _TILE).astype(jnp.float32)

    def phat(self):
        """Of each row; beyond the table its last entry."""
        values = plgpu.layout_cast(jnp.full((ROWS,), self._phat_ref[0]), _ROWS)
        for depth in range(1, self._phat_ref.shape[0]):
            values = jnp.where(self.depth >= depth, self._phat_ref[depth], values)
        return values

    def path_phat(self):
        return helpers.load(self.of(self._path_phat_ref), _ROWS)

    def nodes_at(self, depth):
        """How many valid rows of this block have the depth of each row of another."""
        shape = (ROWS, ROWS)
        mine, valid = (
            helpers.load(self.of(ref), _COLUMNS) for ref in (self._depth_ref, self._valid_ref)
        )
        mine, valid = (
            plgpu.layout_cast(jax.lax.broadcast_in_dim(values, shape, (1,)), _TILE)
            for values in (mine, valid != 0)
        )
        return jnp.where((_over_rows(depth, shape) == mine) & valid, 1, 0).sum(axis=1)

    def store_picks(self, ref, columns):
        for rank, values in enumerate(columns):
            plgpu.store(self.of(ref, rank), values, optimized=False)

    def route(self, logits, ids_ref, top_k):
        """Finds each row's best experts, in the order of `jax.lax.top_k`, and writes their ids."""
        column = self._experts.column
        keys = sort_keys(logits)
        self.ids, self.best = [], []
        for _ in range(top_k):
            key = keys.max(axis=1)
            is_best = keys == _over_rows(key, keys.shape)
            index = jnp.where(is_best, column, keys.shape[1]).min(axis=1)
            keys = jnp.where(column == _over_rows(index, keys.shape), LOWEST_KEY, keys)
            self.ids.append(index)
            self.best.append(float_of_key(key))
        self.taken = keys == LOWEST_KEY
        self.store_picks(ids_ref, self.ids)


def _over_rows(values, shape):
    """A tile with each row's value in all its columns."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(values, shape, (0,)), _TILE)


def _commitment_weights(block, blocks, config):
    if config.uniform:
        return jnp.where(block.valid, 1.0, 0.0)
    if config.weighs_paths:
        return jnp.where(block.valid, power(block.path_phat(), config.beta), 0.0)
    nodes = sum(other.nodes_at(block.depth) for other in blocks)
    nodes = jnp.maximum(nodes, 1).astype(jnp.float32)
    weights = power(block.phat(), config.beta) / power(nodes, config.gamma)
    return jnp.where(block.valid, weights, 0.0)


def _residual_size(experts, q, entropy, config):
    demanded = jnp.where(q > 0, 1, 0).sum()
    if config.size_rule == "mass":
        ahead = 0.0
        for _, (rows, ranks), (_, mine) in experts.pairs(q, experts.descending_rank(q)):
            ahead += jnp.where(ranks < mine, rows, 0.0)
        ahead = experts.sum(ahead)
        size = jnp.where((q > 0) & (ahead < config.mass - MASS_SLACK), 1, 0).sum()
    elif config.size_rule == "participation_ratio":
        size = _ceil(1.0 / jnp.where(demanded > 0, (q * q).sum(), 1.0) - CEIL_SLACK)
    else:
        size = _ceil(jnp.exp(entropy) - CEIL_SLACK)
    return jnp.minimum(size, demanded)


def _ceil(value):
    """Of a positive number; Mosaic has no such operation."""
    whole = value.astype(jnp.int32)
    return whole + jnp.where(whole.astype(jnp.float32) < value, 1, 0)


def _policy_set(experts, scores, q, anchor, size, config):
    if config.policy == "native":
        return experts.full(0) == 0
    if config.policy == "moe_spec":
        return experts.descending_rank(scores) < config.budget
    if config.policy == "acceptmoe_fix":
        size = config.budget - config.top_k if config.anchor else config.budget
    rank = experts.descending_rank(q)
    chosen = anchor | ((rank < size) & (q > 0))
    return chosen if config.anchor else chosen | (rank < config.top_k)


def _pruned(experts, eligible, removable, demand, displacement, budget, top_k):
    """As `selection.prune`: the longest affordable prefix in ascending demand."""
    spent = count = 0
    # As bits, whose sign is the number's own: shared memory holds one vector of floats.
    cost = _as_dtype(jnp.where(removable, displacement, -1), jnp.int32)
    for index, (theirs, costs), (mine, _) in experts.pairs(demand, cost):
        first = (theirs < mine) | ((theirs == mine) & (index <= experts.column))
        first &= costs >= 0
        spent += jnp.where(first, _as_dtype(costs, displacement.dtype), 0)
        count += jnp.where(first, 1, 0)
    left = jnp.where(eligible, 1, 0).sum() - experts.sum(count)
    return removable & (experts.sum(spent) <= budget) & (left >= top_k)


def _as_dtype(values, dtype):
    """The same bits."""
    return values if values.dtype == dtype else jax.lax.bitcast_convert_type(values, dtype)


def _weights(block, highest, total, norm_topk_prob):
    """By rank, of the experts that the rows were last routed to."""
    if norm_topk_prob:
        highest = block.best[0]
        total = sum(jnp.exp(best - highest) for best in block.best)
    return [
        jnp.where(best != -jnp.inf, jnp.exp(best - highest) / total, 0.0) for best in block.best
    ]


def _truncated(block, experts, weights, inside, renormalize):
    left = []
    for ids, weight in zip(block.ids, weights):
        is_pick = experts.column == _over_rows(ids, experts.tile_shape)
        kept = jnp.where(is_pick & inside, 1, 0).max(axis=1) > 0
        left.append(jnp.where(kept, weight, 0.0))
    if renormalize:
        share = sum(left)
        scale = sum(weights) / jnp.where(share > 0, share, 1.0)
        left = [weight * scale for weight in left]
    return left


def _used_ids(experts, used, nothing):
    """Entry p is the used expert with p used ones before it, or `nothing` behind the last."""
    before = 0
    for index, (rows,), _ in experts.pairs(jnp.where(used, 1, 0)):
        before += jnp.where(index < experts.column, rows, 0)
    place = jnp.where(used, experts.sum(before), experts.count)
    ids = nothing
    for index, (places,), _ in experts.pairs(place):
        ids = jnp.minimum(ids, jnp.where(places == experts.column, index, nothing))
    return experts.min(ids)
