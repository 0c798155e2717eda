"""Expert selection once more, in float64 NumPy with sorts and loops: the tests' second opinion."""

import numpy as np


def softmax(z):
    exponentials = np.exp(z - z.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def natural_experts(logits, top_k):
    """[T, k], best first, ties to the lower id."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]


def descending(values, members):
    return sorted(members, key=lambda e: (-values[e], e))


def select(
    logits,
    depth,
    valid,
    phat,
    resident,
    top_k,
    beta=0.5,
    gamma=0.5,
    protect_anchor=True,
    size=None,
    path_phat=None,
    admit=0,
):
    """AcceptMoE for one block; `size` experts outside the anchor, or the effective rank.

    With `path_phat` pruning adds up weights of nodes instead of counts.
    """
    logits = np.asarray(logits, np.float64)
    rows, experts = logits.shape
    natural = natural_experts(logits, top_k)
    probabilities = softmax(logits)
    alpha, demand, weighed = np.zeros(rows), np.zeros(experts), np.zeros(experts)
    assignments = np.zeros(experts, int)
    for t in range(rows):
        if valid[t]:
            peers = sum(1 for s in range(rows) if valid[s] and depth[s] == depth[t])
            alpha[t] = phat[depth[t]] ** beta / peers**gamma
            if path_phat is not None:
                alpha[t] = float(path_phat[t]) ** beta
            for e in natural[t]:
                demand[e] += alpha[t] * probabilities[t, e]
                assignments[e] += 1
                weighed[e] += alpha[t]
    anchor = set(natural[0].tolist())
    others = [e for e in range(experts) if e not in anchor and demand[e] > 0]
    q = demand[others] / demand[others].sum() if others else np.zeros(0)
    entropy = float(-(q * np.log(q)).sum())
    rank = min(int(np.ceil(np.exp(entropy) - 1e-4)), len(others)) if others else 0
    added = descending(demand, others)[: rank if size is None else size]
    before = anchor | set(added)
    budget = int(sum(assignments[e] for e in range(experts) if e not in before))
    cost = assignments if path_phat is None else weighed
    admitted, pruned = set(), set()
    if resident is not None:
        outside = [e for e in others if e not in before and resident[e]]
        admitted = set(descending(demand, outside)[:admit])
        most = sum(cost[e] for e in range(experts) if e not in before)
        most += sum(cost[e] for e in admitted)
        removable = [e for e in before if not resident[e]]
        if protect_anchor:
            removable = [e for e in removable if e not in anchor]
        spent = 0
        for e in sorted(removable, key=lambda e: (demand[e], e)):
            spent += cost[e]
            if spent > most or len(before | admitted) - len(pruned) - 1 < top_k:
                break
            pruned.add(e)
    eligible = (before | admitted) - pruned
    masked = np.where([e in eligible for e in range(experts)], logits, -np.inf)
    expert_ids = natural_experts(masked, top_k)
    weights = softmax(np.take_along_axis(logits, expert_ids, axis=-1))
    used = {int(e) for t in range(rows) if valid[t] for e in expert_ids[t]}
    return dict(
        natural_ids=natural,
        alpha=alpha,
        demand=demand,
        assignments=assignments,
        weighed=weighed,
        anchor=anchor,
        entropy=entropy,
        effective_rank_size=rank,
        eligible_before_pruning=before,
        rerouting_budget=budget,
        admitted=admitted,
        pruned=pruned,
        eligible=eligible,
        expert_ids=expert_ids,
        weights=weights,
        used=used,
    )


def cache_conditional(logits, valid, resident, top_k, bias, keep, norm_topk_prob=True):
    """Cache-conditional routing of one block of finite logits, its range being the block's own."""
    logits = np.asarray(logits, np.float64)
    rows, experts = logits.shape
    ranges = [logits[t].max() - logits[t].min() for t in range(rows) if valid[t]]
    bonus = bias * sum(ranges) / len(ranges)
    natural = natural_experts(logits, top_k)
    expert_ids = np.zeros((rows, top_k), int)
    for t in range(rows):
        # First those that are kept, then by what the bonus makes of the logits; best first.
        best = natural[t, :keep].tolist()
        scores = [logits[t, e] + bonus * (resident[e] or e in best) for e in range(experts)]
        others = descending(scores, set(range(experts)) - set(best))
        expert_ids[t] = descending(scores, best + others[: top_k - keep])
    chosen = np.take_along_axis(logits, expert_ids, axis=-1)
    weights = np.take_along_axis(softmax(logits), expert_ids, axis=-1)
    if norm_topk_prob:
        weights = softmax(chosen)
    used = {int(e) for t in range(rows) if valid[t] for e in expert_ids[t]}
    return dict(expert_ids=expert_ids, weights=weights, used=used)
