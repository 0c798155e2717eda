"""The numbers of an ablation's rows, each with its interval: of live runs, and of replays."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from acceptmoe_jax.pocket import scoring
from acceptmoe_jax.pocket.records import Record
from acceptmoe_jax.runtime.requests import Generation
from acceptmoe_jax.traces.replay import ReplayResult
from acceptmoe_jax.traces.statistics import bootstrap_interval

# Numbers of a request, and what they are divided by, summed over requests.
Ratio = tuple[Sequence[float], Sequence[float]]

# Of the accepted rows' natural picks, and of the distinct experts among them, what was eligible.
RECALLS = ("recall_on_accepted_path", "set_recall_on_accepted_path")


def measured(ratios: Mapping[str, Ratio]) -> dict[str, Any]:
    """Ratios of sums over requests, and under "intervals" their 95 % bootstrap intervals.

    Both are None where there is nothing to divide by.
    """
    values: dict[str, Any] = {}
    intervals: dict[str, list[float] | None] = {}
    for name, (parts, wholes) in ratios.items():
        total = float(np.sum(wholes))
        values[name] = float(np.sum(parts)) / total if total else None
        intervals[name] = list(bootstrap_interval(parts, wholes)) if total else None
    return values | {"intervals": intervals}


def live(records: Sequence[Record], generations: Sequence[Generation]) -> dict[str, Any]:
    """What decoding the records under a policy came to, audited.

    Set sizes and waves are means a layer and verification, `h2d_bytes_per_token` is of tokens that
    verifications emitted; what is moved is missing where nothing was.

    Args:
      records: the tasks, one a generation.
      generations: their answers.
    """
    statistics = [generation.statistics for generation in generations]
    correct = [scoring.is_correct(r, g.text) for r, g in zip(records, generations, strict=True)]
    verifications = [s.verifications for s in statistics]
    rows = [s.audited_rows for s in statistics]
    ratios: dict[str, Ratio] = {
        "used": ([s.used.mean() for s in statistics], verifications),
        "eligible": ([s.eligible.mean() for s in statistics], verifications),
        "agreement": ([s.agreeing_rows for s in statistics], rows),
        "kl": ([s.kl_sum for s in statistics], rows),
        "accuracy": (correct, [1] * len(correct)),
        "accepted_length": ([sum(s.accepted_lengths) for s in statistics], verifications),
    }
    tables = [s.loads.table for s in statistics]
    if any(table.waves for table in tables):
        decoded = [len(generation.token_ids) - 1 for generation in generations]
        forwards = [s.verifications * s.num_layers for s in statistics]
        ratios |= {
            "h2d_bytes_per_token": ([s.loads.traffic.bytes for s in statistics], decoded),
            "hit_rate": ([t.hits for t in tables], [t.hits + t.misses for t in tables]),
            "waves": ([table.waves for table in tables], forwards),
        }
    families = dict.fromkeys(record.family for record in records)
    return measured(ratios) | {
        "accuracy_by_family": {
            family: float(np.mean([c for r, c in zip(records, correct) if r.family == family]))
            for family in families
        },
        "samples": len(records),
        "verifications": sum(verifications),
        "audited_rows": sum(rows),
        "tokens": sum(len(generation.token_ids) for generation in generations),
        "correct": [int(each) for each in correct],
    }


def replayed(
    results: Iterable[ReplayResult], lengths: Sequence[int], expert_bytes: int | None
) -> dict[str, Any]:
    """What a policy makes of a native trace: recall on the accepted path, and with slots traffic.

    `replayed_h2d_bytes_per_token` is of accepted tokens, which are not cut by stops.

    Args:
      results: of each request.
      lengths: accepted lengths of each request, summed.
      expert_bytes: of one expert.
    """
    results = list(results)
    sums = [
        {name: int(counts.sum()) for name, counts in vars(r).items() if counts is not None}
        for r in results
    ]

    def of(name: str) -> list[int]:
        return [each[name] for each in sums]

    layers = [result.used.size for result in results]
    ratios: dict[str, Ratio] = {
        RECALLS[0]: (of("path_picks_kept"), of("path_picks")),
        RECALLS[1]: (of("path_experts_kept"), of("path_experts")),
        "replayed_used": (of("used"), layers),
        "replayed_natural_union": (of("natural_union"), layers),
        "replayed_displaced": (of("displaced"), layers),
    }
    if results and results[0].misses is not None:
        used = np.add(of("hits"), of("misses"))
        ratios |= {"replayed_hit_rate": (of("hits"), used), "replayed_waves": (of("waves"), layers)}
        if expert_bytes is not None:
            moved = np.multiply(of("misses"), expert_bytes)
            ratios["replayed_h2d_bytes_per_token"] = (moved, lengths)
    return measured(ratios)


def joined(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """One row of several: their keys together, and their intervals together."""
    row: dict[str, Any] = {"intervals": {}}
    for part in parts:
        row |= {name: value for name, value in part.items() if name != "intervals"}
        row["intervals"] |= part.get("intervals", {})
    return row


def against_native(row: Mapping[str, Any], native: Mapping[str, Any]) -> dict[str, Any]:
    """How much more accurate a row is than Standard SD's on the same tasks, pair by pair."""
    more = np.subtract(row["correct"], native["correct"])
    return measured({"accuracy_against_native": (more, np.ones(len(more)))})
