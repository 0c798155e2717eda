"""What decoding counts: a prompt's own numbers, and a method's summary over prompts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from acceptmoe_jax.offload.loads import Loads


@dataclasses.dataclass
class DecodeStatistics:
    """Running totals of one generation; the engine adds to it after every target forward.

    Attributes:
      accepted_lengths: of each verification, the bonus included, before any cut by a stop or the
        token limit. A plain autoregressive step counts as a verification that emits one token.
      nodes_by_depth: valid tree nodes at each depth, summed over verifications.
      natural_union, eligible, used: set sizes of each MoE layer, summed over verifications.
      audited_rows, agreeing_rows, kl_sum: accepted rows compared with native routing, those of the
        same argmax, and the sum of their KL(native || restricted) in nats.
      audits, natural_rows: verifications audited, and the tokens that native routing would have
        accepted of their trees.
      fallback_verifications: that ran natively because audits had found too much disagreement.
      decode_seconds: wall time of the verifications, from dispatch until their tokens are on the
        host; neither prefill, compilation nor audits.
      prefill_seconds, compile_seconds: those two, apart.
      loads: of the verifications, where experts are offloaded.
      prefill_bytes: of experts that prefill streamed.
    """

    num_layers: int
    max_depth: int
    accepted_lengths: list[int] = dataclasses.field(default_factory=list)
    audited_rows: int = 0
    agreeing_rows: int = 0
    kl_sum: float = 0.0
    audits: int = 0
    natural_rows: int = 0
    fallback_verifications: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    loads: Loads = Loads()
    prefill_bytes: int = 0

    def __post_init__(self):
        self.nodes_by_depth = np.zeros(self.max_depth + 1, np.int64)
        self.natural_union, self.eligible, self.used = np.zeros((3, self.num_layers), np.int64)

    def add_forward(
        self, accepted: int, counts: Any, depths: np.ndarray, seconds: float, loads: Loads
    ) -> None:
        """Adds one target forward.

        Args:
          accepted: its accepted length.
          counts: `LayerCounts` on the host.
          depths: depths of its valid nodes.
          seconds: its wall time.
          loads: what it moved.
        """
        self.accepted_lengths.append(accepted)
        self.nodes_by_depth += np.bincount(depths, minlength=self.nodes_by_depth.size)
        self.natural_union += counts.natural_union
        self.eligible += counts.eligible
        self.used += counts.used
        self.decode_seconds += seconds
        self.loads += loads

    def add_audit(self, rows: int, agreeing: int, kl: float, natural: int) -> None:
        """Adds the comparison of one verification with native routing, which accepts `natural`."""
        self.audits += 1
        self.natural_rows += natural
        self.audited_rows += rows
        self.agreeing_rows += agreeing
        self.kl_sum += kl

    @property
    def verifications(self) -> int:
        return len(self.accepted_lengths)

    @property
    def reach(self) -> np.ndarray:
        """Verifications whose accepted path holds a node at each depth, the root at 0."""
        depths = np.arange(self.nodes_by_depth.size)
        return np.sum(np.asarray(self.accepted_lengths, int)[:, None] > depths, axis=0)


def summarise(statistics: Sequence[DecodeStatistics], tokens: int) -> dict[str, Any]:
    """The summary of a method over its generations.

    Args:
      statistics: one for each prompt.
      tokens: tokens emitted in all, after cuts by stops and limits.

    Returns:
      `tokens`, `decoded_tokens` (without each prompt's first, which prefill yields), `seconds`
      (decoding only), `tokens_per_second` (of decoded tokens), `accepted_length`, the mean set
      sizes per layer and verification, and the quality beside them; a mean of nothing is None.
      Where experts were moved also what that took (see `_traffic`).
    """
    verifications = sum(s.verifications for s in statistics)
    rows = sum(s.audited_rows for s in statistics)
    seconds = sum(s.decode_seconds for s in statistics)
    decoded = tokens - len(statistics)

    def per_layer(name: str) -> float | None:
        totals = sum(getattr(s, name) for s in statistics)
        return _ratio(float(np.mean(totals)), verifications)

    return {
        "tokens": tokens,
        "decoded_tokens": decoded,
        "seconds": seconds,
        "tokens_per_second": _ratio(decoded, seconds),
        "accepted_length": _ratio(sum(sum(s.accepted_lengths) for s in statistics), verifications),
        "natural_union": per_layer("natural_union"),
        "eligible": per_layer("eligible"),
        "used": per_layer("used"),
        "agreement_with_native": _ratio(sum(s.agreeing_rows for s in statistics), rows),
        "kl_on_accepted_rows": _ratio(sum(s.kl_sum for s in statistics), rows),
        "differing_tokens": rows - sum(s.agreeing_rows for s in statistics) if rows else None,
        "natural_accepted_length": _ratio(
            sum(s.natural_rows for s in statistics), sum(s.audits for s in statistics)
        ),
        "audited_rows": rows,
        "fallback_share": _ratio(sum(s.fallback_verifications for s in statistics), verifications),
        "verifications": verifications,
        "verified_nodes": _ratio(
            sum(int(s.nodes_by_depth.sum()) for s in statistics), verifications
        ),
        "prefill_seconds": sum(s.prefill_seconds for s in statistics),
        "compile_seconds": sum(s.compile_seconds for s in statistics),
    } | _traffic(statistics, decoded, seconds)


def _traffic(
    statistics: Sequence[DecodeStatistics], decoded: int, seconds: float
) -> dict[str, float | None]:
    """Of the verifications: bytes a decoded token, hit rate on unique used experts, share of the
    time in which the host waited for experts, waves per layer and verification. Prefill's bytes
    stand apart, and audits' are not counted. Empty where nothing was moved."""
    loads = sum((s.loads for s in statistics), Loads())
    prefill = sum(s.prefill_bytes for s in statistics)
    if not loads.table.waves and not prefill:
        return {}
    forwards = sum(s.verifications * s.num_layers for s in statistics)
    return {
        "h2d_bytes_per_token": _ratio(loads.traffic.bytes, decoded),
        "hit_rate": loads.table.hit_rate,
        "misses": _ratio(loads.table.misses, forwards),
        "wait_share": _ratio(loads.traffic.wait_seconds, seconds),
        "waves": _ratio(loads.table.waves, forwards),
        "prefill_bytes": prefill,
    }


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None
