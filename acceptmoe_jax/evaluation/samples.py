"""A sample as JSON: one model's answer to one problem under one method, scored, with its counts.

    {
      "prompt_tokens": 61, "token_ids": [...], "text": "...", "reasoning": "",
      "stop_reason": "...", "correct": true, "extracted": "12", "reason": "the answer is 12",
      "statistics": {"accepted_lengths": [4, 6, ...], "decode_seconds": 0.8, "used": [...], ...}
    }

`statistics` holds what `DecodeStatistics` does: set sizes are sums over verifications, of each
layer. Times apart (names that end in `_seconds`), the same command writes the same samples.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from acceptmoe_jax.evaluation.tasks import Score
from acceptmoe_jax.offload.loads import Loads
from acceptmoe_jax.offload.residency import Counts
from acceptmoe_jax.offload.transfers import Traffic
from acceptmoe_jax.runtime.requests import Generation
from acceptmoe_jax.runtime.statistics import DecodeStatistics

Sample = Mapping[str, Any]

_ARRAYS = ("nodes_by_depth", "natural_union", "eligible", "used")


def to_json(generation: Generation, score: Score) -> dict[str, Any]:
    """The sample of an answer and what it was judged to be."""
    statistics = generation.statistics
    arrays = {name: getattr(statistics, name).tolist() for name in _ARRAYS}
    return {
        "prompt_tokens": len(generation.prompt_ids),
        "token_ids": list(generation.token_ids),
        "text": generation.text,
        "reasoning": generation.reasoning,
        "stop_reason": generation.stop_reason,
        "correct": bool(score.correct),
        "extracted": score.extracted,
        "reason": score.reason,
        "statistics": dataclasses.asdict(statistics) | arrays,
    }


def statistics_of(sample: Sample) -> DecodeStatistics:
    """What was counted while a sample was decoded."""
    fields = dict(sample["statistics"])
    arrays = {name: np.array(fields.pop(name), np.int64) for name in _ARRAYS}
    moved = fields.pop("loads")
    traffic = (Traffic(**moved[name]) for name in ("traffic", "streamed"))
    statistics = DecodeStatistics(**fields, loads=Loads(Counts(**moved["table"]), *traffic))
    for name, array in arrays.items():
        setattr(statistics, name, array)
    return statistics
