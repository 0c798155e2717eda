"""The activation between an expert's two products."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class GatedActivation:
    """`(up + shift) * gate * sigmoid(slope * gate)`, of clamped gate and up if there is a limit.

    The defaults are Qwen3's SwiGLU, `silu(gate) * up`. GPT-OSS has slope 1.702, shift 1 and
    limit 7: gate is clamped from above only, up on both sides.
    """

    slope: float = 1.0
    shift: float = 0.0
    limit: float | None = None

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
        if self.shift:
            up = up + self.shift
        return gate * jax.nn.sigmoid(self.slope * gate) * up
