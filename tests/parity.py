"""Runs our models on the inputs of a reference case, naming the results as the case names them.

The cases are those of `torch_reference` and `torch_eagle3`, recorded or computed live; nothing
here needs torch. Whatever a case calls `hidden/3`, the output of layer 3, is so called here too,
and a test compares the two by name.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.models import decoder, eagle3
from acceptmoe_jax.models.attention import LayerCache, causal_mask
from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.eagle3 import Eagle3Config
from acceptmoe_jax.models.families import target_config
from acceptmoe_jax.runtime import pretrained
from acceptmoe_jax.selection import SelectorConfig, select
from acceptmoe_jax.speculation import DraftTree, block_mask, positions
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.eagle3 import load_eagle3
from pallas_kernels.masked_expert_gemm import masked_expert_gemm

Arrays = dict[str, np.ndarray]

_ROWS = 160  # of a pass without a cache: shorter prompts are padded, so that one program serves
_CHUNK = 64  # rows of a prefill step; prompts of 5, 37 and 150 tokens need 1, 1 and 3
_CACHE_ROWS = 256
_POISON = 1e4  # what dead cache rows hold: one that were read would leave every tolerance


@dataclasses.dataclass(frozen=True)
class Target:
    """A target model as loaded from a checkpoint directory."""

    config: TargetConfig
    params: dict[str, Any]
    banks: tuple


@dataclasses.dataclass(frozen=True)
class Head:
    """A draft head as loaded from its directory."""

    config: Eagle3Config
    params: dict[str, Any]


@functools.cache
def load_target(directory: pathlib.Path) -> Target:
    """Loads a checkpoint of either family, once: in float32, but MXFP4 stays packed."""
    checkpoint = Checkpoint.open(directory)
    config = target_config(checkpoint.config, checkpoint.config_file)
    loaded = pretrained.load_target(checkpoint, config, jnp.float32)
    return Target(config, loaded.target, loaded.banks)


def load_head(directory: pathlib.Path, norm_before_residual: bool = False) -> Head:
    """Loads an EAGLE-3 head in float32, with or without the flag in its config."""
    checkpoint = Checkpoint.open(directory)
    config = Eagle3Config.from_hf(checkpoint.config, checkpoint.config_file)
    loaded = load_eagle3(
        checkpoint,
        eagle3.abstract_params(config, jnp.float32),
        draft_vocab=config.draft_vocab_size,
        target_vocab=config.vocab_size,
    )
    config = dataclasses.replace(config, norm_before_residual=norm_before_residual)
    return Head(config, loaded.params)


def prompt_arrays(target: Target, case: Arrays) -> Arrays:
    """A `prompt_case` in one causal pass without a cache."""
    length = len(case["input_ids"])
    tokens = jnp.asarray(np.pad(case["input_ids"], (0, _ROWS - length)))
    ours, _ = _run(target, tokens, jnp.arange(_ROWS), jnp.tri(_ROWS, dtype=bool))
    return _last_logits({name: value[:length] for name, value in ours.items()}, case)


def cached_prompt_arrays(target: Target, case: Arrays) -> Arrays:
    """A `prompt_case` in chunks of one static shape through a cache, the last one padded."""
    ours, _ = _prefill(target, case["input_ids"])
    return _last_logits(ours, case)


def block_arrays(target: Target, case: Arrays, *, restricted: bool) -> Arrays:
    """A `block_case`: prefill the prefix, then the block over the cache.

    Args:
      restricted: every layer routes inside `case["allowed"]`; else naturally.
    """
    _, caches = _prefill(target, case["prefix_ids"])
    tree = DraftTree(
        tokens=jnp.asarray(case["block_ids"]),
        parent=jnp.asarray(case["parents"]),
        depth=jnp.asarray(case["depth"]),
        score=jnp.zeros(len(case["block_ids"])),
        valid=jnp.ones(len(case["block_ids"]), bool),
    )
    length = jnp.int32(len(case["prefix_ids"]))
    allowed = case["allowed"] if restricted else np.ones_like(case["allowed"])
    ours, _ = _run(
        target,
        tree.tokens,
        positions(tree, length),
        block_mask(tree, length, _CACHE_ROWS),
        caches,
        length,
        jnp.asarray(allowed),
    )
    title = "restricted" if restricted else "natural"
    return {f"{title}/{name}": value for name, value in ours.items()}


def head_arrays(head: Head, case: Arrays) -> Arrays:
    """A `head_case`: the prefill, then two levels of a tree, each on the cache of those before."""
    module = eagle3.Eagle3Head(head.config)

    @functools.partial(jax.jit, static_argnames="method")
    def apply(*args, method="__call__"):
        return module.apply({"params": head.params}, *args, method=method)

    shape = (_CACHE_ROWS, head.config.num_kv_heads, head.config.head_dim)
    cache = LayerCache(k=jnp.full(shape, _POISON), v=jnp.full(shape, _POISON))
    carried = apply(case["prefill/aux"], method="fuse")
    ours = {"prefill/fused": np.asarray(carried)}
    hidden_so_far = jnp.zeros((0, head.config.hidden_size))
    for title in ("prefill", "first", "second"):
        start = len(hidden_so_far)
        if title != "prefill":
            carried = hidden_so_far[case[f"{title}/parents"]]
        visible = case[f"{title}/visible"]
        mask = np.pad(visible, ((0, 0), (0, _CACHE_ROWS - visible.shape[1])))
        hidden, cache = apply(
            case[f"{title}/embeddings"],
            carried,
            case[f"{title}/positions"],
            mask,
            cache,
            jnp.int32(start),
        )
        ours[f"{title}/hidden"] = np.asarray(hidden)
        ours[f"{title}/logits"] = np.asarray(apply(hidden, method="logits"))
        hidden_so_far = jnp.concatenate([hidden_so_far, hidden])
    return ours


def worst_error(ours: Arrays, theirs: Arrays) -> float:
    """The greatest absolute difference over all that we computed.

    Raises:
      AssertionError: if the case lacks one of our arrays, or its shape is another.
    """
    for name, value in ours.items():
        assert name in theirs, f"the case has no {name}"
        assert value.shape == theirs[name].shape, name
    return max(float(np.abs(value - theirs[name]).max()) for name, value in ours.items())


def _last_logits(ours: Arrays, case: Arrays) -> Arrays:
    """The record keeps the logits of a long prompt's last positions only."""
    return ours | {"logits": ours["logits"][-len(case["logits"]) :]}


