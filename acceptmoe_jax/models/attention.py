"""Grouped-query attention over an arbitrary mask, with rotary positions and a fixed-size cache.

One attention serves prefill, the draft tree and training: the caller says which columns each
row may see, so a tree is nothing special here.
"""

import math

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from acceptmoe_jax.models.config import AttentionConfig, RopeConfig
from acceptmoe_jax.models.layers import Linear, RMSNorm
from pallas_kernels.tree_attention import attend, tree_attention


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


def window_mask(
    mask: Bool[Array, "... T S"],
    positions: Int[Array, "... T"],
    columns: Int[Array, "... S"],
    window: int | None,
) -> Bool[Array, "... T S"]:
    """`mask` less the columns that lie `window` positions or more behind their row.

    A window counts the row itself, and it counts positions: in a draft tree depth, not rows.

    Args:
      mask: what the rows may see otherwise.
      positions: of the rows.
      columns: positions of the columns.
      window: None leaves the mask as it is.
    """
    if window is None:
        return mask
    return mask & (positions[..., :, None] - columns[..., None, :] < window)


def first_column(start: Int[Array, ""], window: int | None) -> Int[Array, ""] | int:
    """The first cache row that rows at positions from `start` on may see through a window.

    Cache rows before `start` hold the positions 0 to `start` - 1.
    """
    return 0 if window is None else jnp.maximum(start - window + 1, 0)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Float32[np.ndarray, "half"], float]:
    """(radians a position of each of the `head_dim / 2` pairs, factor of cosines and sines).

    Plain RoPE turns pair i by theta^(-2i / H) (Su et al. 2021). YaRN (arXiv 2309.00071) divides
    the frequency of slow pairs by `factor`, keeps that of fast ones, and blends in between.
    """
    # In float32 and in transformers' order: a rounding here is an angle that grows with position.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    period = np.float32(rope.theta) ** exponents
    frequency = np.float32(1) / period
    if rope.factor is None:
        return frequency, 1.0

    def pair_that_turns(rotations: float) -> float:
        """The pair (a real number) that makes so many rotations in the original context."""
        positions_a_radian = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(positions_a_radian) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    slowed = np.clip((pairs - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1)
    slow = np.float32(1) / (np.float32(rope.factor) * period)
    frequency = slow * slowed + frequency * (1 - slowed)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1
    return frequency, scale


def rotary(
    positions: Int[Array, "... T"], head_dim: int, rope: RopeConfig
) -> tuple[Float[Array, "... T half"], Float[Array, "... T half"]]:
    """Cosines and sines, float32, of the head's `head_dim / 2` frequency pairs."""
    frequency, scale = rope_frequencies(rope, head_dim)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(
    x: Float[Array, "... T M H"], cos: Float[Array, "... T half"], sin: Float[Array, "... T half"]
) -> Float[Array, "... T M H"]:
    """Applies RoPE in float32; pair i is (x[i], x[i + H/2]), as in Hugging Face checkpoints."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nn.Module):
    """The attention of a layer, with the options of its config.

    `implementation` is that of `tree_attention`, where there is a cache; `interpret` likewise.
    """

    config: AttentionConfig
    out_features: int
    implementation: str = "xla"
    interpret: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "... T D"],
        positions: Int[Array, "... T"],
        mask: Bool[Array, "... T S"],
        cache: LayerCache | None = None,
        start: Int[Array, ""] | None = None,
        begin: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "... T D"], LayerCache | None]:
        """Writes the T new rows at cache row `start`, then attends to what `mask` allows.

        Without a cache the S columns are the T rows themselves; with one they are its rows, of
        which `mask` shows none before `begin` and none after the new ones.
        """
        c = self.config
        heads, kv_heads, width = c.num_heads, c.num_kv_heads, c.head_dim

        def project(name: str, count: int, axis: str) -> jax.Array:
            y = Linear(count * width, (axis, "embed"), c.bias, name=f"{name}_proj")(x)
            return y.reshape(*x.shape[:-1], count, width)

        q = project("q", heads, "heads")
        k = project("k", kv_heads, "kv_heads")
        v = project("v", kv_heads, "kv_heads")
        if c.qk_norm_eps is not None:
            q = RMSNorm(c.qk_norm_eps, "head_dim", name="q_norm")(q)
            k = RMSNorm(c.qk_norm_eps, "head_dim", name="k_norm")(k)
        cos, sin = rotary(positions, width, c.rope)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            cache = LayerCache(
                k=jax.lax.dynamic_update_slice_in_dim(cache.k, k.astype(cache.k.dtype), start, 0),
                v=jax.lax.dynamic_update_slice_in_dim(cache.v, v.astype(cache.v.dtype), start, 0),
            )
            k, v = cache.k, cache.v
        sinks = None
        if c.sinks:
            init = nn.with_logical_partitioning(nn.initializers.zeros, ("heads",))
            sinks = self.param("sinks", init, (heads,))
        if cache is None:
            out = attend(q, k, v, mask, sinks)
        else:
            out = tree_attention(
                q,
                k,
                v,
                mask,
                sinks,
                begin=begin,
                end=start + x.shape[-2],
                implementation=self.implementation,
                interpret=self.interpret,
            )
        out = out.reshape(*x.shape[:-1], heads * width)
        return Linear(self.out_features, ("embed", "heads"), c.bias, name="o_proj")(out), cache
