"""The published targets and heads: what their config.json says, for work without their weights."""

import dataclasses
from typing import Any

# Qwen/Qwen3-30B-A3B-Instruct-2507, and the SpecForge heads for it.
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000_000,
    "rope_scaling": None,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B_EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
}
# openai/gpt-oss-120b, and the heads for it.
GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
GPT_OSS_120B_EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 2880,
    "intermediate_size": 17280,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "draft_vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 17, 33],
        "use_aux_hidden_state": True,
    },
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A published target with its head.

    Attributes:
      name: for tables.
      target, head: their config.json.
      mxfp4: the experts are packed.
    """

    name: str
    target: dict[str, Any]
    head: dict[str, Any]
    mxfp4: bool


PUBLISHED = {
    "qwen3-30b-a3b": Published("Qwen3-30B-A3B", QWEN3_30B_A3B, QWEN3_30B_A3B_EAGLE3, mxfp4=False),
    "gpt-oss-120b": Published("GPT-OSS-120B", GPT_OSS_120B, GPT_OSS_120B_EAGLE3, mxfp4=True),
}
