"""Sampling from the target: its filtered distribution, one draw, and the accept walk by draws.

The accept walk is target-only tree sampling: whatever the tree holds, the emitted tokens are
distributed as the target's own, to the resolution of a float32 draw. The draft decides only how
many of them one verification emits. Axes: V the target's vocabulary; T and n as in `DraftTree` and
`Acceptance`. All functions are pure, for one sequence, and may be jitted (with a static config) and
vmapped.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from acceptmoe_jax.speculation.accept import Acceptance, accept_greedy, outcome
from acceptmoe_jax.speculation.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn from the target's logits. The default is greedy decoding.

    The filters act in the order of the fields, as in Hugging Face's and SGLang's samplers.

    Attributes:
      temperature: the logits are divided by it; 0 takes the first maximum.
      top_k: only the k most probable tokens can be drawn; None keeps all. Exactly k are kept: of
        tokens that tie at the k-th place those of lower id.
      top_p: of those, renormalised, only the smallest set of the most probable tokens whose
        probabilities reach this sum; the token that reaches it is kept, hence at least one. Of
        tokens that tie those of lower id come first.

    Raises:
      ValueError: naming the field, when a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and not negative, not {self.temperature}")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise ValueError(
                f"top_k must be a whole number of at least 1 or None, not {self.top_k}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is left to chance: temperature 0, or a single token to draw from."""
        return self.temperature == 0 or self.top_k == 1


GREEDY = SamplingConfig()


def target_logp(logits: Float[Array, "V"], config: SamplingConfig) -> Float32[Array, "V"]:
    """Returns the log-probabilities that tokens are drawn with: -inf for what a filter removed.

    Args:
      logits: the target's, of any float type; at least one is finite.
      config: temperature and filters. A greedy one leaves the first maximum alone.
    """
    size = logits.shape[0]
    if config.greedy:
        return jnp.where(jnp.arange(size) == jnp.argmax(logits), 0.0, -jnp.inf)
    logits = logits.astype(jnp.float32)
    # Differences first, and a divisor whose inverse float32 holds too: never infinite, never NaN.
    tiny = float(np.finfo(np.float32).tiny)
    temperature = min(max(config.temperature, tiny), 1 / tiny)
    # As -|x|, since all zeros then have one sign: top_k ranks -0.0 below 0.0.
    scaled = -jnp.abs(logits - jnp.max(logits)) / temperature
    if config.top_k is None and config.top_p == 1:
        return jax.nn.log_softmax(scaled)

    best, ids = jax.lax.top_k(scaled, size if config.top_k is None else min(config.top_k, size))
    if config.top_p < 1:
        probability = jax.nn.softmax(best)
        mass_before = jnp.cumsum(probability) - probability
        keep = (mass_before < config.top_p).at[0].set(True)
        best = jnp.where(keep, best, -jnp.inf)
    return jnp.full(size, -jnp.inf).at[ids].set(jax.nn.log_softmax(best))


def sample_token(
    logits: Float[Array, "V"], config: SamplingConfig, key: PRNGKeyArray
) -> Int[Array, ""]:
    """Draws one token; a greedy config takes the first maximum and ignores the key."""
    if config.greedy:
        return jnp.argmax(logits).astype(jnp.int32)
    return jax.random.categorical(key, target_logp(logits, config)).astype(jnp.int32)


def accept(
    tree: DraftTree,
    logits: Float[Array, "T V"],
    config: SamplingConfig,
    key: PRNGKeyArray,
    max_accepted: int,
) -> Acceptance:
    """Walks from the root, at each node to the child that a draw of its own falls on.

    The valid children divide the unit interval in ascending node number, each a part as long as
    its token's target probability. A draw beyond them all ends the walk, and the last token is
    drawn anew from the target's distribution without the children's tokens: with the walk's own
    draw it would be biased. Of children with the same token the first has all of its probability.
    A greedy config is `accept_greedy`, and ignores the key.

    Args:
      tree: the verified tree.
      logits: the target's logits after each node. Only rows on the path become distributions.
      config: the target's temperature and filters.
      key: decides the outcome; to be used once.
      max_accepted: n + 1, the most tokens to emit (`TreeConfig.max_accepted`).
    """
    if config.greedy:
        return accept_greedy(tree, jnp.argmax(logits, axis=-1), max_accepted)
    nodes, vocabulary = logits.shape
    logits, tokens = jnp.asarray(logits), jnp.asarray(tree.tokens)
    nowhere = nodes  # nobody's parent, so that a walk that stopped stays stopped
    twins = (tree.parent[:, None] == tree.parent) & (tokens[:, None] == tokens) & tree.valid
    has_elder_twin = jnp.any(twins & np.tri(nodes, k=-1, dtype=bool), axis=1)
    may_be_taken = tree.valid & ~has_elder_twin

    def step(node, key):
        """Emits a token of the node's distribution; returns the child that it is, or `nowhere`."""
        walk_key, bonus_key = jax.random.split(key)
        logp = target_logp(logits[node], config)
        children = may_be_taken & (tree.parent == node)
        rejected = jnp.zeros(vocabulary, bool).at[tokens].max(children)
        rest_logp = jnp.where(rejected, -jnp.inf, logp)

        part = jnp.where(children, jnp.exp(logp[tokens]), 0.0)
        reach = jnp.cumsum(part)
        # The draw is from what all parts add up to, not from 1: where no other token is left,
        # rounding cannot put it beyond the children; nor may it fall on one of probability 0.
        total = jnp.max(reach, where=part > 0, initial=0.0) + jnp.sum(jnp.exp(rest_logp))
        falls_inside = (jax.random.uniform(walk_key) * total < reach) & (part > 0)
        taken = jnp.any(falls_inside)
        child = jnp.argmax(falls_inside).astype(jnp.int32)
        bonus = jax.random.categorical(bonus_key, rest_logp).astype(jnp.int32)
        token = jnp.where(taken, tokens[child], bonus)
        return jnp.where(taken, child, nowhere), (node, token)

    # A child taken at the last step is emitted like any token, and not walked to.
    _, (path, emitted) = jax.lax.scan(step, jnp.int32(0), jax.random.split(key, max_accepted))
    return outcome(path, emitted, path < nowhere)
