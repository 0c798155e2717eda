"""GPT-OSS: what a `config.json` of this family says of the decoder."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.config import AttentionConfig, ConfigReader, TargetConfig
from pallas_kernels.masked_expert_gemm import GatedActivation

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(TargetConfig):
    """GPT-OSS; `expert_width` is `intermediate_size`."""

    sliding_window: int
    layer_types: tuple[str, ...]  # FULL or SLIDING, a layer each
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702  # makes the sigmoid a near GELU

    norm_topk_prob = True  # its softmax runs over the chosen logits, which comes to the same
    dense_layers = ()
    router_name = "router"
    router_bias = True
    expert_bias = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str) -> "GptOssConfig":
        """Reads a `config.json`.

        Args:
          raw: the parsed file.
          source: its name, for messages.

        Raises:
          UserError: naming `source` and the key, if a key is missing, has a wrong type or asks
            for something that is not implemented.
        """
        fields = ConfigReader(raw, source)
        fields.require("model_type", "gpt_oss")
        fields.require("attention_bias", True)
        quantization = fields.get(dict, "quantization_config", default={})
        ConfigReader(quantization, f"{source}: quantization_config").require(
            "quant_method", "mxfp4"
        )
        shared = fields.shared(rms_norm_eps=1e-5, max_positions=131072)
        layers, layer_types = shared["num_layers"], fields.get(list, "layer_types")
        if len(layer_types) != layers or any(name not in (FULL, SLIDING) for name in layer_types):
            raise UserError(
                f"{source}: layer_types should name {FULL} or {SLIDING} for each of the {layers} "
                f"layers, not {layer_types}"
            )
        # transformers would take the published model's here, and others none.
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
        if not scaling:
            raise UserError(f"{source}: the key rope_scaling (or rope_parameters) is missing")
        if raw.get("rope_theta") is None and scaling.get("rope_theta") is None:
            raise UserError(f"{source}: the key rope_theta is missing")
        limit = fields.get(float, "swiglu_limit", default=7.0)
        if not limit > 0:
            raise UserError(f"{source}: swiglu_limit should be positive, not {limit}")
        return cls(
            **shared,
            expert_width=fields.positive("intermediate_size"),
            sliding_window=fields.positive("sliding_window"),
            layer_types=tuple(layer_types),
            swiglu_limit=limit,
            swiglu_alpha=fields.get(float, "swiglu_alpha", default=1.702),
        )

    def to_hf(self, mxfp4: bool) -> dict[str, Any]:
        """The `config.json` of this model, in the hub's spelling.

        Args:
          mxfp4: the experts are stored as blocks and scales.
        """
        config = {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            **self.shared_hf(),
            "num_local_experts": self.num_experts,
            "intermediate_size": self.expert_width,
            "sliding_window": self.sliding_window,
            "layer_types": list(self.layer_types),
            "swiglu_limit": self.swiglu_limit,
            "swiglu_alpha": self.swiglu_alpha,
            "attention_bias": True,
        }
        if mxfp4:
            config["quantization_config"] = {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            }
        return config

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(
            self.num_heads, self.num_kv_heads, self.head_dim, self.rope, bias=True, sinks=True
        )

    @property
    def activation(self) -> GatedActivation:
        return GatedActivation(slope=self.swiglu_alpha, shift=1.0, limit=self.swiglu_limit)

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None
