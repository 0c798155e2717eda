"""The stages of decoding that are the same wherever the experts are.

draft a tree -> a forward of the target over its rows -> accept, compact, draft-extend

The forward lies between `tree_block` and `finish_round`, and likewise for prefill and plain
steps: `programs` runs it in one piece, with every expert on the device, `layerwise` in a program
a layer.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.models import decoder
from acceptmoe_jax.models.attention import LayerCache, causal_mask
from acceptmoe_jax.models.eagle3 import Eagle3Head
from acceptmoe_jax.runtime.state import (
    Audit,
    DecodeState,
    DraftState,
    LayerCounts,
    LayerRecord,
    Round,
    Setup,
    Weights,
)
from acceptmoe_jax.selection import (
    Commitment,
    SelectionResult,
    SelectorConfig,
    node_commitment,
)
from acceptmoe_jax.speculation import (
    DraftTree,
    SamplingConfig,
    block_mask,
    compact,
    grow,
    positions,
    sample_token,
)
from acceptmoe_jax.speculation.sampling import accept
from pallas_kernels.commitment_select import commitment_select, supports

Caches = tuple[LayerCache, ...]

# For policies that do not weigh nodes.
NO_COMMITMENT = Commitment(np.ones(1, np.float32))


@flax.struct.dataclass
class Block:
    """The rows of one target forward.

    Attributes:
      positions: rotary positions.
      mask: which cache rows each row sees, windows aside.
      depth, valid: as `select` reads them; all at depth 0 outside a tree.
      score: path log-probability of each node; 0 outside a tree.
    """

    tokens: Int[Array, "T"]
    positions: Int[Array, "T"]
    mask: Bool[Array, "T S"]
    depth: Int[Array, "T"]
    valid: Bool[Array, "T"]
    score: Float[Array, "T"]


def chunk_block(state: DecodeState, tokens: Int[Array, "T"], count: Int[Array, ""]) -> Block:
    """`count` tokens in a row, padded to T."""
    place = jnp.arange(tokens.shape[0])
    return Block(
        tokens=tokens,
        positions=state.length + place,
        mask=causal_mask(state.length, tokens.shape[0], _cache_rows(state)),
        depth=jnp.zeros(tokens.shape[0], jnp.int32),
        valid=(place < count) & state.active,
        score=jnp.zeros(tokens.shape[0]),
    )


def tree_block(state: DecodeState, tree: DraftTree) -> Block:
    """The nodes of a draft tree behind the committed rows."""
    return Block(
        tokens=tree.tokens,
        positions=positions(tree, state.length),
        mask=block_mask(tree, state.length, _cache_rows(state)),
        depth=tree.depth,
        valid=tree.valid & state.active,
        score=tree.score,
    )


def choose_experts(
    setup: Setup,
    selector: SelectorConfig,
    block: Block,
    commitment: Commitment,
    logits: Float[Array, "T E"],
    resident: Bool[Array, "E"] | None = None,
    override: Bool[Array, "E"] | None = None,
) -> tuple[SelectionResult, LayerCounts]:
    """Selects a layer's experts; weights of padded rows are 0."""
    use = setup.implementations
    implementation = use.selection
    # A chunk of a prompt has more rows than the kernel holds, and selects nothing.
    if len(block.tokens) > setup.tree.nodes or not supports(selector, implementation):
        implementation = "reference"
    path_phat = None
    if selector.weighs_paths:
        path_phat = node_commitment(commitment, block.depth, block.score)
    chosen = commitment_select(
        logits,
        block.depth,
        block.valid,
        commitment.phat,
        resident,
        config=selector,
        path_phat=path_phat,
        eligible_override=override,
        implementation=implementation,
        interpret=use.interpret,
    )
    chosen = dataclasses.replace(chosen, weights=jnp.where(block.valid[:, None], chosen.weights, 0))
    return chosen, LayerCounts(
        natural_union=jnp.sum(chosen.assignments > 0, dtype=jnp.int32),
        eligible=jnp.sum(chosen.eligible, dtype=jnp.int32),
        used=chosen.used_count,
    )


def finish_prefill(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    block: Block,
    next_token: Int[Array, ""],
    out: decoder.Forward,
    sampling: SamplingConfig,
) -> DecodeState:
    """The state after a chunk.

    Args:
      next_token: the prompt's token after this chunk, or -1 after the last chunk, where the
        target's own choice follows.
      out: of the target over the block.
    """
    count = jnp.sum(block.valid, dtype=jnp.int32)
    logits = unembed(setup, weights, out.hidden[count - 1])
    choice = sample_token(logits, sampling, _key_at(state, state.length + count - 1))
    following = jnp.where(next_token < 0, choice, next_token).astype(jnp.int32)
    draft = state.draft
    if draft is not None:
        last = jnp.arange(len(block.tokens)) == count - 1
        shifted = jnp.where(last, following, jnp.roll(block.tokens, -1))
        draft = _draft_extend(setup, weights, draft, state.length, shifted, out.captured, count)
    return state.replace(
        caches=out.caches, length=state.length + count, last_token=following, draft=draft
    )


