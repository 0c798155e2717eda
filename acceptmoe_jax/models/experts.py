"""The experts of one layer, addressed through slots.

No code indexes expert weights by expert id: it asks `slot_of`. With every expert resident the
bank has C = E slots and the identity table; offloaded, it has fewer.
"""

from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Logical axes of each leaf, for sharding a bank over a device mesh.
BANK_AXES = {
    "gate": ("expert", "expert_mlp", "embed"),
    "up": ("expert", "expert_mlp", "embed"),
    "down": ("expert", "embed", "expert_mlp"),
}


class ExpertDims(Protocol):
    """What a bank needs to know of a model config."""

    num_experts: int
    hidden_size: int
    expert_width: int


@flax.struct.dataclass
class ExpertBank:
    """Weights of C experts in the checkpoint's layout (`[out, in]`), and expert -> slot."""

    gate: Float[Array, "C F D"]
    up: Float[Array, "C F D"]
    down: Float[Array, "C D F"]
    slot_of: Int[Array, "E"]


def bank_shapes(config: ExpertDims, slots: int | None = None) -> dict[str, tuple[int, int, int]]:
    """Shapes of the weight leaves, for `slots` slots (all experts by default)."""
    slots = config.num_experts if slots is None else slots
    d, f = config.hidden_size, config.expert_width
    return {"gate": (slots, f, d), "up": (slots, f, d), "down": (slots, d, f)}


def resident_bank(weights: dict[str, Any], num_experts: int) -> ExpertBank:
    """A bank that holds every expert, in slot order."""
    return ExpertBank(**weights, slot_of=jnp.arange(num_experts, dtype=jnp.int32))


def abstract_bank(config: ExpertDims, dtype: jnp.dtype, slots: int | None = None) -> ExpertBank:
    """The bank as `jax.ShapeDtypeStruct`s: what a loader fills and a compiler needs."""
    leaves = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, shape in bank_shapes(config, slots).items()
    }
    slot_of = jax.ShapeDtypeStruct((config.num_experts,), jnp.int32)
    return ExpertBank(**leaves, slot_of=slot_of)


def init_bank(key: jax.Array, config: ExpertDims, dtype: jnp.dtype = jnp.float32) -> ExpertBank:
    """Random weights, normal with standard deviation 0.02."""
    shapes = bank_shapes(config)
    keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
    weights = {
        name: (0.02 * jax.random.normal(keys[name], shape)).astype(dtype)
        for name, shape in shapes.items()
    }
    return resident_bank(weights, config.num_experts)
