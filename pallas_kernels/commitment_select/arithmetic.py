"""Numbers that both kernels of commitment_select compute alike."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Below the key of any float, and that of NaN.
LOWEST_KEY = jnp.iinfo(jnp.int32).min
_NAN_KEY = jnp.iinfo(jnp.int32).max


def sort_keys(logits: Float[Array, "T E"]) -> Int[Array, "T E"]:
    """Integers in the order of `jax.lax.top_k`, with any NaN above all.

    A warp reduces integers in one instruction, and none of them compares unlike the others.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    return jnp.where(logits != logits, _NAN_KEY, _flipped(bits))


def float_of_key(keys: Int[Array, "T"]) -> Float[Array, "T"]:
    """The logits of sort keys."""
    return jax.lax.bitcast_convert_type(_flipped(keys), jnp.float32)


def _flipped(bits):
    return jnp.where(bits < 0, bits ^ jnp.int32(_NAN_KEY), bits)


def power(base: Float[Array, "T"], exponent: float) -> Float[Array, "T"]:
    """`base**exponent` of numbers that are not negative, and an exponent that is not either.

    The general power would be a fifth of a kernel's instructions. One half is what the method
    uses, and XLA takes a square root for it too.
    """
    if exponent == 0.5:
        return jnp.sqrt(base)
    return jnp.exp(exponent * jnp.log(base)) if exponent else jnp.ones_like(base)
