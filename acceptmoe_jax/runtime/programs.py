"""The jitted programs of resident decoding: prefill, one plain step, one round, one audit.

Each is a pure function of (static setup, weights, state, ...) with static shapes, so one compiled
program serves every prompt of a cache length and every round. The state is donated by its caller.

After prefill and after every round both caches hold `length` rows: the target's for the committed
tokens but the last, the head's likewise (row t pairs the target's states at t with token t + 1).
The last committed token, the root of the next tree, has no row yet.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.models import decoder
from acceptmoe_jax.models.attention import LayerCache, causal_mask, empty_cache
from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.eagle3 import Eagle3Config, Eagle3Head
from acceptmoe_jax.selection import SelectorConfig, select
from acceptmoe_jax.speculation import (
    Acceptance,
    DraftTree,
    TreeConfig,
    accept_greedy,
    block_mask,
    compact,
    grow,
    positions,
)
from pallas_kernels.masked_expert_gemm import ExpertBank, masked_expert_gemm


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is static in every program: the two architectures and the tree."""

    target: TargetConfig
    head: Eagle3Config | None
    capture: tuple[int, ...]  # target layers whose outputs the head reads, ascending
    owns_embedding: bool  # the head brings its own embedding
    tree: TreeConfig
    expert_implementation: str = "blocks"

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
    """One sequence between two rounds."""

    caches: tuple[LayerCache, ...]
    length: Int[Array, ""]  # rows in the caches
    last_token: Int[Array, ""]  # committed, but not in the caches yet
    draft: DraftState | None


@flax.struct.dataclass
class LayerCounts:
    """Set sizes of each MoE layer in one target forward."""

    natural_union: Int[Array, "L"]
    eligible: Int[Array, "L"]
    used: Int[Array, "L"]


@flax.struct.dataclass
class Round:
    """What one verification did."""

    tree: DraftTree
    acceptance: Acceptance
    start: Int[Array, ""]  # cache row of the root
    logits: Float[Array, "n+1 V"]  # of the accepted rows
    counts: LayerCounts


@flax.struct.dataclass
class Audit:
    """The same block under native routing, compared on the accepted rows."""

    agreeing: Int[Array, ""]  # rows whose argmax is the same
    kl: Float[Array, ""]  # KL(native || restricted), nats, summed over the rows


def empty_state(setup: Setup, rows: int, dtype: jnp.dtype) -> DecodeState:
    """A state with nothing committed and caches of `rows` positions."""
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
    )


def prefill_chunk(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    tokens: Int[Array, "T"],
    count: Int[Array, ""],
    next_token: Int[Array, ""],
) -> DecodeState:
    """Appends `count` prompt tokens, padded to T rows, under natural routing.

    Args:
      next_token: the prompt's token after this chunk, or -1 after the last chunk, where the
        target's greedy choice follows.
    """
    rows = tokens.shape[0]
    place = jnp.arange(rows)
    root = jnp.zeros(rows, jnp.int32)
    moe = _moe(setup, setup.native(), root, place < count, jnp.ones(1), None)
    mask = causal_mask(state.length, rows, _cache_rows(state))
    out = _target(setup, weights, state, tokens, state.length + place, mask, moe)
    logits = _unembed(setup, weights, out.hidden[count - 1])
    following = jnp.where(next_token < 0, jnp.argmax(logits), next_token).astype(jnp.int32)
    draft = state.draft
    if draft is not None:
        shifted = jnp.where(place == count - 1, following, jnp.roll(tokens, -1))
        draft = _draft_extend(setup, weights, draft, state.length, shifted, out.captured, count)
    return DecodeState(out.caches, state.length + count, following, draft)


