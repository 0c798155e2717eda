"""What forwards asked of the link, added up."""

import dataclasses
import operator

from acceptmoe_jax.offload.residency import Counts
from acceptmoe_jax.offload.transfers import Traffic


@dataclasses.dataclass(frozen=True)
class Loads:
    """Totals over layers.

    Attributes:
      table: hits, misses and waves of the residency tables; streaming does not touch them.
      traffic: records moved for the tables.
      streamed: records moved by prefill and audits.
    """

    table: Counts = Counts()
    traffic: Traffic = Traffic()
    streamed: Traffic = Traffic()

    def __add__(self, other: "Loads") -> "Loads":
        """Both together, such as two requests'."""
        return self._with(operator.add, other)

    def __sub__(self, earlier: "Loads") -> "Loads":
        """What happened since an earlier reading."""
        return self._with(operator.sub, earlier)

    def _with(self, combine, other: "Loads") -> "Loads":
        names = [field.name for field in dataclasses.fields(self)]
        return Loads(*(combine(getattr(self, name), getattr(other, name)) for name in names))
