"""Speculative decoding with a draft tree, apart from any model: growth, mask, accept, compaction.

One round: `grow` a `DraftTree` with a draft model, run the target over its T nodes under
`block_mask` and `positions`, `accept_greedy` the path the target agrees with, and `compact` the
caches. All functions are pure, of static shapes, and for one sequence.
"""

from acceptmoe_jax.speculation.accept import Acceptance, accept_greedy
from acceptmoe_jax.speculation.cache import compact
from acceptmoe_jax.speculation.config import TreeConfig
from acceptmoe_jax.speculation.mask import block_mask, positions, tree_mask
from acceptmoe_jax.speculation.tree import DraftStep, DraftTree, grow

__all__ = [
    "Acceptance",
    "DraftStep",
    "DraftTree",
    "TreeConfig",
    "accept_greedy",
    "block_mask",
    "compact",
    "grow",
    "positions",
    "tree_mask",
]
