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
from acceptmoe_jax.selection import Commitment, SelectionResult, SelectorConfig
from acceptmoe_jax.speculation import keep_best
from pallas_kernels.masked_expert_gemm import ExpertBank, combine, expert_picks


@flax.struct.dataclass
class Routed:
    """A MoE layer before its experts.

    Attributes:
      x: with the attention added.
      h: what the experts read.
      expert_ids, weights: of each pick; the weight of one that is not live is 0.
      told: what the host reads, in one array, for an array costs both sides some microseconds:
        the used experts, ascending and padded with E; then `LayerCounts`, `used` the last.
      record: for traces, where they are asked for.
    """

    x: Float[Array, "T D"]
    h: Float[Array, "T D"]
    expert_ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    told: Int[Array, "E+3"]
    record: LayerRecord | None = None

    @classmethod
    def of(
        cls, x, h, chosen: SelectionResult, counts: LayerCounts, record: LayerRecord | None = None
    ) -> "Routed":
        """With what a selection chose."""
        sizes = jnp.stack([counts.natural_union, counts.eligible, counts.used])
        told = jnp.concatenate([chosen.used_ids, sizes])
        return cls(x, h, chosen.expert_ids, chosen.weights, told, record)


@flax.struct.dataclass
class Picked:
    """A MoE layer between two parts of its experts.

    Attributes:
      picks_TkD: outputs of the picks so far.
      due_E: used experts that are not computed yet.
    """

    picks_TkD: Float[Array, "T k D"]
    due_E: Bool[Array, "E"]


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
    slots: int,
    record: bool,
    params: dict,
    cache: LayerCache,
    x: Float[Array, "T D"],
    block: Block,
    view: LayerView,
    start: Int[Array, ""],
    commitment: Commitment,
    slot_of: Int[Array, "E"],
) -> tuple[LayerCache, Routed]:
    """Attention, router and selection.

    Args:
      layer: any of the layer's kind.
      record: keep what the router said.
      slot_of: of the layer's slots before its loads; an absent expert has the slot `slots`.

    Returns:
      The cache, and what the experts need.
    """
    use = setup.implementations
    model = DecoderLayer(setup.target, layer, use.attention, use.interpret)
    x, h, logits, cache = model.apply(
        {"params": params}, x, block.positions, view, cache, start, method="route"
    )
    chosen, counts = stages.choose_experts(
        setup, selector, block, commitment, logits, slot_of < slots
    )
    recorded = stages.layer_record(logits, chosen) if record else None
    return cache, Routed.of(x, h, chosen, counts, recorded)


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
    picked: Picked | None,
    routed: Routed,
    bank: ExpertBank,
) -> Picked | Float[Array, "T D"]:
    """Computes the picks of what is in a bank and due, and after the last bank the layer's output.

    Args:
      last: whether no bank follows.
      picked: by earlier banks; None for the first.
      bank: holds some of the used experts. Of a layer's banks each used expert is in one at least.
    """
    use = setup.implementations
    experts = jnp.arange(len(bank.slot_of))
    if picked is None:
        used_ids = routed.told[: len(experts)]
        due_E = jnp.zeros(len(experts), bool).at[used_ids].set(True, mode="drop")
    else:
        due_E = picked.due_E
    now_E = due_E & (bank.slot_of < bank.num_slots)
    now_ids = jnp.sort(jnp.where(now_E, experts, len(experts)))
    mine_Tk = now_E[routed.expert_ids] & (routed.weights != 0)
    new = expert_picks(
        routed.h,
        bank,
        routed.expert_ids,
        jnp.where(mine_Tk, routed.weights, 0),
        now_ids,
        jnp.sum(now_E, dtype=jnp.int32),
        activation=setup.target.activation,
        implementation=use.experts,
        interpret=use.interpret,
    )
    old = jnp.zeros((), new.dtype) if picked is None else picked.picks_TkD
    picks_TkD = jnp.where(mine_Tk[..., None], new, old)
    if not last:
        return Picked(picks_TkD, due_E & ~now_E)
    return routed.x + combine(picks_TkD, routed.weights).astype(routed.x.dtype)


def end_chunk(setup, sampling, weights, caches, draft, state, block, next_token, x, captured):
    """`finish_prefill` of a chunk."""
    out = _forward(setup, weights, caches, x, captured)
    state = state.replace(draft=draft)
    return stages.finish_prefill(setup, weights, state, block, next_token, out, sampling)


def end_step(setup, sampling, weights, caches, draft, state, x, captured, told, records):
    """`finish_step` of a plain row, and the counts."""
    out = _forward(setup, weights, caches, x, captured, told, records)
    state = stages.finish_step(setup, weights, state.replace(draft=draft), out, sampling)
    counts, _ = stages.stack_layers(out.moe)
    return state, counts


def end_round(setup, sampling, weights, caches, draft, state, tree, x, captured, told, records):
    """`finish_round`."""
    out = _forward(setup, weights, caches, x, captured, told, records)
    return stages.finish_round(setup, weights, state.replace(draft=draft), tree, out, sampling)


def end_audit(setup, sampling, weights, caches, draft, state, done, saved, x, captured):
    """`finish_audit`."""
    out = _forward(setup, weights, caches, x, captured)
    state = state.replace(draft=draft)
    return stages.finish_audit(setup, weights, state, done, saved, out, sampling)


def _forward(setup, weights, caches, x, captured, told=(), records=()) -> decoder.Forward:
    """What follows the layers; `moe` is as `stages.stack_layers` takes it."""
    infos = tuple(
        (LayerCounts(*layer[-3:]), record) for layer, record in zip(told, records, strict=True)
    )
    model = decoder.Decoder(setup.target)
    return model.apply({"params": weights.target}, x, captured, caches, infos, method="finish")
