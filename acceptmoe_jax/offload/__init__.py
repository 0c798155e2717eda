"""Experts that do not fit on the device: which are there, which must come, and what that costs.

The residency table of a layer knows which expert is in which slot and decides who leaves; it has
no weights. Nothing here knows about models, and selection sees a mask of resident experts only.
"""

from acceptmoe_jax.offload.eviction import (
    EVICTION_POLICIES,
    EvictionPolicy,
    Fifo,
    Lfu,
    Lru,
    belady_misses,
)
from acceptmoe_jax.offload.residency import (
    Counts,
    ResidencyTable,
    Slot,
    SlotState,
    Wave,
    replay,
)

__all__ = [
    "EVICTION_POLICIES",
    "Counts",
    "EvictionPolicy",
    "Fifo",
    "Lfu",
    "Lru",
    "ResidencyTable",
    "Slot",
    "SlotState",
    "Wave",
    "belady_misses",
    "replay",
]
