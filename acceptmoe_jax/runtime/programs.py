"""The jitted programs of resident decoding: prefill, one plain step, one round, one audit.

Each is a pure function of (static setup, weights, state, ...) with static shapes, so one compiled
program serves every prompt of a cache length and every round. The state is donated by its caller.
All are for one sequence; a batch is `jax.vmap` over states, whose rows then share each layer's
experts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.models import decoder
from acceptmoe_jax.runtime import stages
from acceptmoe_jax.runtime.state import (
    Audit,
    DecodeState,
    LayerCounts,
    Round,
    Setup,
    Weights,
    empty_state,
)
from acceptmoe_jax.selection import Commitment, SelectionResult, SelectorConfig
from acceptmoe_jax.speculation import GREEDY, DraftTree, SamplingConfig, keep_best
from pallas_kernels.masked_expert_gemm import masked_expert_gemm

__all__ = [
    "Audit",
    "DecodeState",
    "LayerCounts",
    "Round",
    "Setup",
    "Weights",
    "audit_round",
    "autoregressive_step",
    "draft",
    "empty_state",
    "forward",
    "forward_choosing",
    "prefill_chunk",
    "speculative_round",
    "verify",
]


def prefill_chunk(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    tokens: Int[Array, "T"],
    count: Int[Array, ""],
    next_token: Int[Array, ""],
    *,
    sampling: SamplingConfig = GREEDY,
) -> DecodeState:
    """Appends `count` prompt tokens, padded to T rows, under natural routing.

    Args:
      next_token: the prompt's token after this chunk, or -1 after the last chunk, where the
        target's own choice follows.
      sampling: of that choice.
    """
    block = stages.chunk_block(state, tokens, count)
    out = forward(setup, weights, state, block, setup.native())
    return stages.finish_prefill(setup, weights, state, block, next_token, out, sampling)


def autoregressive_step(
    setup: Setup, weights: Weights, state: DecodeState, *, sampling: SamplingConfig = GREEDY
) -> tuple[DecodeState, LayerCounts]:
    """Appends the last token's row and chooses the next token; the head rests."""
    block = stages.chunk_block(state, state.last_token[None], jnp.int32(1))
    out = forward(setup, weights, state, block, setup.native())
    counts, _ = stages.stack_layers(out.moe)
    return stages.finish_step(setup, weights, state, out, sampling), counts


def draft(setup: Setup, weights: Weights, state: DecodeState) -> tuple[DecodeState, DraftTree]:
    """The first half of a round; see `stages.draft_tree`."""
    tree, state = stages.draft_tree(setup, weights, state)
    return state, tree


def verify(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    tree: DraftTree,
    commitment: Commitment,
    eligible_override: Bool[Array, "L E"] | None = None,
    *,
    selector: SelectorConfig,
    sampling: SamplingConfig = GREEDY,
    nodes: int | None = None,
    record: bool = False,
) -> tuple[DecodeState, Round]:
    """The second half of a round: verify a tree, accept, compact, draft-extend.

    Args:
      state: as `draft` returned it.
      tree: its tree.
      commitment: how likely nodes are to be committed.
      eligible_override: the eligible set of each MoE layer as data, in place of the policy's.
      selector: the policy.
      sampling: how the target's tokens are drawn.
      nodes: verify only the root and the best nodes, so many in all (EVICT); all by default.
      record: also return what the routers said.
    """
    if nodes is not None:
        tree = keep_best(tree, nodes)
    with jax.named_scope("verify"):
        block = stages.tree_block(state, tree)
        out = forward(setup, weights, state, block, selector, commitment, eligible_override, record)
    return stages.finish_round(setup, weights, state, tree, out, sampling)


def speculative_round(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    commitment: Commitment,
    eligible_override: Bool[Array, "L E"] | None = None,
    *,
    selector: SelectorConfig,
    sampling: SamplingConfig = GREEDY,
    record: bool = False,
) -> tuple[DecodeState, Round]:
    """Drafts a tree and verifies it; see `verify`."""
    state, tree = draft(setup, weights, state)
    static = {"selector": selector, "sampling": sampling, "record": record}
    return verify(setup, weights, state, tree, commitment, eligible_override, **static)


def audit_round(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    done: Round,
    *,
    sampling: SamplingConfig = GREEDY,
) -> tuple[DecodeState, Audit]:
    """Verifies the block of `done` once more under native routing; the state stays as it is.

    The committed prefix is still in the caches; the accepted rows, which the second pass
    overwrites, are put back. So the next round goes on from the restricted pass's rows.

    Args:
      sampling: of the round.
    """
    saved = stages.accepted_rows(setup, state.caches, done)
    before = stages.before_round(state, done)
    block = stages.tree_block(before, done.tree)
    out = forward(setup, weights, before, block, setup.native())
    return stages.finish_audit(setup, weights, state, done, saved, out, sampling)


def forward(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    block: stages.Block,
    selector: SelectorConfig,
    commitment: Commitment | None = None,
    eligible_override: Bool[Array, "L E"] | None = None,
    record: bool = False,
) -> decoder.Forward:
    """The target over a block whose rows go behind `state.length`.

    Its `moe` holds each MoE layer's counts, and what `record` asks for.
    """
    commitment = stages.NO_COMMITMENT if commitment is None else commitment

    def choose(layer, logits):
        override = None
        if eligible_override is not None:
            override = eligible_override[setup.target.moe_layers.index(layer)]
        chosen, counts = stages.choose_experts(
            setup, selector, block, commitment, logits, override=override
        )
        return chosen, (counts, stages.layer_record(logits, chosen) if record else None)

    return forward_choosing(setup, weights, state, block, choose)


def forward_choosing(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    block: stages.Block,
    choose: Callable[[int, Float[Array, "T E"]], tuple[SelectionResult, Any]],
) -> decoder.Forward:
    """As `forward`, with the experts that `choose` picks.

    Args:
      choose: from a MoE layer and its router logits to its experts, the weights of padded rows 0,
        and what the layer's entry of `moe` is.
    """
    use = setup.implementations

    def moe(layer, x, logits, bank):
        chosen, told = choose(layer, logits)
        y = masked_expert_gemm(
            x,
            bank,
            chosen.expert_ids,
            chosen.weights,
            chosen.used_ids,
            chosen.used_count,
            activation=setup.target.activation,
            implementation=use.experts,
            interpret=use.interpret,
        )
        return y, told

    return decoder.Decoder(setup.target, use.attention, use.interpret).apply(
        {"params": weights.target},
        block.tokens,
        block.positions,
        block.mask,
        banks=weights.banks,
        moe=moe,
        caches=state.caches,
        start=state.length,
        capture=setup.capture,
    )
