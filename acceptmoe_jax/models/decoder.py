"""The decoder of both families, Qwen3-MoE and GPT-OSS, as a functional Flax module.

What tells the families apart (biases, sinks, windows, rotary positions, the router) is in their
configs. The module holds the dense parameters. Caches, expert banks and what a mixture-of-experts
layer does with its router logits are arguments: the caller's `moe` function routes, restricts,
runs the experts and counts, so that serving, offloading and training share this one model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.models.attention import (
    Attention,
    LayerCache,
    empty_cache,
    first_column,
    window_mask,
)
from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.experts import ExpertBank, init_bank
from acceptmoe_jax.models.layers import Embedding, GatedMLP, Linear, RMSNorm

# (layer, rows [R, D], router logits [R, E] float32, bank) -> (output [R, D], statistics)
MoeFunction = Callable[[int, jax.Array, jax.Array, ExpertBank | None], tuple[jax.Array, Any]]


@flax.struct.dataclass
class Forward:
    """What one pass over T rows returns."""

    hidden: Float[Array, "... T D"]  # after the final norm; `unembed` turns it into logits
    captured: Float[Array, "... T A"]  # outputs of the captured layers, concatenated in order
    caches: tuple[LayerCache, ...] | None
    moe: tuple[Any, ...]  # what `moe` returned beside its output, a MoE layer each


@flax.struct.dataclass
class LayerView:
    """What the rows of a layer see: `mask`, which shows no cache row before `begin`."""

    mask: Bool[Array, "... T S"]
    begin: Int[Array, ""] | int


def layer_views(
    config: TargetConfig,
    positions: Int[Array, "... T"],
    mask: Bool[Array, "... T S"],
    cache_rows: int | None,
    start: Int[Array, ""] | None,
) -> dict[int | None, LayerView]:
    """The view of a layer by its window; arguments as `Decoder` takes them."""
    columns, begins = positions, dict.fromkeys(config.windows, 0)
    if cache_rows is not None:
        begins = {window: first_column(start, window) for window in begins}
        columns = jnp.arange(cache_rows, dtype=positions.dtype)
        columns = jax.lax.dynamic_update_slice_in_dim(columns, positions, start, 0)
    return {
        window: LayerView(window_mask(mask, positions, columns, window), begin)
        for window, begin in begins.items()
    }


class Router(nn.Module):
    """The router of a MoE layer: `mlp.gate` on disk in one family, `mlp.router` in the other."""

    config: TargetConfig

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... E"]:
        """Router logits in float32: a softmax in bfloat16 ties logits that differ by 1e-4."""
        c = self.config
        project = Linear(c.num_experts, ("expert", "embed"), c.router_bias, name=c.router_name)
        return project(x, out_dtype=jnp.float32)


class DecoderLayer(nn.Module):
    """Pre-norm attention, then a dense MLP or a mixture of experts."""

    config: TargetConfig
    layer: int
    attention: str = "xla"
    interpret: bool = False

    def setup(self):
        c = self.config
        self.self_attn = Attention(c.attention, c.hidden_size, self.attention, self.interpret)
        self.input_layernorm = RMSNorm(c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps)
        dense = self.layer in c.dense_layers
        self.mlp = GatedMLP(c.dense_width) if dense else Router(c)

    def __call__(self, x, positions, view, cache, start, bank, moe: MoeFunction):
        """Returns the layer's output [..., T, D], its cache, and a list of 0 or 1 statistics."""
        x, h, cache = self.attend(x, positions, view, cache, start)
        if self.layer in self.config.dense_layers:
            return x + self.mlp(h), cache, []
        with jax.named_scope("experts"):
            logits = self.mlp(h)
            rows = h.reshape(-1, h.shape[-1])
            y, info = moe(self.layer, rows, logits.reshape(-1, logits.shape[-1]), bank)
        return x + y.reshape(x.shape), cache, [info]

    def attend(self, x, positions, view, cache, start):
        """The first half: x with its attention added, what the MLP reads, and the cache."""
        with jax.named_scope("attention"):
            h = self.input_layernorm(x)
            y, cache = self.self_attn(h, positions, view.mask, cache, start, view.begin)
            x = x + y
        return x, self.post_attention_layernorm(x), cache

    def route(self, x, positions, view, cache, start):
        """The half of a MoE layer before its experts: (x, h, router logits, cache)."""
        x, h, cache = self.attend(x, positions, view, cache, start)
        return x, h, self.mlp(h), cache


