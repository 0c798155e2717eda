"""commitment_select as one Pallas Triton program: a block's rows and experts stay in registers.

Tiles are powers of two, filled up with rows that are not valid and with experts of logit -inf. The
decisions are made by the functions of `acceptmoe_jax.selection` themselves, which run on vectors in
registers; only what gathers or sorts there is written anew here.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax import selection
from acceptmoe_jax.selection import SelectionResult, SelectorConfig
from pallas_kernels.commitment_select.arithmetic import (
    LOWEST_KEY,
    float_of_key,
    power,
    sort_keys,
)
from pallas_kernels.commitment_select.ref import reference

# Elements of a thread's share of the largest tile; a thread block has at most 16 warps.
_SHARE = 16
_MOST_WARPS = 16


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def triton(
    logits: Float[Array, "T E"],
    depth: Int[Array, "T"],
    valid: Bool[Array, "T"],
    phat: Float[Array, "P"],
    resident: Bool[Array, "E"] | None,
    eligible_override: Bool[Array, "E"] | None,
    path_phat: Float[Array, "T"] | None,
    config: SelectorConfig,
    interpret: bool,
) -> SelectionResult:
    """See `commitment_select`."""
    arguments = (logits, depth, valid, phat, resident, eligible_override, path_phat)
    rows, experts = (pl.next_power_of_2(size) for size in logits.shape)
    num_warps = max(rows, experts) * experts // (32 * _SHARE)
    return pl.pallas_call(
        functools.partial(_kernel, config=config),
        out_shape=jax.eval_shape(functools.partial(reference, config=config), *arguments),
        interpret=interpret,
        name="commitment_select",
        compiler_params=plgpu.CompilerParams(
            num_warps=min(max(num_warps, 1), _MOST_WARPS), num_stages=1
        ),
    )(*arguments)


def _kernel(
    logits_ref,
    depth_ref,
    valid_ref,
    phat_ref,
    resident_ref,
    override_ref,
    path_phat_ref,
    out,
    *,
    config,
):
    axes = _Axes(*logits_ref.shape, config.top_k)
    logits = axes.load_tile(logits_ref, -jnp.inf).astype(jnp.float32)
    valid = axes.load_rows(valid_ref, False)

    rank, highest = _top_k_rank(logits, axes.expert, config.top_k)
    axes.store_picks(out.natural_ids, rank, axes.expert_TE)
    selected = (rank < config.top_k) & valid[:, None]
    if config.uniform:
        alpha = valid.astype(jnp.float32)
    elif config.weighs_paths:
        alpha = jnp.where(valid, power(axes.load_rows(path_phat_ref, 0.0), config.beta), 0.0)
    else:
        depth = axes.load_rows(depth_ref, 0)
        phat = plgpu.load(phat_ref.at[jnp.clip(depth, 0, phat_ref.shape[0] - 1)])
        alpha = _commitment_weights(depth, valid, phat, config)
    demand = selection.expert_demand(logits, selected, alpha)
    assignments = selected.sum(axis=0, dtype=jnp.int32)
    anchor = jnp.zeros_like(axes.is_expert)
    if config.anchor:
        anchor = _any(selected & (axes.row == 0)[:, None])
    q = selection.residual_distribution(demand, anchor)
    size = selection.residual_size(q, config.size_rule, config.mass)
    before = axes.is_expert & selection.policy_set(logits, valid, q, anchor, size, config)
    admitted = pruned = jnp.zeros_like(before)
    resident = None if resident_ref is None else axes.load_experts(resident_ref, True)
    if resident is not None and config.admits:
        admitted = selection.admit(before, resident, demand, config.admit)
    with_admitted = before | admitted
    if resident is not None and config.prunes:
        removable = before & ~resident
        if config.protect_anchor:
            removable &= ~anchor
        cost = selection.displacement(selected, alpha, assignments, config)
        spendable = selection.displaced_assignments(before, cost)
        spendable += selection.displaced_assignments(~admitted, cost)
        pruned = selection.prune(with_admitted, removable, demand, cost, spendable, config.top_k)
    eligible = with_admitted & ~pruned
    if override_ref is not None:
        eligible = axes.load_experts(override_ref, False)

    axes.store_rows(out.alpha, alpha)
    axes.store_experts(out.demand, demand)
    axes.store_experts(out.assignments, assignments)
    axes.store_experts(out.anchor, anchor)
    out.entropy[...] = selection.entropy(q)
    out.effective_rank_size[...] = size
    axes.store_experts(out.eligible_before_pruning, before)
    out.rerouting_budget[...] = selection.displaced_assignments(before, assignments)
    axes.store_experts(out.admitted, admitted)
    axes.store_experts(out.pruned, pruned)
    axes.store_experts(out.eligible, eligible)

    routed, is_free = logits, override_ref is None
    if config.policy == "cache_conditional" and resident is not None and is_free:
        bonus = selection.cache_bonus(logits, valid, config.cache_bias)
        favoured = resident[None, :] | (rank < config.cache_keep)
        routed = jnp.where(favoured, logits + bonus, logits)
        rank, _ = _top_k_rank(routed, axes.expert, config.top_k)
        if config.norm_topk_prob:
            chosen = jnp.where(rank < config.top_k, sort_keys(logits), LOWEST_KEY)
            highest = float_of_key(chosen.max(axis=1))
    elif not (config.truncates or (config.policy in ("native", "cache_conditional") and is_free)):
        routed = jnp.where(eligible[None, :], logits, -jnp.inf)
        rank, best = _top_k_rank(routed, axes.expert, config.top_k)
        highest = best if config.norm_topk_prob else highest
    found = (rank < config.top_k) & (routed != -jnp.inf)
    weights = _weights(logits, found, highest, config.norm_topk_prob)
    if config.truncates:
        found &= eligible[None, :]
        weights = _truncated(weights, found, config.renormalize_truncated)
    axes.store_picks(out.expert_ids, rank, axes.expert_TE)
    axes.store_picks(out.weights, rank, weights)
    used = _any(found & valid[:, None])
    axes.store_used(out.used_ids, used)
    out.used_count[...] = used.sum(dtype=jnp.int32)


class _Axes:
    """The rows and experts of a block, and how their tiles are read and written."""

    def __init__(self, rows, experts, top_k):
        self._num_experts, self._top_k = experts, top_k
        self.row = jnp.arange(pl.next_power_of_2(rows), dtype=jnp.int32)
        self.expert = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
        self.is_row, self.is_expert = self.row < rows, self.expert < experts
        shape = (self.row.size, self.expert.size)
        self.row_TE = jnp.broadcast_to(self.row[:, None], shape)
        self.expert_TE = jnp.broadcast_to(self.expert[None, :], shape)

    def load_tile(self, ref, other):
        mask = self.is_row[:, None] & self.is_expert[None, :]
        return plgpu.load(ref.at[self.row_TE, self.expert_TE], mask=mask, other=other)

    def load_rows(self, ref, other):
        return plgpu.load(ref.at[self.row], mask=self.is_row, other=other)

    def load_experts(self, ref, other):
        return plgpu.load(ref.at[self.expert], mask=self.is_expert, other=other)

    def store_rows(self, ref, values):
        plgpu.store(ref.at[self.row], values, mask=self.is_row)

    def store_experts(self, ref, values):
        plgpu.store(ref.at[self.expert], values, mask=self.is_expert)

    def store_picks(self, ref, rank_TE, values_TE):
        """Values of the picks, each at its rank."""
        mask = (rank_TE < self._top_k) & self.is_row[:, None]
        plgpu.store(ref.at[self.row_TE, rank_TE], values_TE, mask=mask)

    def store_used(self, ref, used):
        """The used experts in their order, and the padding behind them: each entry once."""
        place = jnp.cumsum(used.astype(jnp.int32)) - 1
        # Where interpreted, an index within bounds would be written, whatever its mask.
        place = jnp.where(used, place, self._num_experts)
        plgpu.store(ref.at[place], self.expert, mask=used)
        is_padding = self.is_expert & (self.expert >= used.sum(dtype=jnp.int32))
        padding = jnp.full_like(self.expert, self._num_experts)
        plgpu.store(ref.at[self.expert], padding, mask=is_padding)


def _any(mask_TE):
    return mask_TE.astype(jnp.int32).max(axis=0) > 0


def _top_k_rank(logits, expert, top_k):
    """The place of each expert among its row's `top_k` best, and `top_k` of all the others.

    Returns:
      The ranks [T, E], in the order of `jax.lax.top_k`, and the best logit of each row.
    """
    keys = sort_keys(logits)
    best = keys.max(axis=1)
    highest = float_of_key(best)
    for rank in range(top_k):
        first = jnp.where(keys == best[:, None], expert[None, :], expert.size).min(axis=1)
        # The key of what is taken becomes its rank, counted from below all keys.
        keys = jnp.where(expert[None, :] == first[:, None], LOWEST_KEY + rank, keys)
        best = keys.max(axis=1)
    return jnp.where(keys < LOWEST_KEY + top_k, keys - LOWEST_KEY, top_k), highest


def _commitment_weights(depth, valid, phat, config):
    same_depth = (depth[:, None] == depth[None, :]) & valid[None, :]
    nodes = jnp.maximum(same_depth.sum(axis=1, dtype=jnp.int32), 1).astype(jnp.float32)
    return jnp.where(valid, power(phat, config.beta) / power(nodes, config.gamma), 0.0)


def _weights(logits, found, highest, norm_topk_prob):
    """Of the experts that were found for each row; 0 of the others."""
    parts = jnp.exp(logits - highest[:, None])
    if norm_topk_prob:
        parts = jnp.where(found, parts, 0.0)
    return jnp.where(found, parts / parts.sum(axis=1)[:, None], 0.0)


def _truncated(weights, found, renormalize):
    left = jnp.where(found, weights, 0.0)
    if renormalize:
        kept = left.sum(axis=1)
        left *= (weights.sum(axis=1) / jnp.where(kept > 0, kept, 1.0))[:, None]
    return left
