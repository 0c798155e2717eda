"""The jitted programs of a target whose experts come and go: a function a layer, and its ends.

The host reads which experts a layer uses between `route` and `run_experts`, so a forward is a
chain of programs. Layers of a kind (same window, dense or not) share one program, compiled once.
A wave writes the outputs of its picks; one combine, in rank order, follows the last wave. So
neither slots nor waves decide any bit of a result.
"""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.models import decoder
from acceptmoe_jax.models.attention import LayerCache
from acceptmoe_jax.models.decoder import DecoderLayer, LayerView
from acceptmoe_jax.runtime import stages
from acceptmoe_jax.runtime.stages import Block
from acceptmoe_jax.runtime.state import DecodeState, LayerCounts, LayerRecord, Setup, Weights
from acceptmoe_jax.selection import Commitment, SelectorConfig
from acceptmoe_jax.speculation import keep_best
from pallas_kernels.masked_expert_gemm import ExpertBank, combine, expert_picks


@flax.struct.dataclass
class Routed:
    """A MoE layer before its experts.

    Attributes:
      x: with the attention added.
      h: what the experts read.
      expert_ids, weights: of each pick; the weight of one that is not live is 0.
      info: set sizes, and what is recorded.
    """

    x: Float[Array, "T D"]
    h: Float[Array, "T D"]
    expert_ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    info: tuple[LayerCounts, LayerRecord | None]


def _begin(
    setup: Setup, weights: Weights, state: DecodeState, block: Block
) -> tuple[Float[Array, "T D"], tuple[LayerView, ...]]:
    """The embedded rows, and what they see, in the order of `windows`."""
    model = decoder.Decoder(setup.target)
    x = model.apply({"params": weights.target}, block.tokens, method="embed")
    rows = state.caches[0].k.shape[0]
    views = decoder.layer_views(setup.target, block.positions, block.mask, rows, state.length)
    return x, tuple(views[window] for window in setup.target.windows)


def begin_chunk(setup, weights, state, tokens, count):
    """(block, *`_begin`) of a chunk of a prompt, or of a plain row."""
    block = stages.chunk_block(state, tokens, count)
    return block, *_begin(setup, weights, state, block)


def draft(setup, weights, draft, state):
    """(draft with the tree's rows in its cache, tree) of a round."""
    tree, state = stages.draft_tree(setup, weights, state.replace(draft=draft))
    return state.draft, tree


def begin_round(setup, nodes, weights, state, tree):
    """(tree, block, *`_begin`) of a round that verifies `nodes` rows of the tree, or all."""
    if nodes is not None:
        tree = keep_best(tree, nodes)
    block = stages.tree_block(state, tree)
    return tree, block, *_begin(setup, weights, state, block)


def begin_audit(setup, weights, state, tree, start):
    """(block, *`_begin`) of the tree whose root is at cache row `start`."""
    before = state.replace(length=start)
    block = stages.tree_block(before, tree)
    return block, *_begin(setup, weights, before, block)


def route(
    setup: Setup,
    layer: int,
    selector: SelectorConfig,
    record: bool,
    params: dict,
    cache: LayerCache,
    x: Float[Array, "T D"],
    block: Block,
    view: LayerView,
    start: Int[Array, ""],
    commitment: Commitment,
    resident: Bool[Array, "E"],
) -> tuple[LayerCache, Routed, Int[Array, "E+1"]]:
    """Attention, router and selection.

    Args:
      layer: any of the layer's kind.
      record: also keep what the router said.
      resident: before this layer's loads.

    Returns:
      The cache, what the experts need, and for the host the used experts, padded, and their count.
    """
    use = setup.implementations
    model = DecoderLayer(setup.target, layer, use.attention, use.interpret)
    x, h, logits, cache = model.apply(
        {"params": params}, x, block.positions, view, cache, start, method="route"
    )
    chosen, counts = stages.choose_experts(setup, selector, block, commitment, logits, resident)
    used = jnp.append(chosen.used_ids, chosen.used_count)
    info = (counts, stages.layer_record(logits, chosen) if record else None)
    return cache, Routed(x, h, chosen.expert_ids, chosen.weights, info), used


def run_dense(setup, layer, params, cache, x, block, view, start):
    """A layer without experts: its cache and output."""
    use = setup.implementations
    model = DecoderLayer(setup.target, layer, use.attention, use.interpret)
    x, cache, _ = model.apply(
        {"params": params}, x, block.positions, view, cache, start, None, None
    )
    return cache, x


def run_experts(
    setup: Setup,
    last: bool,
    picks_TkD: Float[Array, "T k D"] | None,
    routed: Routed,
    bank: ExpertBank,
    wave: Int[Array, "E+1"],
) -> Float[Array, "..."]:
    """Computes the picks of a wave's experts, and after the last wave the layer's output.

    Args:
      last: whether no wave follows.
      picks_TkD: of earlier waves; None for the first.
      bank: holds the wave's experts.
      wave: they, ascending and padded with E, and their count.

    Returns:
      The picks so far, or `[T, D]`.
    """
    wave_ids, count = wave[:-1], wave[-1]
    use = setup.implementations
    in_wave_E = jnp.zeros(len(bank.slot_of), bool).at[wave_ids].set(True, mode="drop")
    mine_Tk = in_wave_E[routed.expert_ids] & (routed.weights != 0)
    new = expert_picks(
        routed.h,
        bank,
        routed.expert_ids,
        jnp.where(mine_Tk, routed.weights, 0),
        wave_ids,
        count,
        activation=setup.target.activation,
        implementation=use.experts,
        interpret=use.interpret,
    )
    old = jnp.zeros((), new.dtype) if picks_TkD is None else picks_TkD
    picks_TkD = jnp.where(mine_Tk[..., None], new, old)
    if not last:
        return picks_TkD
    return routed.x + combine(picks_TkD, routed.weights).astype(routed.x.dtype)


def end_chunk(setup, sampling, weights, caches, draft, state, block, next_token, x, captured):
    """`finish_prefill` of a chunk."""
    out = _forward(setup, weights, caches, x, captured, ())
    state = state.replace(draft=draft)
    return stages.finish_prefill(setup, weights, state, block, next_token, out, sampling)


def end_step(setup, sampling, weights, caches, draft, state, x, captured, infos):
    """`finish_step` of a plain row, and the counts."""
    out = _forward(setup, weights, caches, x, captured, infos)
    state = stages.finish_step(setup, weights, state.replace(draft=draft), out, sampling)
    counts, _ = stages.stack_layers(infos)
    return state, counts


def end_round(setup, sampling, weights, caches, draft, state, tree, x, captured, infos):
    """`finish_round`."""
    out = _forward(setup, weights, caches, x, captured, infos)
    return stages.finish_round(setup, weights, state.replace(draft=draft), tree, out, sampling)


def end_audit(setup, sampling, weights, caches, draft, state, done, saved, x, captured):
    """`finish_audit`."""
    out = _forward(setup, weights, caches, x, captured, ())
    state = state.replace(draft=draft)
    return stages.finish_audit(setup, weights, state, done, saved, out, sampling)


def _forward(setup, weights, caches, x, captured, infos) -> decoder.Forward:
    model = decoder.Decoder(setup.target)
    return model.apply({"params": weights.target}, x, captured, caches, infos, method="finish")
