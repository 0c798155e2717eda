"""Statistics of traces as pure functions of their arrays, which jit; and intervals around them.

The arrays are those of `format.Verifications`: N verifications, L layers, T nodes, E experts and
n draft steps. All but `bootstrap_interval` take arrays of JAX or NumPy and compute in float32 and
int32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax import bootstrap, selection


def committed(
    path: Int[Array, "... n+1"], length: Int[Array, "..."], valid: Bool[Array, "... T"]
) -> Bool[Array, "... T"]:
    """Valid nodes on the accepted path, the root among them."""
    counted = jnp.arange(path.shape[-1]) < length[..., None]
    on_path = path[..., None] == jnp.arange(valid.shape[-1])
    return valid & (on_path & counted[..., None]).any(axis=-2)


def reach(
    path: Int[Array, "N n+1"], length: Int[Array, "N"], depth: Int[Array, "N T"]
) -> Int[Array, "n+1"]:
    """Verifications whose accepted path holds a node of each depth, the root's 0 first."""
    accepted = committed(path, length, jnp.ones(depth.shape, bool))
    return nodes_by_depth(depth, accepted, path.shape[1])


def nodes_by_depth(
    depth: Int[Array, "N T"], valid: Bool[Array, "N T"], depths: int
) -> Int[Array, "P"]:
    """Valid nodes of each depth below `depths` (static), over all verifications."""
    counted = valid[..., None] & (depth[..., None] == jnp.arange(depths))
    return counted.sum(axis=(0, 1), dtype=jnp.int32)


def phat_by_depth(
    path: Int[Array, "N n+1"], length: Int[Array, "N"], depth: Int[Array, "N T"]
) -> Float[Array, "n+1"]:
    """`reach / N`, without the floor of a `CommitmentTable`; its sum is the mean accepted length.

    All zeros of no verification.
    """
    return reach(path, length, depth) / jnp.maximum(len(length), 1)


def mean_accepted_length(length: Int[Array, "N"]) -> Float[Array, ""]:
    """Tokens a verification, the bonus included, before cuts; 0 of no verification."""
    return length.sum() / jnp.maximum(len(length), 1)


def natural_assignments(
    logits: Float[Array, "... T E"], valid: Bool[Array, "... T"], top_k: int
) -> Int[Array, "... E"]:
    """Valid rows that route to each expert naturally; `top_k` is static.

    The leading axes of `logits` and `valid` broadcast: an N L stack takes `valid[:, None]`.
    """
    return _selected(logits, valid, top_k).sum(axis=-2, dtype=jnp.int32)


def natural_union(
    logits: Float[Array, "... T E"], valid: Bool[Array, "... T"], top_k: int
) -> Int[Array, "..."]:
    """Experts that at least one valid row routes to naturally; see `natural_assignments`."""
    return (natural_assignments(logits, valid, top_k) > 0).sum(axis=-1, dtype=jnp.int32)


def overlap(a: Bool[Array, "... E"], b: Bool[Array, "... E"]) -> Float[Array, "..."]:
    """Jaccard index of two sets, `|a & b| / |a | b|`; 1 of two empty ones."""
    union = (a | b).sum(axis=-1)
    both = (a & b).sum(axis=-1)
    return jnp.where(union > 0, both / jnp.maximum(union, 1), 1.0)


def top_k_mass(
    logits: Float[Array, "... T E"], valid: Bool[Array, "... T"], top_k: int
) -> Float[Array, "..."]:
    """Share of the router's softmax that the natural top-k hold, a mean over the valid rows.

    0 without a valid row; leading axes as in `natural_assignments`.
    """
    best = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)[0].sum(axis=-1)
    return jnp.where(valid, best, 0.0).sum(axis=-1) / jnp.maximum(valid.sum(axis=-1), 1)


def load_entropy(assignments: Int[Array, "... E"]) -> Float[Array, "..."]:
    """Entropy in nats of how assignments spread over experts: `log E` if evenly, 0 of none."""
    total = assignments.sum(axis=-1, keepdims=True)
    share = assignments / jnp.maximum(total, 1)
    return -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0).sum(-1)


@struct.dataclass
class CommitmentSamples:
    """Nodes of all verifications, flat, as `selection.fit_path_commitment` reads them.

    Attributes:
      depth: in the tree.
      score: log-probability of the path under the draft, nats.
      committed: whether the accepted path held the node.
      counted: False for nodes that only filled a shape; leave those out.
    """

    depth: Int[Array, "N*T"]
    score: Float[Array, "N*T"]
    committed: Bool[Array, "N*T"]
    counted: Bool[Array, "N*T"]


def commitment_samples(
    depth: Int[Array, "N T"],
    score: Float[Array, "N T"],
    valid: Bool[Array, "N T"],
    path: Int[Array, "N n+1"],
    length: Int[Array, "N"],
) -> CommitmentSamples:
    """A sample of each node: what the drafter said of it and what became of it."""
    accepted = committed(path, length, valid)
    flat = [jnp.reshape(array, -1) for array in (depth, score, accepted, valid)]
    return CommitmentSamples(*flat)


def bootstrap_interval(
    parts: Sequence[float],
    wholes: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """A percentile interval of the ratio `sum(parts) / sum(wholes)`, by `bootstrap`.

    Args:
      parts, wholes: of each request, such as its kept and all picks, or its tokens and
        verifications.
      level: of the interval.
      resamples: so many drawings.
      seed: of them.

    Raises:
      ValueError: if there is no request, the two disagree in length, or a whole is negative or
        all are 0.
    """
    parts, wholes = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    if parts.shape != wholes.shape or parts.ndim != 1 or not len(parts):
        raise ValueError("parts and wholes must hold one number a request, and one at least")
    if (wholes < 0).any() or not wholes.any():
        raise ValueError("wholes must not be negative, nor all 0")
    requests = np.stack([parts, wholes], axis=-1)
    return bootstrap.interval([requests], level=level, resamples=resamples, seed=seed)


def _selected(logits, valid, top_k):
    """[..., T, E]: expert e is in valid row t's own top-k."""
    ids = selection.natural_routing(logits, top_k)
    rows = jnp.broadcast_to(valid, logits.shape[:-1])
    selected = selection.selected_experts(
        ids.reshape(-1, top_k), rows.reshape(-1), logits.shape[-1]
    )
    return selected.reshape(logits.shape)
