"""The experts of a layer as a config asks for them: shapes, abstract and random banks."""

import jax
import jax.numpy as jnp

from acceptmoe_jax.models.config import TargetConfig
from pallas_kernels.masked_expert_gemm import ExpertBank, Matrix
from pallas_kernels.mxfp4 import quantise

EXPERT_MATRICES = ("gate", "up", "down")

# Logical axes of each leaf, for sharding a bank over a device mesh.
BANK_AXES = {
    "gate": ("expert", "expert_mlp", "embed"),
    "up": ("expert", "expert_mlp", "embed"),
    "down": ("expert", "embed", "expert_mlp"),
    "gate_bias": ("expert", "expert_mlp"),
    "up_bias": ("expert", "expert_mlp"),
    "down_bias": ("expert", "embed"),
}


def bank_shapes(config: TargetConfig, slots: int | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of the weight leaves, for `slots` slots (all experts by default)."""
    slots = config.num_experts if slots is None else slots
    d, f = config.hidden_size, config.expert_width
    shapes = {"gate": (slots, f, d), "up": (slots, f, d), "down": (slots, d, f)}
    if config.expert_bias:
        shapes |= {"gate_bias": (slots, f), "up_bias": (slots, f), "down_bias": (slots, d)}
    return shapes


def resident_bank(weights: dict[str, Matrix | jax.Array], num_experts: int) -> ExpertBank:
    """A bank that holds every expert, in slot order."""
    return ExpertBank(**weights, slot_of=jnp.arange(num_experts, dtype=jnp.int32))


def bank_weights(bank: ExpertBank) -> dict[str, Matrix | jax.Array]:
    """The weight leaves that this bank has, by name: what `resident_bank` takes."""
    return {name: leaf for name in BANK_AXES if (leaf := getattr(bank, name)) is not None}


def abstract_bank(
    config: TargetConfig, dtype: jnp.dtype, slots: int | None = None, *, packed: bool = False
) -> ExpertBank:
    """The bank as `jax.ShapeDtypeStruct`s: what a loader fills and a compiler needs.

    Args:
      dtype: of the leaves.
      slots: all experts by default.
      packed: the matrices are MXFP4.
    """
    leaves = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, shape in bank_shapes(config, slots).items()
    }
    if packed:
        leaves |= {name: jax.eval_shape(quantise, leaves[name]) for name in EXPERT_MATRICES}
    slot_of = jax.ShapeDtypeStruct((config.num_experts,), jnp.int32)
    return ExpertBank(**leaves, slot_of=slot_of)


def init_bank(key: jax.Array, config: TargetConfig, dtype: jnp.dtype = jnp.float32) -> ExpertBank:
    """Random weights, normal with standard deviation 0.02; biases are zero."""
    shapes = bank_shapes(config)
    keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
    weights = {
        name: jnp.zeros(shape, dtype)
        if name.endswith("_bias")
        else (0.02 * jax.random.normal(keys[name], shape)).astype(dtype)
        for name, shape in shapes.items()
    }
    return resident_bank(weights, config.num_experts)
