"""Layers that both model families and the draft head share.

A weight keeps its Hugging Face layout, `[out, in]`, so that loading never transposes, and is
declared once with its logical axes, from which abstract shapes and shardings follow.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_normal = nn.initializers.normal(stddev=0.02)


class Linear(nn.Module):
    """`y = x W^T`, with `W [out, in]`, or `y = x W^T + b`."""

    features: int
    axes: tuple[str, str]
    use_bias: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "... inner"], out_dtype: jnp.dtype | None = None
    ) -> Float[Array, "... outer"]:
        """Products accumulate in float32; the result has `out_dtype`, or the dtype of `x`."""
        init = nn.with_logical_partitioning(_normal, self.axes)
        weight = self.param("weight", init, (self.features, x.shape[-1]))
        y = jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=out_dtype)
        if self.use_bias:
            init = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[:1])
            y = y + self.param("bias", init, (self.features,)).astype(y.dtype)
        return y


class Embedding(nn.Module):
    """A table `[V, D]`, looked up by token, or used as a tied output head."""

    vocab_size: int
    features: int

    def setup(self):
        init = nn.with_logical_partitioning(_normal, ("vocab", "embed"))
        self.weight = self.param("weight", init, (self.vocab_size, self.features))

    def __call__(self, tokens: Int[Array, "... T"]) -> Float[Array, "... T D"]:
        return jnp.take(self.weight, tokens, axis=0)

    def unembed(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        return jnp.einsum("...d,vd->...v", x, self.weight, preferred_element_type=jnp.float32)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 (Zhang & Sennrich 2019)."""

    eps: float
    axis: str = "norm"

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        init = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
        weight = self.param("weight", init, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return weight * wide.astype(x.dtype)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`: the dense MLP of Llama and Qwen3."""

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        gate = Linear(self.width, ("mlp", "embed"), name="gate_proj")(x)
        up = Linear(self.width, ("mlp", "embed"), name="up_proj")(x)
        return Linear(x.shape[-1], ("embed", "mlp"), name="down_proj")(nn.silu(gate) * up)