def autoregressive_step(
    setup: Setup, weights: Weights, state: DecodeState
) -> tuple[DecodeState, LayerCounts]:
    """Appends the last token's row and chooses the next token greedily; the head rests."""
    moe = _moe(setup, setup.native(), jnp.zeros(1, jnp.int32), jnp.ones(1, bool), jnp.ones(1), None)
    mask = causal_mask(state.length, 1, _cache_rows(state))
    row = state.last_token[None]
    out = _target(setup, weights, state, row, state.length[None], mask, moe)
    token = jnp.argmax(_unembed(setup, weights, out.hidden[0])).astype(jnp.int32)
    return DecodeState(out.caches, state.length + 1, token, state.draft), _stack(out.moe)


def speculative_round(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    phat: Float[Array, "P"],
    eligible_override: Bool[Array, "L E"] | None = None,
    *,
    selector: SelectorConfig,
) -> tuple[DecodeState, Round]:
    """Draft a tree, verify it under `selector`, accept, compact, draft-extend.

    Args:
      phat: commitment probability by depth.
      eligible_override: the eligible set of each MoE layer as data, in place of the policy's.
      selector: the policy.
    """
    start = state.length
    with jax.named_scope("draft"):
        tree, draft_cache = grow(
            lambda *step: _draft_step(setup, weights, start, *step),
            state.draft.cache,
            state.draft.topk_logp,
            state.draft.topk_ids,
            state.draft.hidden,
            state.last_token,
            setup.tree,
        )
    with jax.named_scope("verify"):
        out, logits = _verify(setup, weights, state, tree, phat, selector, eligible_override)
    with jax.named_scope("accept"):
        argmax = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        accepted = accept_greedy(tree, argmax, setup.tree.max_accepted)
        caches = compact(out.caches, accepted.rows, accepted.length, start)
    with jax.named_scope("draft_extend"):
        draft = _draft_extend(
            setup,
            weights,
            state.draft.replace(cache=draft_cache),
            start,
            accepted.tokens,
            out.captured[accepted.rows],
            accepted.length,
        )
    state = DecodeState(caches, start + accepted.length, accepted.bonus, draft)
    return state, Round(tree, accepted, start, logits[accepted.rows], _stack(out.moe))


def audit_round(
    setup: Setup, weights: Weights, state: DecodeState, done: Round
) -> tuple[DecodeState, Audit]:
    """Verifies the block of `done` once more under native routing; the state stays as it is.

    The committed prefix is still in the caches; the accepted rows, which the second pass
    overwrites, are put back. So the next round goes on from the restricted pass's rows.
    """
    emitted = setup.tree.max_accepted
    saved = jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, done.start, emitted, 0), state.caches
    )
    before = state.replace(length=done.start)
    out, logits = _verify(setup, weights, before, done.tree, jnp.ones(1), setup.native(), None)
    caches = jax.tree.map(
        lambda leaf, rows: jax.lax.dynamic_update_slice_in_dim(leaf, rows, done.start, 0),
        out.caches,
        saved,
    )
    counted = jnp.arange(emitted) < done.acceptance.length
    native = logits[done.acceptance.rows]
    same = jnp.argmax(native, axis=-1) == jnp.argmax(done.logits, axis=-1)
    native_logp = jax.nn.log_softmax(native)
    kl = jnp.sum(jnp.exp(native_logp) * (native_logp - jax.nn.log_softmax(done.logits)), axis=-1)
    return state.replace(caches=caches), Audit(
        agreeing=jnp.sum(same & counted, dtype=jnp.int32), kl=jnp.sum(jnp.where(counted, kl, 0))
    )


def _cache_rows(state: DecodeState) -> int:
    return state.caches[0].k.shape[0]


def _moe(setup, selector, depth, valid, phat, eligible_override):
    """The `MoeFunction` of serving: select, run the experts, count. Overrides go by MoE layer."""

    def moe(layer, x, logits, bank):
        override = None
        if eligible_override is not None:
            override = eligible_override[setup.target.moe_layers.index(layer)]
        chosen = select(logits, depth, valid, phat, config=selector, eligible_override=override)
        y = masked_expert_gemm(
            x,
            bank,
            chosen.expert_ids,
            jnp.where(valid[:, None], chosen.weights, 0),
            chosen.used_ids,
            chosen.used_count,
            activation=setup.target.activation,
            implementation=setup.expert_implementation,
        )
        return y, LayerCounts(
            natural_union=jnp.sum(chosen.assignments > 0, dtype=jnp.int32),
            eligible=jnp.sum(chosen.eligible, dtype=jnp.int32),
            used=chosen.used_count,
        )

    return moe