def _prefill(target: Target, input_ids: np.ndarray) -> tuple[Arrays, tuple[LayerCache, ...]]:
    """Runs `input_ids` through a poisoned cache, `_CHUNK` rows at a time."""
    caches = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, _POISON),
        decoder.empty_caches(target.config, _CACHE_ROWS, jnp.float32),
    )
    chunks = []
    for start in range(0, len(input_ids), _CHUNK):
        piece = input_ids[start : start + _CHUNK]
        tokens = jnp.asarray(np.pad(piece, (0, _CHUNK - len(piece))))
        place = start + jnp.arange(_CHUNK)
        mask = causal_mask(jnp.int32(start), _CHUNK, _CACHE_ROWS)
        arrays, caches = _run(target, tokens, place, mask, caches, jnp.int32(start))
        chunks.append({name: value[: len(piece)] for name, value in arrays.items()})
    return {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}, caches


def _run(target, tokens, row_positions, mask, caches=None, start=None, allowed=None):
    """One pass; returns its logits, hidden states and router logits by name, and the caches."""
    if allowed is None:
        allowed = jnp.ones((target.config.num_layers, target.config.num_experts), bool)
    out, logits = _forward(
        target.config,
        target.params,
        target.banks,
        tokens,
        row_positions,
        mask,
        caches,
        start,
        allowed,
    )
    hidden = np.split(np.asarray(out.captured), target.config.num_layers, axis=-1)
    arrays = {"logits": np.asarray(logits)}
    arrays |= {f"hidden/{layer}": value for layer, value in enumerate(hidden)}
    arrays |= {
        f"router_logits/{layer}": np.asarray(value)
        for layer, value in zip(target.config.moe_layers, out.moe, strict=True)
    }
    return arrays, out.caches


@functools.partial(jax.jit, static_argnums=0)
def _forward(config, params, banks, tokens, row_positions, mask, caches, start, allowed):
    """The model with the selection and the expert product of serving; S is data [L, E]."""
    selector = SelectorConfig("native", top_k=config.top_k, norm_topk_prob=config.norm_topk_prob)
    rows = len(tokens)

    def moe(layer, x, router_logits, bank):
        chosen = select(
            router_logits,
            jnp.zeros(rows, jnp.int32),
            jnp.ones(rows, bool),
            jnp.ones(1),
            config=selector,
            eligible_override=allowed[layer],
        )
        y = masked_expert_gemm(
            x,
            bank,
            chosen.expert_ids,
            chosen.weights,
            chosen.used_ids,
            chosen.used_count,
            activation=config.activation,
        )
        return y, router_logits

    model = decoder.Decoder(config)
    out = model.apply(
        {"params": params},
        tokens,
        row_positions,
        mask,
        banks=banks,
        moe=moe,
        caches=caches,
        start=start,
        capture=tuple(range(config.num_layers)),
    )
    return out, model.apply({"params": params}, out.hidden, method="unembed")
