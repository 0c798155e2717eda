"""What a verification block asks of a layer's experts: weights, demand and effective rank.

Equations of AcceptMoE (arXiv 2608.02989). Axes: T tree nodes (row 0 is the root), E experts,
k experts a token. Everything is float32, and every reduction is a masked sum instead of a matrix
product, which a GPU might run in TF32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# exp(H) of a uniform demand over m experts may land a rounding above m, and ceil would add one.
CEIL_SLACK = 1e-4
# The same for a running sum of float32 probabilities that should meet the mass exactly.
MASS_SLACK = 1e-6


def selected_experts(
    natural_ids: Int[Array, "T k"], valid: Bool[Array, "T"], num_experts: int
) -> Bool[Array, "T E"]:
    """`sel[t, e]`: expert e is in valid row t's own top-k."""
    hits_TkE = natural_ids[..., None] == jnp.arange(num_experts)
    return hits_TkE.any(axis=-2) & valid[:, None]


def commitment_weights(
    depth: Int[Array, "T"],
    valid: Bool[Array, "T"],
    phat: Float[Array, "P"],
    beta: float,
    gamma: float,
) -> Float[Array, "T"]:
    """`alpha[t] = valid[t] * phat[depth[t]]^beta * N[depth[t]]^(-gamma)`.

    `N[d]` counts this block's valid nodes at depth d. Padded rows weigh 0 whatever their depth
    says. A depth beyond the table takes the table's last entry, an upper bound of its own.
    """
    same_depth_TT = (depth[:, None] == depth[None, :]) & valid[None, :]
    nodes_T = jnp.maximum(same_depth_TT.sum(axis=-1), 1).astype(jnp.float32)
    phat_T = phat[jnp.clip(depth, 0, phat.shape[0] - 1)]
    return jnp.where(valid, phat_T**beta * nodes_T**-gamma, 0.0)


def path_weights(
    path_phat: Float[Array, "T"], valid: Bool[Array, "T"], beta: float
) -> Float[Array, "T"]:
    """`alpha[t] = valid[t] * path_phat[t]^beta`: the rule of `SelectorConfig.path`.

    There is no power of the number of nodes: a depth's nodes share its probability, so that
    `phat^.5 N^-.5` of the depth rule is the square root of their average, and here each node has
    its own. With `path_phat = phat[d] / N[d]` and beta = gamma the two rules are the same.
    """
    return jnp.where(valid, path_phat**beta, 0.0)


def expert_demand(
    logits: Float[Array, "T E"],
    selected: Bool[Array, "T E"],
    alpha: Float[Array, "T"],
) -> Float[Array, "E"]:
    """`u[e] = sum_t alpha[t] * softmax(z[t])[e] * sel[t, e]`."""
    probabilities_TE = jax.nn.softmax(logits, axis=-1)
    # The where, not a product with 0, keeps NaN of padded or empty rows out of the sum.
    counted_TE = selected & (logits != -jnp.inf)
    return jnp.where(counted_TE, alpha[:, None] * probabilities_TE, 0.0).sum(axis=0)


def router_mass(logits: Float[Array, "T E"], valid: Bool[Array, "T"]) -> Float[Array, "E"]:
    """`s[e] = sum_t softmax(z[t])[e]` over the valid rows: the score of MoE-Spec (2602.16052)."""
    probabilities_TE = jax.nn.softmax(logits, axis=-1)
    counted_TE = valid[:, None] & (logits != -jnp.inf)
    return jnp.where(counted_TE, probabilities_TE, 0.0).sum(axis=0)


def descending_rank(values: Float[Array, "E"]) -> Int[Array, "E"]:
    """The place of each value in descending order, from 0; ties go to the lower index."""
    index = jnp.arange(values.shape[0])
    ahead_EE = (values[:, None] > values[None, :]) | (
        (values[:, None] == values[None, :]) & (index[:, None] < index[None, :])
    )
    return ahead_EE.sum(axis=0, dtype=jnp.int32)


def residual_distribution(demand: Float[Array, "E"], anchor: Bool[Array, "E"]) -> Float[Array, "E"]:
    """`q`: the demand outside the anchor, scaled to sum 1; all zeros where there is none."""
    residual = jnp.where(anchor, 0.0, demand)
    total = residual.sum()
    return jnp.where(total > 0, residual / jnp.where(total > 0, total, 1.0), 0.0)


def entropy(q: Float[Array, "E"]) -> Float[Array, ""]:
    """`H = -sum q log q` in nats, with 0 log 0 = 0."""
    return -jnp.sum(jnp.where(q > 0, q * jnp.log(jnp.where(q > 0, q, 1.0)), 0.0))


def residual_size(q: Float[Array, "E"], size_rule: str, mass: float = 0.9) -> Int[Array, ""]:
    """How many experts the residual demand `q` is worth.

    - "effective_rank": `ceil(exp(H(q)) - 1e-4)` (Roy & Vetterli 2007).
    - "participation_ratio": `ceil(1 / sum q^2 - 1e-4)`.
    - "mass": the smallest prefix in descending q that adds up to `mass`.

    0 where q is all zero; never more than the number of experts with demand.
    """
    demanded = (q > 0).sum(dtype=jnp.int32)
    if size_rule == "mass":
        rank = descending_rank(q)
        ahead_EE = rank[:, None] < rank[None, :]
        mass_ahead = jnp.where(ahead_EE, q[:, None], 0.0).sum(axis=0)
        size = ((q > 0) & (mass_ahead < mass - MASS_SLACK)).sum()
    elif size_rule == "participation_ratio":
        concentration = jnp.where(demanded > 0, jnp.sum(q * q), 1.0)
        size = jnp.ceil(1.0 / concentration - CEIL_SLACK)
    elif size_rule == "effective_rank":
        size = jnp.ceil(jnp.exp(entropy(q)) - CEIL_SLACK)
    else:
        raise ValueError(f"no size rule is called {size_rule!r}")
    return jnp.minimum(size.astype(jnp.int32), demanded)
