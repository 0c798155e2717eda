"""Qwen3-MoE: what a `config.json` of this family says of the decoder."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from acceptmoe_jax.models.config import AttentionConfig, ConfigReader, TargetConfig
from pallas_kernels.masked_expert_gemm import GatedActivation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(TargetConfig):
    """Qwen3-MoE; `expert_width` is `moe_intermediate_size`."""

    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()  # from mlp_only_layers and decoder_sparse_step
    dense_width: int  # intermediate_size, the width of dense layers

    router_name = "gate"
    router_bias = False
    expert_bias = False

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
        fields = ConfigReader(raw, source)
        fields.require("model_type", "qwen3_moe")
        fields.require("attention_bias", False)
        fields.require("use_sliding_window", False)
        shared = fields.shared(rms_norm_eps=1e-6, max_positions=32768)
        sparse_step = fields.positive("decoder_sparse_step", default=1)
        mlp_only = fields.get(list, "mlp_only_layers", default=[])
        return cls(
            **shared,
            expert_width=fields.positive("moe_intermediate_size"),
            norm_topk_prob=fields.get(bool, "norm_topk_prob", default=False),
            dense_layers=tuple(
                layer
                for layer in range(shared["num_layers"])
                if layer in mlp_only or (layer + 1) % sparse_step
            ),
            dense_width=fields.positive("intermediate_size"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this model, in the hub's spelling."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **self.shared_hf(),
            "num_experts": self.num_experts,
            "moe_intermediate_size": self.expert_width,
            "intermediate_size": self.dense_width,
            "norm_topk_prob": self.norm_topk_prob,
            "mlp_only_layers": list(self.dense_layers),
            "decoder_sparse_step": 1,
            "attention_bias": False,
            "use_sliding_window": False,
        }

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(
            self.num_heads, self.num_kv_heads, self.head_dim, self.rope, self.rms_norm_eps
        )

    @property
    def activation(self) -> GatedActivation:
        return GatedActivation()