def finish_step(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    out: decoder.Forward,
    sampling: SamplingConfig,
) -> DecodeState:
    """The state after one plain row, whose choice is the last token; the head rests."""
    logits = unembed(setup, weights, out.hidden[0])
    token = sample_token(logits, sampling, _key_at(state, state.length))
    return state.replace(caches=out.caches, length=state.length + state.active, last_token=token)


def draft_tree(setup: Setup, weights: Weights, state: DecodeState) -> tuple[DraftTree, DecodeState]:
    """Grows the next tree; the state returned has the head's rows of it in its cache."""
    with jax.named_scope("draft"):
        tree, cache = grow(
            lambda *step: _draft_step(setup, weights, state.length, *step),
            state.draft.cache,
            state.draft.topk_logp,
            state.draft.topk_ids,
            state.draft.hidden,
            state.last_token,
            setup.tree,
        )
    return tree, state.replace(draft=state.draft.replace(cache=cache))


def finish_round(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    tree: DraftTree,
    out: decoder.Forward,
    sampling: SamplingConfig,
) -> tuple[DecodeState, Round]:
    """Accept, compact, draft-extend.

    Args:
      state: as `draft_tree` returned it.
      tree: what was verified.
      out: of the target over the tree; `moe` holds the layers' counts and records.
    """
    start = state.length
    with jax.named_scope("verify"):
        logits = unembed(setup, weights, out.hidden)
    with jax.named_scope("accept"):
        accepted = _accept(setup, state, tree, logits, sampling)
        caches = compact(out.caches, accepted.rows, accepted.length, start)
    with jax.named_scope("draft_extend"):
        draft = _draft_extend(
            setup,
            weights,
            state.draft,
            start,
            accepted.tokens,
            out.captured[accepted.rows],
            accepted.length,
        )
    length = start + jnp.where(state.active, accepted.length, 0)
    state = state.replace(caches=caches, length=length, last_token=accepted.bonus, draft=draft)
    return state, Round(tree, accepted, start, logits[accepted.rows], *stack_layers(out.moe))


def before_round(state: DecodeState, done: Round) -> DecodeState:
    """The state that `done` began with, as far as the target's forward reads it."""
    return state.replace(length=done.start)


def accepted_rows(setup: Setup, caches: Caches, done: Round) -> Caches:
    """The cache rows that `done` committed."""
    emitted = setup.tree.max_accepted
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, done.start, emitted, 0), caches
    )


def finish_audit(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    done: Round,
    saved: Caches,
    out: decoder.Forward,
    sampling: SamplingConfig,
) -> tuple[DecodeState, Audit]:
    """Compares `done` with a native forward over its tree; the state stays as it is.

    Args:
      saved: its `accepted_rows`, which the native forward has overwritten.
      out: of the native forward.
    """
    caches = jax.tree.map(
        lambda leaf, rows: jax.lax.dynamic_update_slice_in_dim(leaf, rows, done.start, 0),
        out.caches,
        saved,
    )
    counted = jnp.arange(setup.tree.max_accepted) < done.acceptance.length
    logits = unembed(setup, weights, out.hidden)
    natural = _accept(setup, before_round(state, done), done.tree, logits, sampling)
    native = logits[done.acceptance.rows]
    same = jnp.argmax(native, axis=-1) == jnp.argmax(done.logits, axis=-1)
    native_logp = jax.nn.log_softmax(native)
    kl = jnp.sum(jnp.exp(native_logp) * (native_logp - jax.nn.log_softmax(done.logits)), axis=-1)
    return state.replace(caches=caches), Audit(
        agreeing=jnp.sum(same & counted, dtype=jnp.int32),
        kl=jnp.sum(jnp.where(counted, kl, 0)),
        natural_length=natural.length,
    )


def layer_record(logits: Float[Array, "T E"], chosen: SelectionResult) -> LayerRecord:
    """What traces hold of a layer."""
    used = jnp.zeros_like(chosen.eligible).at[chosen.used_ids].set(True, mode="drop")
    return LayerRecord(logits.astype(jnp.float32), chosen.eligible, used)


def stack_layers(
    layers: tuple[tuple[LayerCounts, LayerRecord | None], ...],
) -> tuple[LayerCounts, LayerRecord | None]:
    """What the MoE layers counted and recorded, an axis L in front."""
    return jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *layers)


def unembed(setup: Setup, weights: Weights, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """The target's float32 logits of rows that passed its final norm."""
    model = decoder.Decoder(setup.target)
    return model.apply({"params": weights.target}, hidden, method="unembed")


def _accept(setup, state, tree, logits, sampling):
    """What the target emits of a tree whose root has the row `state.length`."""
    key = _key_at(state, state.length)
    return accept(tree, logits, sampling, key, setup.tree.max_accepted)


def _key_at(state, row):
    """The key of what is drawn from a cache row's logits, and from those of the tree behind it."""
    return jax.random.fold_in(state.key, row)


def _cache_rows(state: DecodeState) -> int:
    return state.caches[0].k.shape[0]


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
        logits = unembed(setup, weights, _draft(setup, weights, "normalise", hidden))
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
