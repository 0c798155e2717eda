"""The settings of decoding with experts in host memory."""

import dataclasses

from acceptmoe_jax.offload.eviction import EVICTION_POLICIES
from acceptmoe_jax.offload.transfers import Link


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """How many experts a layer has on the device, who leaves, and what they come over.

    Attributes:
      slots: C, experts of each layer on the device.
      eviction: a name in `EVICTION_POLICIES`.
      link: the real one, or a modelled one on top of it.
      keep_residency: a prompt begins with the experts that the one before left. Otherwise it
        begins with none, so that its answer does not depend on what ran before: where experts
        are pruned by residency, tokens do.

    Raises:
      ValueError: naming the field.
    """

    slots: int
    eviction: str = "lru"
    link: Link = Link()
    keep_residency: bool = False

    def __post_init__(self):
        if self.eviction not in EVICTION_POLICIES:
            raise ValueError(
                f"eviction must be one of {', '.join(EVICTION_POLICIES)}; got {self.eviction!r}"
            )

    def check_experts(self, num_experts: int, top_k: int) -> None:
        """Refuses slots that cannot hold a token's experts, or more than there are.

        Raises:
          ValueError: if so.
        """
        if not top_k <= self.slots <= num_experts:
            raise ValueError(
                f"slots must lie between top_k = {top_k} and the layer's {num_experts} experts, "
                f"got {self.slots}"
            )
