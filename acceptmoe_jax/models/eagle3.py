"""The EAGLE-3 draft head: one Llama layer over the target's hidden states (arXiv 2503.01840).

    g   = fc(concat(aux_low, aux_mid, aux_high))
    x   = concat(input_layernorm(embed(token)), hidden_norm(g))
    r   = g + attention(x)
    out = r + mlp(post_attention_layernorm(r))          carried to the next step, before the norm
    logits = lm_head(norm(out))                          over the draft vocabulary

On later steps of a draft the carried hidden takes the place of g, and fc is skipped. Heads with
`norm_before_residual` add the attention to hidden_norm(g) instead.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.attention import Attention, LayerCache
from acceptmoe_jax.models.config import AttentionConfig, ConfigReader, RopeConfig
from acceptmoe_jax.models.layers import Embedding, GatedMLP, Linear, RMSNorm


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head of one Llama layer (`LlamaForCausalLMEagle3`)."""

    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int | None  # None: the head shares the target's lm_head and vocabulary
    rms_norm_eps: float
    rope: RopeConfig
    aux_layer_ids: tuple[int, ...] | None  # outputs of these layers; None: the target's default
    norm_before_residual: bool = False  # the residual starts from hidden_norm(g), not from g

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str) -> "Eagle3Config":
        """Reads the head's `config.json`.

        Raises:
          UserError: naming `source` and the key; among others for a flag of a newer EAGLE that
            is true and unknown here, because ignoring it would ruin acceptance silently.
        """
        fields = ConfigReader(raw, source)
        architectures = fields.get(list, "architectures", default=[])
        if architectures and architectures != ["LlamaForCausalLMEagle3"]:
            raise UserError(f"{source}: architectures = {architectures} is no EAGLE-3 head")
        fields.require("hidden_act", "silu")
        fields.require("attention_bias", False)
        fields.require("mlp_bias", False)
        fields.require("num_hidden_layers", 1)
        eagle = fields.get(dict, "eagle_config", default={})
        for scope, prefix in ((raw, ""), (eagle, "eagle_config.")):
            for flag, value in scope.items():
                if value is True and flag not in _KNOWN_TRUE_FLAGS:
                    raise UserError(f"{source}: {prefix}{flag} = true is not supported")
        heads, kv_heads, head_dim = fields.heads()
        ids = eagle.get("eagle_aux_hidden_state_layer_ids")
        if ids is not None:
            if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
                raise UserError(f"{source}: eagle_aux_hidden_state_layer_ids = {ids!r} is invalid")
            if len(set(ids)) != len(ids):
                raise UserError(f"{source}: eagle_aux_hidden_state_layer_ids = {ids} repeats")
        hidden_size = fields.positive("hidden_size")
        draft_vocab = fields.get(int, "draft_vocab_size", default=None)
        return cls(
            hidden_size=hidden_size,
            target_hidden_size=fields.positive("target_hidden_size", default=hidden_size),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.positive("intermediate_size"),
            vocab_size=fields.positive("vocab_size"),
            draft_vocab_size=draft_vocab,
            rms_norm_eps=fields.get(float, "rms_norm_eps", default=1e-6),
            rope=fields.rope(),
            aux_layer_ids=None if ids is None else tuple(sorted(ids)),
            norm_before_residual=fields.get(bool, "norm_before_residual", default=False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this head, as published heads write it."""
        raw = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            **self.rope.to_hf(),
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "norm_before_residual": self.norm_before_residual,
        }
        if self.aux_layer_ids is not None:
            raw["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
                "use_aux_hidden_state": True,
            }
        return raw

    @property
    def attention(self) -> AttentionConfig:
        """Of the head's only layer."""
        return AttentionConfig(self.num_heads, self.num_kv_heads, self.head_dim, self.rope)


# Flags that may be true: one that is implemented, and those of published heads that change nothing.
_KNOWN_TRUE_FLAGS = frozenset(
    {"norm_before_residual", "use_cache", "use_aux_hidden_state", "tie_word_embeddings"}
)


class DraftLayer(nn.Module):
    """The head's only layer; `midlayer` on disk."""

    config: Eagle3Config

    def setup(self):
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps)
        self.self_attn = Attention(c.attention, c.hidden_size)
        self.mlp = GatedMLP(c.intermediate_size)

    def __call__(self, embeddings, g, positions, mask, cache, start):
        normed = self.hidden_norm(g)
        x = jnp.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        y, cache = self.self_attn(x, positions, mask, cache, start)
        r = (normed if self.config.norm_before_residual else g) + y
        return r + self.mlp(self.post_attention_layernorm(r)), cache


class Eagle3Head(nn.Module):
    """`owns_embedding`: the head brings its own table instead of sharing the target's."""

    config: Eagle3Config
    owns_embedding: bool = False

    def setup(self):
        c = self.config
        self.fc = Linear(c.hidden_size, ("embed", "aux"))
        self.midlayer = DraftLayer(c)
        self.norm = RMSNorm(c.rms_norm_eps)
        if c.draft_vocab_size is not None:
            self.lm_head = Linear(c.draft_vocab_size, ("vocab", "embed"))
        if self.owns_embedding:
            self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)

    def __call__(
        self,
        embeddings: Float[Array, "... T D"],
        g: Float[Array, "... T D"],
        positions: Int[Array, "... T"],
        mask: Bool[Array, "... T S"],
        cache: LayerCache | None = None,
        start: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "... T D"], LayerCache | None]:
        """Runs T rows; returns the carried hidden (before the norm) and the cache.

        Args:
          embeddings: of the token that follows each position.
          g: fused target states (`fuse`), or the hidden carried from the step before.
          positions: the target's position of the row's token, minus 1.
          mask, cache, start: as in `Attention`.
        """
        return self.midlayer(embeddings, g, positions, mask, cache, start)

    def fuse(self, aux: Float[Array, "... T A"]) -> Float[Array, "... T D"]:
        """Fuses the target's captured hidden states, concatenated in ascending layer order."""
        return self.fc(aux)

    def embed(self, tokens: Int[Array, "... T"]) -> Float[Array, "... T D"]:
        """The head's own embedding; call it only where `owns_embedding`."""
        return self.embed_tokens(tokens)

    def normalise(self, hidden: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The final norm, for heads that share the target's `lm_head`."""
        return self.norm(hidden)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits over the draft vocabulary."""
        return self.lm_head(self.norm(hidden), out_dtype=jnp.float32)

    def declare(self) -> None:
        """Touches every parameter, so that `init` declares the whole tree."""
        c = self.config
        row = jnp.zeros((1,), jnp.int32)
        g = self.fuse(jnp.zeros((1, 3 * c.target_hidden_size)))
        embeddings = self.embed(row) if self.owns_embedding else jnp.zeros((1, c.hidden_size))
        hidden, _ = self(embeddings, g, row, jnp.ones((1, 1), bool))
        self.normalise(hidden) if c.draft_vocab_size is None else self.logits(hidden)


def init_params(
    key: jax.Array, config: Eagle3Config, owns_embedding: bool = False
) -> dict[str, Any]:
    """Random parameters in float32, as a nested dict."""
    return nn.unbox(Eagle3Head(config, owns_embedding).init(key, method="declare")["params"])


def abstract_params(
    config: Eagle3Config, dtype: jnp.dtype, owns_embedding: bool = False
) -> dict[str, Any]:
    """Shapes of the parameters without allocating any."""
    tree = jax.eval_shape(lambda: init_params(jax.random.key(0), config, owns_embedding))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
