"""Verifier-side expert selection: which experts a verification block may use, a layer at a time.

`select` is the whole of it; the functions it is made of are public for kernels and tests, which
must agree with them. Nothing here knows about models, caches or devices.
"""

from acceptmoe_jax.selection.commitment import CommitmentTable, config_hash
from acceptmoe_jax.selection.config import POLICIES, SelectorConfig
from acceptmoe_jax.selection.demand import (
    commitment_weights,
    descending_rank,
    entropy,
    expert_demand,
    path_weights,
    residual_distribution,
    residual_size,
    router_mass,
    selected_experts,
)
from acceptmoe_jax.selection.eligible import admit, anchored_set, displaced_assignments, prune
from acceptmoe_jax.selection.path_calibration import PathTable, fit_path_commitment
from acceptmoe_jax.selection.path_commitment import Commitment, PathCommitment, node_commitment
from acceptmoe_jax.selection.routing import (
    cache_bonus,
    dispatch,
    dispatch_truncated,
    natural_routing,
    used_experts,
)
from acceptmoe_jax.selection.selector import SelectionResult, displacement, policy_set, select

__all__ = [
    "POLICIES",
    "Commitment",
    "CommitmentTable",
    "PathCommitment",
    "PathTable",
    "SelectionResult",
    "SelectorConfig",
    "admit",
    "anchored_set",
    "cache_bonus",
    "commitment_weights",
    "config_hash",
    "descending_rank",
    "dispatch",
    "dispatch_truncated",
    "displaced_assignments",
    "displacement",
    "entropy",
    "expert_demand",
    "fit_path_commitment",
    "natural_routing",
    "node_commitment",
    "path_weights",
    "policy_set",
    "prune",
    "residual_distribution",
    "residual_size",
    "router_mass",
    "select",
    "selected_experts",
    "used_experts",
]
