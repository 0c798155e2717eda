"""The EAGLE-3 draft head: one Llama layer over the target's hidden states (arXiv 2503.01840).

    g   = fc(concat(aux_low, aux_mid, aux_high))
    x   = concat(input_layernorm(embed(token)), hidden_norm(g))
    r   = g + attention(x)
    out = r + mlp(post_attention_layernorm(r))          carried to the next step, before the norm
    logits = lm_head(norm(out))                          over the draft vocabulary

On later steps of a draft the carried hidden takes the place of g, and fc is skipped. Heads with
`norm_before_residual` add the attention to hidden_norm(g) instead.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.models.attention import Attention, LayerCache
from acceptmoe_jax.models.config import Eagle3Config
from acceptmoe_jax.models.layers import Embedding, GatedMLP, Linear, RMSNorm


class DraftLayer(nn.Module):
    """The head's only layer; `midlayer` on disk."""

    config: Eagle3Config

    def setup(self):
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps)
        self.self_attn = Attention(
            c.num_heads, c.num_kv_heads, c.head_dim, c.rope_theta, c.hidden_size
        )
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
