"""Grouped-query attention over an arbitrary mask, with rotary positions and a fixed-size cache.

One attention serves prefill, the draft tree and training: the caller says which columns each
row may see, so a tree is nothing special here.
"""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.models.layers import Linear, RMSNorm


@flax.struct.dataclass
class LayerCache:
    """Keys (after RoPE) and values of one layer; rows past the committed length are dead."""

    k: Float[Array, "S K H"]
    v: Float[Array, "S K H"]


def empty_cache(rows: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
    """A cache of `rows` positions, preallocated."""
    shape = (rows, num_kv_heads, head_dim)
    return LayerCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def causal_mask(start: Int[Array, ""], rows: int, cache_rows: int) -> Bool[Array, "T S"]:
    """Row t, which goes to cache row `start + t`, sees every cache row up to itself."""
    return jnp.arange(cache_rows)[None, :] <= start + jnp.arange(rows)[:, None]


def rotary(
    positions: Int[Array, "... T"], head_dim: int, theta: float
) -> tuple[Float[Array, "... T half"], Float[Array, "... T half"]]:
    """Cosines and sines, float32, of the head's `head_dim / 2` frequency pairs (Su et al. 2021)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "... T M H"], cos: Float[Array, "... T half"], sin: Float[Array, "... T half"]
) -> Float[Array, "... T M H"]:
    """Applies RoPE in float32; pair i is (x[i], x[i + H/2]), as in Hugging Face checkpoints."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def attend(
    q: Float[Array, "... T N H"],
    k: Float[Array, "... S K H"],
    v: Float[Array, "... S K H"],
    mask: Bool[Array, "... T S"],
) -> Float[Array, "... T N H"]:
    """Softmax attention, scaled by `H ** -0.5`; scores and softmax are float32.

    A masked column has weight exactly 0, whatever finite number its dead row holds.
    """
    *lead, rows, heads, width = q.shape
    kv_heads = k.shape[-2]
    grouped = q.reshape(*lead, rows, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("...tkgh,...skh->...kgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[..., None, None, :, :], scores * width**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("...kgts,...skh->...tkgh", weights, v)
    return out.reshape(*lead, rows, heads, width)


class Attention(nn.Module):
    """The attention of a layer. `qk_norm_eps` turns on Qwen3's per-head norm of q and k."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    out_features: int
    qk_norm_eps: float | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "... T D"],
        positions: Int[Array, "... T"],
        mask: Bool[Array, "... T S"],
        cache: LayerCache | None = None,
        start: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "... T D"], LayerCache | None]:
        """Writes the T new rows at cache row `start`, then attends to what `mask` allows.

        Without a cache the S columns are the T rows themselves; with one they are its rows.
        """
        heads, kv_heads, width = self.num_heads, self.num_kv_heads, self.head_dim

        def project(name: str, count: int, axis: str) -> jax.Array:
            y = Linear(count * width, (axis, "embed"), name=f"{name}_proj")(x)
            return y.reshape(*x.shape[:-1], count, width)

        q = project("q", heads, "heads")
        k = project("k", kv_heads, "kv_heads")
        v = project("v", kv_heads, "kv_heads")
        if self.qk_norm_eps is not None:
            q = RMSNorm(self.qk_norm_eps, "head_dim", name="q_norm")(q)
            k = RMSNorm(self.qk_norm_eps, "head_dim", name="k_norm")(k)
        cos, sin = rotary(positions, width, self.rope_theta)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            cache = LayerCache(
                k=jax.lax.dynamic_update_slice_in_dim(cache.k, k.astype(cache.k.dtype), start, 0),
                v=jax.lax.dynamic_update_slice_in_dim(cache.v, v.astype(cache.v.dtype), start, 0),
            )
            k, v = cache.k, cache.v
        out = attend(q, k, v, mask).reshape(*x.shape[:-1], heads * width)
        return Linear(self.out_features, ("embed", "heads"), name="o_proj")(out), cache
