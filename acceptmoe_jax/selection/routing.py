"""Routing of a block's rows: the model's own top-k, and top-k inside an eligible set.

Weights follow the two families of routers: with `norm_topk_prob` a softmax over the chosen
logits, without it the softmax over all experts gathered at the chosen ones. A pick that has no
expert to go to has weight 0. A pick is live when it has one and its row is valid: only live picks
use an expert. A padded row has weights too, which mean nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def natural_routing(logits: Float[Array, "T E"], top_k: int) -> Int[Array, "T k"]:
    """The model's own experts, best first, int32; ties go to the lower expert id."""
    return jax.lax.top_k(logits, top_k)[1]


def dispatch(
    logits: Float[Array, "T E"],
    eligible: Bool[Array, "E"],
    valid: Bool[Array, "T"],
    top_k: int,
    norm_topk_prob: bool,
    scores: Float[Array, "T E"] | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"], Bool[Array, "T k"]]:
    """`idx, w = top_k(where(S', z, -inf), k)`: each row's best experts inside the eligible set.

    Without `norm_topk_prob` the softmax runs over the unmasked logits, so that a row whose
    natural experts are all eligible (the root, under an anchor) keeps its weights exactly.

    Args:
      scores: what experts are chosen by instead of the logits, which still weigh them.

    Returns:
      Expert ids (an arbitrary expert where a pick is not live), weights, and which picks are live.
    """
    ranked = logits if scores is None else scores
    chosen, expert_ids = jax.lax.top_k(jnp.where(eligible, ranked, -jnp.inf), top_k)
    # NaN of a row stays: it must reach the output and be seen, not become a 0.
    found = chosen != -jnp.inf
    if scores is not None:
        chosen = jnp.where(found, jnp.take_along_axis(logits, expert_ids, axis=-1), -jnp.inf)
    if norm_topk_prob:
        weights = jax.nn.softmax(chosen, axis=-1)
    else:
        weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), expert_ids, axis=-1)
    return expert_ids, jnp.where(found, weights, 0.0), found & valid[:, None]


def dispatch_truncated(
    logits: Float[Array, "T E"],
    eligible: Bool[Array, "E"],
    valid: Bool[Array, "T"],
    top_k: int,
    norm_topk_prob: bool,
    renormalize: bool,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"], Bool[Array, "T k"]]:
    """Natural routing with the picks outside the eligible set dropped (MoE-Spec's truncation).

    The kept picks keep their natural weights; with `renormalize` they are scaled up to the row's
    natural total (1 under `norm_topk_prob`). A row that lost every pick is all zeros.

    Returns:
      Natural ids, weights, and which picks are live, as `dispatch`.
    """
    every_expert = jnp.ones_like(eligible)
    expert_ids, natural, live = dispatch(logits, every_expert, valid, top_k, norm_topk_prob)
    kept_picks = eligible[expert_ids]
    weights = jnp.where(kept_picks, natural, 0.0)
    if renormalize:
        kept = weights.sum(axis=-1, keepdims=True)
        total = natural.sum(axis=-1, keepdims=True)
        weights *= total / jnp.where(kept > 0, kept, 1.0)
    return expert_ids, weights, live & kept_picks


def cache_bonus(
    logits: Float[Array, "T E"], valid: Bool[Array, "T"], bias: float
) -> Float[Array, ""]:
    """`bias` times the mean range (maximum - minimum) of the valid rows' finite logits.

    Cache-conditional routing (arXiv 2412.00099) adds it to the logits of resident experts, with a
    running average of the range over all tokens so far. Here it is this block's own mean, so that
    routing needs no state: a simplification.
    """
    finite_TE = jnp.abs(logits) < jnp.inf
    highest = jnp.where(finite_TE, logits, -jnp.inf).max(axis=1)
    lowest = jnp.where(finite_TE, logits, jnp.inf).min(axis=1)
    counted = valid & (highest > -jnp.inf)
    total = jnp.where(counted, highest - lowest, 0.0).sum()
    return bias * total / jnp.maximum(counted.sum(dtype=jnp.int32), 1)


def used_experts(
    expert_ids: Int[Array, "T k"], live: Bool[Array, "T k"], num_experts: int
) -> tuple[Int[Array, "E"], Int[Array, ""]]:
    """The distinct experts of the live picks: what has to be loaded and executed.

    Returns:
      `used_ids`, ascending, padded with `num_experts` to a static length: an id that no expert
      has, so that a scatter with mode "drop" ignores it and a loop that reads past the count
      shows. And `used_count`, how many entries are experts.
    """
    index = jnp.arange(num_experts, dtype=jnp.int32)
    used = ((expert_ids[..., None] == index) & live[..., None]).any(axis=(0, 1))
    # Entry p is the used expert with p used ones before it. Pairwise, not jnp.nonzero: that takes
    # a cumulative sum and a scatter, three times the compile time in each layer of a step.
    used_before = ((index[:, None] < index[None, :]) & used[:, None]).sum(axis=0)
    here_EE = used[None, :] & (used_before[None, :] == index[:, None])
    used_ids = jnp.where(here_EE, index[None, :], num_experts).min(axis=1)
    return used_ids, used.sum(dtype=jnp.int32)
