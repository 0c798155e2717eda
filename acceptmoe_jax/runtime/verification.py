"""One verification as the host sees it: what observers are given and traces hold."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32


@dataclasses.dataclass(frozen=True)
class Verification:
    """The tree of a round, its accepted path and, where it was recorded, what routers said.

    Attributes:
      tokens, parent, depth, score, valid: of each node, as `DraftTree` has them.
      path: accepted rows, the root first; entries from `length` on are 0.
      length: accepted length, the bonus included, before any cut by a stop or a limit.
      logits: router logits of each MoE layer.
      eligible: S' of each MoE layer.
      used: experts that live picks went to.
    """

    tokens: Int32[np.ndarray, "T"]
    parent: Int32[np.ndarray, "T"]
    depth: Int32[np.ndarray, "T"]
    score: Float32[np.ndarray, "T"]
    valid: Bool[np.ndarray, "T"]
    path: Int32[np.ndarray, "n+1"]
    length: int
    logits: Float32[np.ndarray, "L T E"] | None = None
    eligible: Bool[np.ndarray, "L E"] | None = None
    used: Bool[np.ndarray, "L E"] | None = None

    @classmethod
    def from_round(cls, tree: Any, acceptance: Any, record: Any | None) -> "Verification":
        """Of a `DraftTree`, an `Acceptance` and perhaps a `LayerRecord`, all on the host."""
        recorded = {}
        if record is not None:
            recorded = {"logits": record.logits, "eligible": record.eligible, "used": record.used}
        return cls(
            tokens=tree.tokens,
            parent=tree.parent,
            depth=tree.depth,
            score=tree.score,
            valid=tree.valid,
            path=acceptance.rows,
            length=int(acceptance.length),
            **recorded,
        )

    @property
    def committed(self) -> Bool[np.ndarray, "T"]:
        """Nodes on the accepted path."""
        return np.isin(np.arange(len(self.tokens)), self.path[: self.length])
