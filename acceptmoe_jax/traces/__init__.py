"""Traces: recorded verifications on disk, policies replayed on them, and their statistics.

    from acceptmoe_jax.traces import Trace, replay

    trace = Trace.open("runs/trace")
    for result in replay.replay_trace(trace, trace.settings.commitment(), config, slots=48):
        print(result.recall, result.hit_rate)

`python -m experiments.record_traces` makes them, by `recording`; `format` says how they lie on
disk; `statistics` are functions of their arrays.
"""

from acceptmoe_jax.traces.format import TraceSettings, Verifications, prompt_hash
from acceptmoe_jax.traces.reader import Shard, Trace
from acceptmoe_jax.traces.writer import TraceWriter

__all__ = [
    "Shard",
    "Trace",
    "TraceSettings",
    "TraceWriter",
    "Verifications",
    "prompt_hash",
]
