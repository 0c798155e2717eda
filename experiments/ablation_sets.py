"""What an ablation reads off its native trace beside rows: memberships, and phat by depth."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from acceptmoe_jax.selection import CommitmentTable
from acceptmoe_jax.traces import Trace, statistics
from experiments.ablation_rows import measured

_PAD = 16  # verifications; requests are padded to multiples, so that few programs are compiled

_natural_assignments = jax.jit(statistics.natural_assignments, static_argnames="top_k")


def natural_ranks(trace: Trace, top_k: int) -> Int[np.ndarray, "N L E"]:
    """The place of each expert by its natural assignments in the block, from 0; ties go to the
    lower id."""
    assignments = [np.zeros((0, trace.settings.num_layers, trace.settings.num_experts), np.int32)]
    for _, verifications in trace.requests():
        count = len(verifications)
        logits, valid = (
            np.concatenate([array, np.zeros((-count % _PAD, *array.shape[1:]), array.dtype)])
            for array in (verifications.logits, verifications.valid)
        )
        counted = _natural_assignments(logits, valid[:, None], top_k=top_k)
        assignments.append(np.asarray(counted)[:count])
    order = np.argsort(-np.concatenate(assignments), axis=-1, kind="stable")
    return np.argsort(order, axis=-1)


def overlaps(
    sets: Mapping[str, Bool[np.ndarray, "N L E"]], counts: Sequence[int]
) -> list[dict[str, Any]]:
    """The mean Jaccard index of each two policies' sets, over verifications and layers.

    Args:
      sets: by policy.
      counts: verifications of each request.
    """
    rows = []
    for a, b in itertools.combinations(sets, 2):
        index = np.asarray(statistics.overlap(sets[a], sets[b]), np.float64)
        ratio = (_per_request(index.mean(axis=1), counts), counts)
        rows.append({"a": a, "b": b} | measured({"jaccard": ratio}))
    return rows


def commitment_by_depth(trace: Trace, table: CommitmentTable | None) -> list[dict[str, Any]]:
    """How often each depth was reached in the trace, beside what a commitment table says.

    Args:
      trace: under native routing.
      table: None where there is none.
    """
    depths = trace.settings.tree.max_accepted
    path, length, depth, valid = map(trace.tensor, ("path", "length", "depth", "valid"))
    counts = [shard.verifications for shard in trace.shards]
    # Of each verification by itself: what the statistics sum over becomes an axis of one.
    path, length, depth, valid = (array[:, None] for array in (path, length, depth, valid))
    reached = _per_request(jax.vmap(statistics.reach)(path, length, depth), counts)
    in_depths = jax.vmap(lambda d, v: statistics.nodes_by_depth(d, v, depths))
    nodes = _per_request(in_depths(depth, valid), counts)
    return [
        {"depth": at, "table": None if table is None else table.phat[at]}
        | measured(
            {"phat": (reached[:, at], counts), "phat_of_a_node": (reached[:, at], nodes[:, at])}
        )
        for at in range(depths)
    ]


def _per_request(values, counts: Sequence[int]) -> np.ndarray:
    """Sums over each request's verifications, of an array with those of all in the first axis."""
    running = np.cumsum(np.asarray(values, np.float64), axis=0)
    running = np.concatenate([np.zeros((1, *running.shape[1:])), running])
    ends = np.cumsum([0, *counts])
    return running[ends[1:]] - running[ends[:-1]]
