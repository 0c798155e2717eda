"""A target and its head without their weights: for compilers, and for weights made at random."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from acceptmoe_jax.models import decoder, eagle3
from acceptmoe_jax.models.eagle3 import Eagle3Config
from acceptmoe_jax.models.experts import abstract_bank
from acceptmoe_jax.models.families import target_config
from acceptmoe_jax.models.published import Published
from acceptmoe_jax.runtime import programs
from acceptmoe_jax.selection import Commitment, SelectorConfig
from acceptmoe_jax.speculation import TreeConfig
from pallas_kernels.implementations import Implementations


def published_setup(
    published: Published, implementations: Implementations = Implementations()
) -> programs.Setup:
    """The programs' static part: the published trees of 5 steps, top-10 and 64 nodes."""
    target = target_config(published.target, f"{published.name}: config.json")
    head = Eagle3Config.from_hf(published.head, f"the head of {published.name}: config.json")
    capture = head.aux_layer_ids or target.default_aux_layers()
    return programs.Setup(
        target, head, capture, False, TreeConfig(), implementations=implementations
    )


def with_layers(setup: programs.Setup, layers: int) -> programs.Setup:
    """The same target with its first `layers` layers only, at least 4."""
    changes = {"num_layers": layers}
    if hasattr(setup.target, "layer_types"):
        changes["layer_types"] = setup.target.layer_types[:layers]
    target = dataclasses.replace(setup.target, **changes)
    # Three distinct layers in order, the last one short of the target's last.
    capture = tuple(min(layer, layers - 4 + at) for at, layer in enumerate(setup.capture))
    return dataclasses.replace(setup, target=target, capture=capture)


def abstract_weights(setup: programs.Setup, dtype: jnp.dtype, *, mxfp4: bool) -> programs.Weights:
    """`jax.ShapeDtypeStruct`s of every weight; `mxfp4` says that the experts are packed."""
    bank = abstract_bank(setup.target, dtype, packed=mxfp4)
    return programs.Weights(
        target=decoder.abstract_params(setup.target, dtype),
        banks=tuple(
            None if layer in setup.target.dense_layers else bank
            for layer in range(setup.target.num_layers)
        ),
        head=eagle3.abstract_params(setup.head, dtype, setup.owns_embedding),
        target_ids=jax.ShapeDtypeStruct((setup.head.draft_vocab_size,), jnp.int32),
    )


def abstract_round(
    setup: programs.Setup,
    weights: programs.Weights,
    cached: int,
    dtype: jnp.dtype,
    selector: SelectorConfig,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A speculative round over a cache of `cached` positions and the tree behind them.

    Returns:
      The function of (weights, state, commitment), whose state is to be donated, and its
      arguments as `jax.ShapeDtypeStruct`s.
    """
    rows = cached + setup.spare_rows
    state = jax.eval_shape(lambda: programs.empty_state(setup, rows, dtype))
    commitment = Commitment(jax.ShapeDtypeStruct((setup.tree.steps + 1,), jnp.float32))
    run = functools.partial(programs.speculative_round, setup, selector=selector)
    return run, (weights, state, commitment)
