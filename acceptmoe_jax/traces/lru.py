"""The residency of one layer inside jit: what `offload.ResidencyTable` does under LRU.

After a wave a table holds the C experts that were touched last: those that the wave needs are
the newest of all, and who leaves for them is the oldest. So the order of last touches says it
all, and a verification of several waves is one update of that order. Everything is integers.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

Recency = Int[Array, "E"]


@struct.dataclass
class Loads:
    """What one verification took of one layer, on its unique used experts."""

    hits: Int[Array, ""]
    misses: Int[Array, ""]
    waves: Int[Array, ""]


def empty(num_experts: int) -> Recency:
    """The recency of an empty table.

    It is each resident expert's place among them, 0 for the one touched last; E if absent.
    """
    return jnp.full(num_experts, num_experts, jnp.int32)


def resident(recency: Recency) -> Bool[Array, "E"]:
    """Experts whose weights are on the device."""
    return recency < recency.shape[0]


def load(recency: Recency, used: Bool[Array, "E"], num_slots: int) -> tuple[Recency, Loads]:
    """One verification: hits and the first misses that fit, then groups of `num_slots` misses.

    Args:
      recency: before it.
      used: the experts that it computes; none changes nothing.
      num_slots: C, at least 1.

    Returns:
      The recency after it, and what it took.
    """
    num_experts = recency.shape[0]
    ids = jnp.arange(num_experts, dtype=jnp.int32)
    hit = used & resident(recency)
    miss = used & ~hit
    hits, misses = (mask.sum(dtype=jnp.int32) for mask in (hit, miss))
    # Hits fill the head of the first wave; misses follow them in ascending id.
    place = hits + jnp.cumsum(miss, dtype=jnp.int32) - 1
    wave = jnp.where(miss, place // num_slots, 0)
    # Larger is later: the untouched keep their order behind every expert of this verification.
    touched = jnp.where(used, num_experts * (wave + 1) + ids, num_experts - 1 - recency)
    later_EE = touched[:, None] > touched[None, :]
    order = later_EE.sum(axis=0, dtype=jnp.int32)
    held = (touched >= 0) & (order < num_slots)
    waves = (hits + misses + num_slots - 1) // num_slots
    return jnp.where(held, order, num_experts), Loads(hits, misses, waves)
