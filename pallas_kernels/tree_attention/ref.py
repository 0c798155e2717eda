"""What tree_attention computes, in plain jnp; XLA's version of it, which training runs too."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attend(
    q: Float[Array, "... T N H"],
    k: Float[Array, "... S K H"],
    v: Float[Array, "... S K H"],
    mask: Bool[Array, "... T S"],
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "... T N H"]:
    """Softmax attention, scaled by `H ** -0.5`; scores and softmax are float32.

    A masked column has weight exactly 0, whatever finite number its dead row holds. `sinks` are
    the logits of one more column a query head, which takes its share of the softmax and is dropped.
    """
    *lead, rows, heads, width = q.shape
    kv_heads = k.shape[-2]
    grouped = q.reshape(*lead, rows, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("...tkgh,...skh->...kgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[..., None, None, :, :], scores * width**-0.5, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        top = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), sink))
        weights = jnp.exp(scores - top)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))
    out = jnp.einsum("...kgts,...skh->...tkgh", weights.astype(v.dtype), v)
    return out.reshape(*lead, rows, heads, width)