def _stack(counts: tuple[LayerCounts, ...]) -> LayerCounts:
    return jax.tree.map(lambda *layers: jnp.stack(layers), *counts)


def _target(setup, weights, state, tokens, row_positions, mask, moe) -> decoder.Forward:
    return decoder.Decoder(setup.target).apply(
        {"params": weights.target},
        tokens,
        row_positions,
        mask,
        banks=weights.banks,
        moe=moe,
        caches=state.caches,
        start=state.length,
        capture=setup.capture,
    )


def _unembed(setup, weights, hidden):
    model = decoder.Decoder(setup.target)
    return model.apply({"params": weights.target}, hidden, method="unembed")


def _verify(setup, weights, state, tree, phat, selector, eligible_override):
    """The target's forward over the tree; returns it with the logits of all nodes, float32."""
    moe = _moe(setup, selector, tree.depth, tree.valid, phat, eligible_override)
    mask = block_mask(tree, state.length, _cache_rows(state))
    at = positions(tree, state.length)
    out = _target(setup, weights, state, tree.tokens, at, mask, moe)
    return out, _unembed(setup, weights, out.hidden)


def _draft(setup, weights, method, *args):
    head = Eagle3Head(setup.head, setup.owns_embedding)
    return head.apply({"params": weights.head}, *args, method=method)


def _draft_embed(setup, weights, tokens):
    if setup.owns_embedding:
        return _draft(setup, weights, "embed", tokens)
    model = decoder.Decoder(setup.target)
    return model.apply({"params": weights.target}, tokens, method="embed")


def _draft_topk(setup, weights, hidden):
    """Log-probabilities and target ids of the K best draft tokens after each row."""
    if setup.head.draft_vocab_size is None:
        logits = _unembed(setup, weights, _draft(setup, weights, "normalise", hidden))
    else:
        logits = _draft(setup, weights, "logits", hidden)
    logp, ids = jax.lax.top_k(jax.nn.log_softmax(logits), setup.tree.top_k)
    return logp, weights.target_ids[ids]


def _draft_step(setup, weights, length, cache, step, tokens, hidden, ancestors):
    """One level of the draft; the `step_fn` of `grow`, with the head's cache as its carry.

    The beams' tokens have depth `step + 1`; a draft row's position is its token's minus 1.
    """
    width = setup.tree.top_k
    rows = cache.k.shape[0]
    prefix = jnp.broadcast_to(jnp.arange(rows) < length, (width, rows))
    mask = jax.lax.dynamic_update_slice(prefix, ancestors, (0, length))
    at = jnp.full(width, length + step)
    embeddings = _draft_embed(setup, weights, tokens)
    write_at = length + step * width
    hidden, cache = _draft(
        setup, weights, "__call__", embeddings, hidden, at, mask, cache, write_at
    )
    return cache, *_draft_topk(setup, weights, hidden), hidden


def _draft_extend(setup, weights, draft, length, tokens, captured, count) -> DraftState:
    """Appends rows of (target states at t, token t + 1) to the head's cache; `count` of them.

    The last counted row proposes the first level of the next tree.
    """
    rows = tokens.shape[0]
    mask = causal_mask(length, rows, draft.cache.k.shape[0])
    fused = _draft(setup, weights, "fuse", captured)
    embeddings = _draft_embed(setup, weights, tokens)
    at = length + jnp.arange(rows)
    hidden, cache = _draft(
        setup, weights, "__call__", embeddings, fused, at, mask, draft.cache, length
    )
    last = hidden[count - 1]
    logp, ids = _draft_topk(setup, weights, last)
    return DraftState(cache=cache, topk_logp=logp, topk_ids=ids, hidden=last)