class Decoder(nn.Module):
    """The whole model: embedding, layers, final norm and output head.

    `attention` and `interpret` say how `tree_attention` runs over caches.
    """

    config: TargetConfig
    attention: str = "xla"
    interpret: bool = False

    def setup(self):
        c = self.config
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = [
            DecoderLayer(c, layer, self.attention, self.interpret) for layer in range(c.num_layers)
        ]
        self.norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.vocab_size, ("vocab", "embed"))

    def __call__(
        self,
        tokens: Int[Array, "... T"],
        positions: Int[Array, "... T"],
        mask: Bool[Array, "... T S"],
        *,
        banks: Sequence[ExpertBank | None],
        moe: MoeFunction,
        caches: Sequence[LayerCache] | None = None,
        start: Int[Array, ""] | None = None,
        capture: tuple[int, ...] = (),
    ) -> Forward:
        """Runs T rows.

        Args:
          tokens: token ids.
          positions: rotary positions; in a draft tree, prefix length + depth.
          mask: which columns each row sees, windows aside. Without caches S = T; with caches S
            is their length and the rows are written at cache row `start` first. Cache rows
            before `start` hold the positions 0 to `start` - 1, and no row's position is less
            than `start`; rows see nothing behind the new rows.
          banks: the experts of each layer; None for dense layers.
          moe: what a MoE layer does with its rows and router logits.
          caches: one a layer, for a single sequence (no leading axes); None in training.
          start: int32 cache row of the first new row.
          capture: ids of the layers whose outputs are returned (EAGLE-3 reads three).
        """
        x = self.embed_tokens(tokens)
        rows = None if caches is None else caches[0].k.shape[0]
        views = layer_views(self.config, positions, mask, rows, start)
        new_caches, infos, captured = [], [], []
        for layer, module in enumerate(self.layers):
            cache = None if caches is None else caches[layer]
            view = views[self.config.window(layer)]
            x, cache, info = module(x, positions, view, cache, start, banks[layer], moe)
            new_caches.append(cache)
            infos.extend(info)
            if layer in capture:
                captured.append(x)
        caches = None if caches is None else tuple(new_caches)
        return self.finish(x, tuple(captured), caches, tuple(infos))

    def finish(self, x, captured, caches, infos) -> Forward:
        """What follows the last layer."""
        return Forward(
            hidden=self.norm(x),
            captured=jnp.concatenate(captured, axis=-1) if captured else x[..., :0],
            caches=caches,
            moe=infos,
        )

    def embed(self, tokens: Int[Array, "... T"]) -> Float[Array, "... T D"]:
        """The embedding of each token; the draft head shares it."""
        return self.embed_tokens(tokens)

    def unembed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits of rows that already passed the final norm."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.unembed(hidden)
        return self.lm_head(hidden, out_dtype=jnp.float32)

    def declare(self) -> None:
        """Touches every parameter, so that `init` declares the whole tree."""
        row = jnp.zeros((1,), jnp.int32)
        c = self.config
        out = self(row, row, jnp.ones((1, 1), bool), banks=(None,) * c.num_layers, moe=_no_experts)
        self.unembed(out.hidden)


def _no_experts(layer: int, x: jax.Array, logits: jax.Array, bank: None) -> tuple[jax.Array, None]:
    del layer, logits, bank
    return x, None


def init_params(key: jax.Array, config: TargetConfig) -> dict[str, Any]:
    """Random dense parameters in float32, as a nested dict with logical axes unboxed."""
    return nn.unbox(Decoder(config).init(key, method="declare")["params"])


def abstract_params(config: TargetConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """Shapes of the dense parameters without allocating any: `jax.ShapeDtypeStruct` leaves."""
    tree = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)


def init_banks(key: jax.Array, config: TargetConfig) -> tuple[ExpertBank | None, ...]:
    """Random experts in float32, a bank for each MoE layer and None for a dense one."""
    keys = jax.random.split(key, config.num_layers)
    return tuple(
        None if layer in config.dense_layers else init_bank(keys[layer], config)
        for layer in range(config.num_layers)
    )


def empty_caches(config: TargetConfig, rows: int, dtype: jnp.dtype) -> tuple[LayerCache, ...]:
    """Preallocated caches of `rows` positions, one a layer."""
    return tuple(
        empty_cache(rows, config.num_kv_heads, config.head_dim, dtype)
        for _ in range(config.num_layers)
    )
