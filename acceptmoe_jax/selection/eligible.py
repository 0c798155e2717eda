"""The eligible set of a layer: the experts of a policy, then what residency adds and removes.

A set is a mask, bool[E], so that shapes stay static whatever its size. Orders come from pairwise
comparisons instead of sorts: at E = 128 that is one small elementwise block, and it fits a kernel.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from acceptmoe_jax.selection.demand import descending_rank


def anchored_set(
    q: Float[Array, "E"],
    anchor: Bool[Array, "E"],
    size: Int[Array, ""] | int,
    at_least: int = 0,
) -> Bool[Array, "E"]:
    """`S = A | (rank(q) < size & q > 0)`: the anchor and the most demanded experts outside it.

    Args:
      q: residual demand, 0 on the anchor.
      anchor: experts that are always eligible.
      size: experts to add; those without demand are never added for it.
      at_least: experts of highest q that are in the set even without demand. Meaningful with an
        empty anchor only, where nothing else guarantees a row its top-k.
    """
    rank = descending_rank(q)
    return anchor | ((rank < size) & (q > 0)) | (rank < at_least)


def displaced_assignments(
    eligible: Bool[Array, "E"], displacement: Real[Array, "E"]
) -> Real[Array, ""]:
    """`a(S) = sum of v outside S`: natural assignments that forming S already rerouted.

    Args:
      eligible: S.
      displacement: of each expert: its natural assignments v, or by weight, from
        `selector.displacement`. The sum is of the same kind.
    """
    outside = jnp.where(eligible, 0, displacement)
    return outside.sum(dtype=outside.dtype)


def admit(
    eligible: Bool[Array, "E"],
    resident: Bool[Array, "E"],
    demand: Float[Array, "E"],
    most: int,
) -> Bool[Array, "E"]:
    """`R`, the experts to let back in: at most `most` resident ones with demand outside the set.

    Those of the largest demand (ties: lower index first). None of them needs a transfer.
    """
    outside = resident & ~eligible & (demand > 0)
    return outside & (descending_rank(jnp.where(outside, demand, 0.0)) < most)


def prune(
    eligible: Bool[Array, "E"],
    removable: Bool[Array, "E"],
    demand: Float[Array, "E"],
    displacement: Real[Array, "E"],
    budget: Real[Array, ""],
    top_k: int,
) -> Bool[Array, "E"]:
    """`D`, the experts to drop: the longest affordable prefix of the removable ones.

    `D` is the longest prefix of `removable` in ascending demand (ties: lower index first) whose
    displacement (counts or weights, as the budget) adds up to at most `budget` and that leaves
    `top_k` experts eligible. Both conditions only tighten along the order, rounded sums of weights
    too, so testing each prefix by itself gives that prefix.
    """
    index = jnp.arange(demand.shape[0])
    not_after_EE = (demand[:, None] < demand[None, :]) | (
        (demand[:, None] == demand[None, :]) & (index[:, None] <= index[None, :])
    )
    prefix_EE = removable[:, None] & not_after_EE
    prefix_displacement = jnp.where(prefix_EE, displacement[:, None], 0).sum(axis=0)
    prefix_size = prefix_EE.sum(axis=0)
    affordable = (prefix_displacement <= budget) & (eligible.sum() - prefix_size >= top_k)
    return removable & affordable
