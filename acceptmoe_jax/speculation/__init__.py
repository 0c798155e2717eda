"""Speculative decoding with a draft tree, apart from any model: growth, mask, accept, compaction.

One round: `grow` a `DraftTree` with a draft model, cut it with `keep_best` where that pays, run the
target over its T nodes under `block_mask` and `positions`, accept the path that the target agrees
with (`accept_greedy`) or that its draws fall on (`sampling.accept`), and `compact` the caches. All
device functions are pure, of static shapes, and for one sequence.
"""

from acceptmoe_jax.speculation.accept import Acceptance, accept_greedy
from acceptmoe_jax.speculation.cache import compact
from acceptmoe_jax.speculation.config import TreeConfig
from acceptmoe_jax.speculation.evict import (
    CostTable,
    choose_length,
    expected_tokens,
    keep_best,
)
from acceptmoe_jax.speculation.mask import block_mask, positions, tree_mask
from acceptmoe_jax.speculation.sampling import GREEDY, SamplingConfig, sample_token, target_logp
from acceptmoe_jax.speculation.tree import DraftStep, DraftTree, grow

__all__ = [
    "GREEDY",
    "Acceptance",
    "CostTable",
    "DraftStep",
    "DraftTree",
    "SamplingConfig",
    "TreeConfig",
    "accept_greedy",
    "block_mask",
    "choose_length",
    "compact",
    "expected_tokens",
    "grow",
    "keep_best",
    "positions",
    "sample_token",
    "target_logp",
    "tree_mask",
]
