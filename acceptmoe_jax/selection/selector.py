"""`select`: from a block's router logits to its experts, in one pure function a layer.

    natural routing -> demand -> set of the policy -> residency: admission, pruning
    -> routing inside the set

Only target verification is restricted; prefill and the draft route naturally. The method is
lossy: acceptance is exact for the restricted target, which is not the unrestricted one. With more
than one request, `jax.vmap` over the arrays gives each its own set.

What pruning may displace is counted in assignments; where nodes weigh by their own paths, by the
weight of each assignment's node (`displacement`).
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Real

from acceptmoe_jax.selection import demand as demand_lib, eligible as eligible_lib, routing
from acceptmoe_jax.selection.config import SelectorConfig


@struct.dataclass
class SelectionResult:
    """Everything `select` decided for one layer and verification block, with its reasons.

    The fields up to `effective_rank_size` describe the block and mean the same under every
    policy; those after it are the policy's decision.

    Attributes:
      natural_ids: the model's own experts, best first; on padded rows too.
      alpha: commitment weight of each node; 0 on padded rows.
      demand: u, commitment-weighted router mass of each expert.
      assignments: v, how many valid rows route to each expert naturally; the natural union is
        `assignments > 0`.
      anchor: the root's natural experts; empty in the no-anchor ablation.
      entropy: of the demand outside the anchor, normalised; nats.
      effective_rank_size: experts that this demand is worth by the config's size rule.
      eligible_before_pruning: S, the policy's set.
      rerouting_budget: a(S), natural assignments outside S, a count under every policy; what
        pruning may displace again, unless it goes by weight (`displacement`).
      admitted: R, experts outside S let back in for being resident; pruning may displace what
        they take back as well, so that at most 2 a(S) are displaced in the end, or by weight
        twice what weighs outside S.
      pruned: D, experts of S dropped for not being resident.
      eligible: S' = S + R - D, or the override.
      expert_ids: the experts each row is dispatched to.
      weights: their combine weights; 0 for picks that go nowhere. Those of padded rows mean
        nothing: mask them by `valid` before running experts.
      used_ids: experts that at least one live pick goes to, ascending, padded with E.
      used_count: number of experts in `used_ids`.
    """

    natural_ids: Int[Array, "T k"]
    alpha: Float[Array, "T"]
    demand: Float[Array, "E"]
    assignments: Int[Array, "E"]
    anchor: Bool[Array, "E"]
    entropy: Float[Array, ""]
    effective_rank_size: Int[Array, ""]
    eligible_before_pruning: Bool[Array, "E"]
    rerouting_budget: Int[Array, ""]
    admitted: Bool[Array, "E"]
    pruned: Bool[Array, "E"]
    eligible: Bool[Array, "E"]
    expert_ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    used_ids: Int[Array, "E"]
    used_count: Int[Array, ""]


def select(
    logits: Float[Array, "T E"],
    depth: Int[Array, "T"],
    valid: Bool[Array, "T"],
    phat: Float[Array, "P"],
    resident: Bool[Array, "E"] | None = None,
    *,
    config: SelectorConfig,
    eligible_override: Bool[Array, "E"] | None = None,
    path_phat: Float[Array, "T"] | None = None,
) -> SelectionResult:
    """Chooses a layer's experts for one verification block and routes its rows among them.

    Pure, jittable with `config` static, and vmappable; computes in float32.

    Args:
      logits: router logits after the router's bias; row 0 is the root.
      depth: depth of each node in the draft tree, 0 for the root.
      valid: False on padded rows, which neither vote nor use an expert.
      phat: commitment probability by depth, from a `CommitmentTable`; a deeper node takes the
        last entry.
      resident: experts whose weights are on the device now, before this layer's loads; None where
        all of them are, which prunes, admits and favours nothing.
      config: the policy.
      eligible_override: replaces S' by given data. All experts gives natural routing bit for bit
        in the same compiled program, "cache_conditional" favouring nothing there;
        `eligible_before_pruning`, `rerouting_budget`, `admitted` and `pruned` still say what the
        policy itself would have done.
      path_phat: commitment probability of each node, from `node_commitment`; needed where
        `config.weighs_paths` says so, and ignored elsewhere.

    Raises:
      ValueError: if shapes disagree, path_phat is missing, or the layer has fewer experts than
        `config` needs.
    """
    logits = jnp.asarray(logits, jnp.float32)
    depth = jnp.asarray(depth, jnp.int32)
    valid = jnp.asarray(valid, bool)
    phat = jnp.asarray(phat, jnp.float32)
    resident = None if resident is None else jnp.asarray(resident, bool)
    if eligible_override is not None:
        eligible_override = jnp.asarray(eligible_override, bool)
    if not config.weighs_paths:
        path_phat = None
    elif path_phat is None:
        raise ValueError("path_phat is needed where the config has path set")
    else:
        path_phat = jnp.asarray(path_phat, jnp.float32)
    _check_shapes(logits, depth, valid, phat, resident, eligible_override, path_phat)
    num_experts = logits.shape[1]
    config.check_experts(num_experts)

    natural_ids = routing.natural_routing(logits, config.top_k)
    selected = demand_lib.selected_experts(natural_ids, valid, num_experts)
    alpha = _node_weights(depth, valid, phat, path_phat, config)
    demand = demand_lib.expert_demand(logits, selected, alpha)
    assignments = selected.sum(axis=0, dtype=jnp.int32)
    anchor = selected[0] if config.anchor else jnp.zeros(num_experts, bool)
    q = demand_lib.residual_distribution(demand, anchor)
    size = demand_lib.residual_size(q, config.size_rule, config.mass)

    before = policy_set(logits, valid, q, anchor, size, config)
    admitted = _admitted(before, resident, demand, config)
    cost = displacement(selected, alpha, assignments, config)
    spendable = eligible_lib.displaced_assignments(before, cost)
    spendable += eligible_lib.displaced_assignments(~admitted, cost)
    with_admitted = before | admitted
    pruned = _pruned(with_admitted, resident, anchor, demand, cost, spendable, config)
    eligible = with_admitted & ~pruned
    scores = _scores(logits, natural_ids, valid, resident, config)
    if eligible_override is not None:
        eligible, scores = eligible_override, None

    expert_ids, weights, live = _route(logits, scores, eligible, valid, config)
    used_ids, used_count = routing.used_experts(expert_ids, live, num_experts)
    return SelectionResult(
        natural_ids=natural_ids,
        alpha=alpha,
        demand=demand,
        assignments=assignments,
        anchor=anchor,
        entropy=demand_lib.entropy(q),
        effective_rank_size=size,
        eligible_before_pruning=before,
        rerouting_budget=eligible_lib.displaced_assignments(before, assignments),
        admitted=admitted,
        pruned=pruned,
        eligible=eligible,
        expert_ids=expert_ids,
        weights=weights,
        used_ids=used_ids,
        used_count=used_count,
    )


def _node_weights(depth, valid, phat, path_phat, config):
    if config.uniform:
        return valid.astype(jnp.float32)
    if path_phat is not None:
        return demand_lib.path_weights(path_phat, valid, config.beta)
    return demand_lib.commitment_weights(depth, valid, phat, config.beta, config.gamma)


def policy_set(
    logits: Float[Array, "T E"],
    valid: Bool[Array, "T"],
    q: Float[Array, "E"],
    anchor: Bool[Array, "E"],
    size: Int[Array, ""],
    config: SelectorConfig,
) -> Bool[Array, "E"]:
    """`S`, the set of the config's policy before pruning.

    Args:
      logits, valid: of the block, which MoE-Spec scores by itself.
      q: residual demand, 0 on the anchor.
      anchor: experts that are always in the set of a policy that has an anchor.
      size: experts that q is worth.
    """
    if config.policy in ("native", "cache_conditional"):
        return jnp.ones_like(anchor)
    if config.policy == "moe_spec":
        scores = demand_lib.router_mass(logits, valid)
        return demand_lib.descending_rank(scores) < config.budget
    if config.policy == "acceptmoe_fix":
        size = config.budget - config.top_k if config.anchor else config.budget
    at_least = 0 if config.anchor else config.top_k
    return eligible_lib.anchored_set(q, anchor, size, at_least)


def displacement(
    selected: Bool[Array, "T E"],
    alpha: Float[Array, "T"],
    assignments: Int[Array, "E"],
    config: SelectorConfig,
) -> Real[Array, "E"]:
    """What rerouting all of an expert's natural assignments counts for in pruning and admission.

    The paper's v, or under `config.weighs_paths` `w[e] = sum_t alpha[t] * sel[t, e]`, float32. A
    set chosen by path leaves out many assignments of unlikely nodes; counted, they would let
    pruning displace as many of likely ones.

    Args:
      selected: `sel`, from `selected_experts`.
      alpha: weight of each node.
      assignments: v.
      config: the policy.
    """
    if not config.weighs_paths:
        return assignments
    return jnp.where(selected, alpha[:, None], 0.0).sum(axis=0)


def _admitted(before, resident, demand, config):
    if resident is None or not config.admits:
        return jnp.zeros_like(before)
    return eligible_lib.admit(before, resident, demand, config.admit)


def _pruned(before, resident, anchor, demand, cost, budget, config):
    if resident is None or not config.prunes:
        return jnp.zeros_like(before)
    removable = before & ~resident
    if config.protect_anchor:
        removable &= ~anchor
    return eligible_lib.prune(before, removable, demand, cost, budget, config.top_k)


def _scores(logits, natural_ids, valid, resident, config):
    """What cache-conditional routing ranks experts by; None for what the logits say."""
    if resident is None or config.policy != "cache_conditional":
        return None
    best = natural_ids[:, : config.cache_keep]
    # With the same bonus a row's best experts stay ahead of every other.
    kept = demand_lib.selected_experts(best, jnp.ones_like(valid), logits.shape[1])
    bonus = routing.cache_bonus(logits, valid, config.cache_bias)
    return jnp.where(resident | kept, logits + bonus, logits)


def _route(logits, scores, eligible, valid, config):
    if config.truncates:
        return routing.dispatch_truncated(
            logits,
            eligible,
            valid,
            config.top_k,
            config.norm_topk_prob,
            config.renormalize_truncated,
        )
    return routing.dispatch(logits, eligible, valid, config.top_k, config.norm_topk_prob, scores)


def _check_shapes(logits, depth, valid, phat, resident, eligible_override, path_phat):
    if logits.ndim != 2 or logits.shape[0] == 0:
        raise ValueError(
            f"logits must be [T, E] with T >= 1, got {logits.shape}; vmap over a batch"
        )
    rows, experts = logits.shape
    for name, array, shape in (
        ("depth", depth, (rows,)),
        ("valid", valid, (rows,)),
        ("resident", resident, (experts,)),
        ("eligible_override", eligible_override, (experts,)),
        ("path_phat", path_phat, (rows,)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    if phat.ndim != 1 or phat.shape[0] == 0:
        raise ValueError(f"phat must hold at least the root's entry, got shape {phat.shape}")
