"""What the programs of decoding take and return: the static set-up, weights, and states.

After prefill and after every round both caches hold `length` rows: the target's for the committed
tokens but the last, the head's likewise (row t pairs the target's states at t with token t + 1).
The last committed token, the root of the next tree, has no row yet.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from acceptmoe_jax.models import decoder
from acceptmoe_jax.models.attention import LayerCache, empty_cache
from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.eagle3 import Eagle3Config
from acceptmoe_jax.selection import SelectorConfig
from acceptmoe_jax.speculation import Acceptance, DraftTree, TreeConfig
from pallas_kernels.implementations import Implementations
from pallas_kernels.masked_expert_gemm import ExpertBank


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is static in every program: the two architectures, the tree, the kernels."""

    target: TargetConfig
    head: Eagle3Config | None
    capture: tuple[int, ...]  # target layers whose outputs the head reads, ascending
    owns_embedding: bool  # the head brings its own embedding
    tree: TreeConfig
    implementations: Implementations = Implementations()

    @property
    def spare_rows(self) -> int:
        """Cache rows a round needs beyond the committed ones."""
        return max(self.tree.nodes, self.tree.draft_rows, self.tree.max_accepted)

    def native(self) -> SelectorConfig:
        """Natural routing of this target."""
        return SelectorConfig(
            policy="native", top_k=self.target.top_k, norm_topk_prob=self.target.norm_topk_prob
        )


@flax.struct.dataclass
class Weights:
    """Parameters of the target and, if there is one, of the head."""

    target: dict[str, Any]
    banks: tuple[ExpertBank | None, ...]
    head: dict[str, Any] | None = None
    target_ids: Int[Array, "V_draft"] | None = None  # target token of each draft token


@flax.struct.dataclass
class DraftState:
    """What the head carries between rounds: its cache and the first level of the next tree."""

    cache: LayerCache
    topk_logp: Float[Array, "K"]
    topk_ids: Int[Array, "K"]
    hidden: Float[Array, "D"]


@flax.struct.dataclass
class DecodeState:
    """One sequence between two rounds. A batch has an axis B in front of every leaf.

    Attributes:
      length: rows in the caches.
      last_token: committed, but not in the caches yet.
      key: of the sequence's draws; what is drawn from the row at position p uses
        `fold_in(key, p)`, so a sequence does not depend on what runs beside it.
      active: whether it decodes. Rows of a sequence that does not are padding, and its caches
        stay as long as they are.
    """

    caches: tuple[LayerCache, ...]
    length: Int[Array, ""]
    last_token: Int[Array, ""]
    draft: DraftState | None
    key: PRNGKeyArray
    active: Bool[Array, ""]


@flax.struct.dataclass
class LayerCounts:
    """Set sizes of each MoE layer in one target forward."""

    natural_union: Int[Array, "L"]
    eligible: Int[Array, "L"]
    used: Int[Array, "L"]


@flax.struct.dataclass
class LayerRecord:
    """What a MoE layer's router said and its policy decided; stacked over layers in a `Round`."""

    logits: Float[Array, "T E"]
    eligible: Bool[Array, "E"]
    used: Bool[Array, "E"]  # by live picks


@flax.struct.dataclass
class Round:
    """What one verification did."""

    tree: DraftTree
    acceptance: Acceptance
    start: Int[Array, ""]  # cache row of the root
    logits: Float[Array, "n+1 V"]  # of the accepted rows
    counts: LayerCounts
    record: LayerRecord | None = None


@flax.struct.dataclass
class Audit:
    """The same block under native routing, compared on the accepted rows."""

    agreeing: Int[Array, ""]  # rows whose argmax is the same
    kl: Float[Array, ""]  # KL(native || restricted), nats, summed over the rows
    natural_length: Int[Array, ""]  # accepted length that native routing would have had


def empty_state(
    setup: Setup, rows: int, dtype: jnp.dtype, key: PRNGKeyArray | None = None
) -> DecodeState:
    """A state with nothing committed, of caches of `rows` positions; only draws read its key."""
    draft = None
    if setup.head is not None:
        width = setup.tree.top_k
        draft = DraftState(
            cache=empty_cache(rows, setup.head.num_kv_heads, setup.head.head_dim, dtype),
            topk_logp=jnp.zeros(width, jnp.float32),
            topk_ids=jnp.zeros(width, jnp.int32),
            hidden=jnp.zeros(setup.head.hidden_size, dtype),
        )
    return DecodeState(
        caches=decoder.empty_caches(setup.target, rows, dtype),
        length=jnp.int32(0),
        last_token=jnp.int32(0),
        draft=draft,
        key=jax.random.key(0) if key is None else key,
        active=jnp.bool_(True),
    )
