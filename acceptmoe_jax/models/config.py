"""Frozen model configs, made from a Hugging Face `config.json`.

A key that changes the numerics and that we do not implement is refused, by name; keys that do
not matter for inference (dropout, initialisers, training losses) are ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from acceptmoe_jax.errors import UserError

_REQUIRED = object()


class _Fields:
    """Typed access to the keys of a config; every error names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.raw = raw
        self.source = source

    def get(self, kind: type, *names: str, default: Any = _REQUIRED) -> Any:
        """The value of the first of `names` that is present (aliases), as `kind`."""
        for name in names:
            if self.raw.get(name) is None:
                continue
            value = self.raw[name]
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise UserError(
                    f"{self.source}: {name} should be of type {kind.__name__}, not {value!r}"
                )
            return value
        if default is _REQUIRED:
            raise UserError(f"{self.source}: the key {names[0]} is missing")
        return default

    def positive(self, *names: str, default: Any = _REQUIRED) -> int:
        value = self.get(int, *names, default=default)
        if value < 1:
            raise UserError(f"{self.source}: {names[0]} should be positive, not {value}")
        return value

    def require(self, name: str, supported: Any) -> None:
        """Refuses a key whose value is neither absent, null nor the one that is implemented."""
        value = self.raw.get(name)
        if value is not None and value != supported:
            raise UserError(
                f"{self.source}: {name} = {value!r} is not supported (only {supported!r} is)"
            )

    def rope_theta(self) -> float:
        """The rotary base, from either spelling; refuses scaled variants."""
        parameters = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(parameters, Mapping):
            raise UserError(f"{self.source}: rope_parameters should be an object")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise UserError(f"{self.source}: rope type {kind!r} is not supported")
        if "rope_theta" in parameters:
            return _Fields(parameters, self.source).get(float, "rope_theta")
        return self.get(float, "rope_theta", default=10000.0)

    def heads(self) -> tuple[int, int, int]:
        """(query heads, kv heads, head width), checked against each other."""
        heads = self.positive("num_attention_heads")
        kv_heads = self.positive("num_key_value_heads", default=heads)
        width = self.positive("head_dim", default=self.positive("hidden_size") // heads)
        if heads % kv_heads:
            raise UserError(
                f"{self.source}: num_attention_heads = {heads} is not a multiple of "
                f"num_key_value_heads = {kv_heads}"
            )
        if width % 2:
            raise UserError(f"{self.source}: head_dim = {width} is odd; rotary pairs need it even")
        return heads, kv_heads, width


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig:
    """Qwen3-MoE; where a `config.json` key differs from our name, it stands beside it."""

    vocab_size: int
    hidden_size: int
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    num_kv_heads: int  # num_key_value_heads
    head_dim: int
    num_experts: int  # num_experts, or num_local_experts as transformers >= 5 writes it
    top_k: int  # num_experts_per_tok
    expert_width: int  # moe_intermediate_size
    dense_width: int  # intermediate_size, the width of dense layers
    norm_topk_prob: bool
    rms_norm_eps: float
    rope_theta: float
    max_positions: int  # max_position_embeddings
    tie_word_embeddings: bool = False
    dense_layers: tuple[int, ...] = ()  # from mlp_only_layers and decoder_sparse_step

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str) -> "Qwen3MoeConfig":
        """Reads a `config.json`.

        Args:
          raw: the parsed file.
          source: its name, for messages.

        Raises:
          UserError: naming `source` and the key, if a key is missing, has a wrong type or asks
            for something that is not implemented.
        """
        fields = _Fields(raw, source)
        fields.require("model_type", "qwen3_moe")
        fields.require("hidden_act", "silu")
        fields.require("attention_bias", False)
        fields.require("use_sliding_window", False)
        heads, kv_heads, head_dim = fields.heads()
        num_layers = fields.positive("num_hidden_layers")
        num_experts = fields.positive("num_experts", "num_local_experts")
        top_k = fields.positive("num_experts_per_tok")
        if top_k > num_experts:
            raise UserError(
                f"{source}: num_experts_per_tok = {top_k} exceeds num_experts = {num_experts}"
            )
        sparse_step = fields.positive("decoder_sparse_step", default=1)
        mlp_only = fields.get(list, "mlp_only_layers", default=[])
        return cls(
            vocab_size=fields.positive("vocab_size"),
            hidden_size=fields.positive("hidden_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            num_experts=num_experts,
            top_k=top_k,
            expert_width=fields.positive("moe_intermediate_size"),
            dense_width=fields.positive("intermediate_size"),
            norm_topk_prob=fields.get(bool, "norm_topk_prob", default=False),
            rms_norm_eps=fields.get(float, "rms_norm_eps", default=1e-6),
            rope_theta=fields.rope_theta(),
            max_positions=fields.positive("max_position_embeddings", default=32768),
            tie_word_embeddings=fields.get(bool, "tie_word_embeddings", default=False),
            dense_layers=tuple(
                layer
                for layer in range(num_layers)
                if layer in mlp_only or (layer + 1) % sparse_step
            ),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this model, in the hub's spelling."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_width,
            "intermediate_size": self.dense_width,
            "norm_topk_prob": self.norm_topk_prob,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_word_embeddings,
            "mlp_only_layers": list(self.dense_layers),
            "decoder_sparse_step": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
        }

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts, ascending."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    def default_aux_layers(self) -> tuple[int, int, int]:
        """Layers whose outputs EAGLE-3 reads unless the head says otherwise (SGLang's default)."""
        return (1, self.num_layers // 2 - 1, self.num_layers - 4)


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
    rope_theta: float
    aux_layer_ids: tuple[int, ...] | None  # outputs of these layers; None: the target's default
    norm_before_residual: bool = False  # the residual starts from hidden_norm(g), not from g

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str) -> "Eagle3Config":
        """Reads the head's `config.json`.

        Raises:
          UserError: naming `source` and the key; among others for a flag of a newer EAGLE that
            is true and unknown here, because ignoring it would ruin acceptance silently.
        """
        fields = _Fields(raw, source)
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
            rope_theta=fields.rope_theta(),
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
            "rope_theta": self.rope_theta,
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


# Flags that may be true: one that is implemented, and those of published heads that change nothing.
_KNOWN_TRUE_FLAGS = frozenset(
    {"norm_before_residual", "use_cache", "use_aux_hidden_state", "tie_word_embeddings"}
)
