"""Our side of a comparison: what the programs of decoding compute for a prompt and for a block.

Pure functions to be jitted; shapes are static and prompts padded, so that one program serves all.
"""

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.runtime import programs, stages
from acceptmoe_jax.runtime.state import LayerRecord, Setup, Weights, empty_state
from acceptmoe_jax.selection import Commitment, SelectorConfig
from acceptmoe_jax.speculation import DraftTree


@flax.struct.dataclass
class Pass:
    """Rows of one forward; those of padding mean nothing."""

    logits: Float[Array, "T V"]
    record: LayerRecord  # of each MoE layer, an axis L in front


def prompt_pass(
    setup: Setup,
    dtype: jnp.dtype,
    weights: Weights,
    tokens: Int[Array, "T"],
    count: Int[Array, ""],
) -> Pass:
    """The first `count` of the tokens under natural routing, in one chunk through a cache."""
    state = empty_state(setup, len(tokens), dtype)
    block = stages.chunk_block(state, tokens, count)
    out = programs.forward(setup, weights, state, block, setup.native(), record=True)
    return Pass(stages.unembed(setup, weights, out.hidden), stages.stack_layers(out.moe)[1])


def block_pass(
    setup: Setup,
    selector: SelectorConfig,
    dtype: jnp.dtype,
    weights: Weights,
    commitment: Commitment,
    tokens: Int[Array, "S"],
    count: Int[Array, ""],
) -> tuple[DraftTree, Pass]:
    """The first verification block behind a prompt: natural prefill, a draft, its restricted pass.

    Args:
      selector: the policy that restricts the block.
      tokens, count: the prompt, padded.
    """
    state = empty_state(setup, len(tokens) + setup.spare_rows, dtype)
    state = programs.prefill_chunk(setup, weights, state, tokens, count, jnp.int32(-1))
    state, tree = programs.draft(setup, weights, state)
    block = stages.tree_block(state, tree)
    out = programs.forward(setup, weights, state, block, selector, commitment, record=True)
    logits = stages.unembed(setup, weights, out.hidden)
    return tree, Pass(logits, stages.stack_layers(out.moe)[1])


def visible_rows(length: int, parent: Int[np.ndarray, "T"]) -> Bool[np.ndarray, "S S"]:
    """Which rows each of a causal prefix and the tree behind it attends to, S = length + T.

    A node sees the prefix, its ancestors and itself; found by walking up from every node.
    """
    visible = np.tri(length + len(parent), dtype=bool)
    visible[length:, length:] = False
    for node in range(len(parent)):
        ancestor = node
        while ancestor >= 0:
            visible[length + node, length + ancestor] = True
            ancestor = parent[ancestor]
    return visible
