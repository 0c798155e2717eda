"""Reading a Hugging Face `config.json`, and what the configs of all models have in common.

A key that changes the numerics and that we do not implement is refused, by name; keys that do
not matter for inference (dropout, initialisers, training losses) are ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from acceptmoe_jax.errors import UserError
from pallas_kernels.masked_expert_gemm import GatedActivation

_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: plain, or stretched by YaRN (arXiv 2309.00071) if `factor` is set."""

    theta: float
    factor: float | None = None
    original_positions: int = 0  # original_max_position_embeddings: the context trained on
    beta_fast: float = 32.0  # pairs that turn more often than this in it keep their frequency
    beta_slow: float = 1.0  # pairs that turn less often than this are slowed by `factor`
    truncate: bool = True  # the ramp between the two starts and ends at whole pairs
    attention_factor: float | None = None  # of cosines and sines; None: 0.1 ln(factor) + 1

    def to_hf(self) -> dict[str, Any]:
        """The two keys that older and newer programs both read."""
        scaling = None
        if self.factor is not None:
            scaling = {
                "rope_type": "yarn",
                "factor": self.factor,
                "original_max_position_embeddings": self.original_positions,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "truncate": self.truncate,
            }
            if self.attention_factor is not None:
                scaling["attention_factor"] = self.attention_factor
        return {"rope_theta": self.theta, "rope_scaling": scaling}


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What an attention layer is made of."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qk_norm_eps: float | None = None  # Qwen3's norm of q and k, a head at a time
    bias: bool = False  # on all four projections
    sinks: bool = False  # a learned logit a head joins the softmax and is dropped (GPT-OSS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A target, whichever its family; where a `config.json` key differs, it stands beside.

    A family adds its own fields, and says what the decoder and the engine ask below them.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    num_kv_heads: int  # num_key_value_heads
    head_dim: int
    num_experts: int  # num_experts, or num_local_experts
    top_k: int  # num_experts_per_tok, or experts_per_token
    expert_width: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int  # max_position_embeddings
    tie_word_embeddings: bool = False

    # Facts of one family, fields of the other.
    norm_topk_prob: ClassVar[bool]
    dense_layers: ClassVar[tuple[int, ...]]  # layers without experts
    # Facts of a family.
    router_name: ClassVar[str]  # of the router's projection, on disk
    router_bias: ClassVar[bool]
    expert_bias: ClassVar[bool]

    def shared_hf(self) -> dict[str, Any]:
        """What the `config.json` of every family has, in the hub's spelling."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_experts_per_tok": self.top_k,
            "rms_norm_eps": self.rms_norm_eps,
            **self.rope.to_hf(),
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
        }

    @property
    def attention(self) -> AttentionConfig:
        """The same in every layer but for the window."""
        raise NotImplementedError

    @property
    def activation(self) -> GatedActivation:
        """Of the experts."""
        raise NotImplementedError

    def window(self, layer: int) -> int | None:
        """How many positions a row of this layer sees, itself included; None: all before it."""
        del layer
        return None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers."""
        return tuple(dict.fromkeys(self.window(layer) for layer in range(self.num_layers)))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts, ascending."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    def default_aux_layers(self) -> tuple[int, int, int]:
        """Layers whose outputs EAGLE-3 reads unless the head says otherwise (SGLang's default)."""
        return (1, self.num_layers // 2 - 1, self.num_layers - 4)


class ConfigReader:
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

    def rope(self) -> RopeConfig:
        """Rotary positions from either spelling: `rope_parameters`, or `rope_scaling` and
        `rope_theta`; refuses what is neither plain nor YaRN, and what turns a part of a head."""
        self.require("partial_rotary_factor", 1.0)
        name = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        raw = self.raw.get(name) or {}
        if not isinstance(raw, Mapping):
            raise UserError(f"{self.source}: {name} should be an object, not {raw!r}")
        scaling = ConfigReader(raw, f"{self.source}: {name}")
        theta = self.get(float, "rope_theta", default=10000.0)
        theta = scaling.get(float, "rope_theta", default=theta)
        scaling.require("partial_rotary_factor", 1.0)
        kind = scaling.get(str, "rope_type", "type", default="default")
        if kind == "default":
            return RopeConfig(theta)
        if kind != "yarn":
            raise UserError(f"{self.source}: rope type {kind!r} is not supported")
        for key in ("mscale", "mscale_all_dim"):
            scaling.require(key, None)
        original = scaling.get(int, "original_max_position_embeddings", default=None)
        if original is None:
            original = self.positive("max_position_embeddings")
        rope = RopeConfig(
            theta=theta,
            factor=scaling.get(float, "factor"),
            original_positions=original,
            beta_fast=scaling.get(float, "beta_fast", default=32.0),
            beta_slow=scaling.get(float, "beta_slow", default=1.0),
            truncate=scaling.get(bool, "truncate", default=True),
            attention_factor=scaling.get(float, "attention_factor", default=None),
        )
        if not rope.factor >= 1 or original < 1 or not rope.beta_fast > rope.beta_slow > 0:
            raise UserError(
                f"{self.source}: {name} needs factor >= 1, a positive "
                f"original_max_position_embeddings and beta_fast > beta_slow > 0, not {dict(raw)}"
            )
        return rope

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

    def shared(self, rms_norm_eps: float, max_positions: int) -> dict[str, Any]:
        """The fields of `TargetConfig` but for `expert_width`.

        Args:
          rms_norm_eps, max_positions: the family's own, where the keys are missing.
        """
        self.require("hidden_act", "silu")
        heads, kv_heads, head_dim = self.heads()
        num_experts = self.positive("num_experts", "num_local_experts")
        top_k = self.positive("num_experts_per_tok", "experts_per_token")
        if top_k > num_experts:
            raise UserError(
                f"{self.source}: num_experts_per_tok = {top_k} exceeds num_experts = {num_experts}"
            )
        return dict(
            vocab_size=self.positive("vocab_size"),
            hidden_size=self.positive("hidden_size"),
            num_layers=self.positive("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            num_experts=num_experts,
            top_k=top_k,
            rms_norm_eps=self.get(float, "rms_norm_eps", default=rms_norm_eps),
            rope=self.rope(),
            max_positions=self.positive("max_position_embeddings", default=max_positions),
            tie_word_embeddings=self.get(bool, "tie_word_embeddings", default=False),
        )
