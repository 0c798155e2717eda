"""Audits of a lossy policy: when to verify natively as well, and when to stop trusting it."""

import dataclasses

from acceptmoe_jax.errors import UserError

# Rows that a rate is judged by at least: a handful of rows would trip the gate by chance.
FEWEST_ROWS = 50


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """How often a run verifies natively as well, and what it tolerates.

    Attributes:
      every: audits every so manieth verification; 0 none.
      max_disagreement: the share of audited rows whose top-1 may differ from native routing's. A
        run that passes it, judged from 50 rows on, goes on natively. None tolerates anything.

    Raises:
      UserError: naming the field.
    """

    every: int = 0
    max_disagreement: float | None = None

    def __post_init__(self):
        if self.every < 0:
            raise UserError(f"audit_every must be 0 or more, not {self.every}")
        if self.max_disagreement is not None:
            if not 0 <= self.max_disagreement < 1:
                raise UserError(
                    f"max_disagreement is a share of rows below 1, not {self.max_disagreement}"
                )
            if not self.every:
                raise UserError("max_disagreement needs audits: set audit_every")


class QualityGate:
    """The audits of one run.

    Attributes:
      closed: the audited rate passed the limit; native routing from here on.
    """

    def __init__(self, config: AuditConfig):
        self.config = config
        self.closed = False
        self._verifications = self._rows = self._agreeing = 0

    def is_due(self) -> bool:
        """Whether the next verification is to be audited; counts it."""
        self._verifications += 1
        every = self.config.every
        return bool(every) and not self.closed and self._verifications % every == 0

    def add(self, rows: int, agreeing: int) -> None:
        """Adds an audit, and closes the gate where it decides so."""
        self._rows += rows
        self._agreeing += agreeing
        limit = self.config.max_disagreement
        if limit is not None and self._rows >= FEWEST_ROWS:
            self.closed |= self.disagreement > limit

    @property
    def disagreement(self) -> float:
        """Share of the audited rows whose top-1 differed; 0 if there were none."""
        return 1 - self._agreeing / self._rows if self._rows else 0.0
