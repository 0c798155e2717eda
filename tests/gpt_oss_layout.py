"""GPT-OSS as the hub lays it out: every key with its shape and dtype, from the config alone."""

import ml_dtypes
import numpy as np

BF16, U8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint8)


def layout(config: dict, mxfp4: bool) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Key -> (shape, dtype) of a published checkpoint, or of one converted to bfloat16.

    Args:
      config: of the model, as in `config.json`.
      mxfp4: the published format.
    """
    d, vocab = config["hidden_size"], config["vocab_size"]
    f, e = config["intermediate_size"], config["num_local_experts"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.q_proj.bias": (q,),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (d, q),
        "self_attn.o_proj.bias": (d,),
        "self_attn.sinks": (config["num_attention_heads"],),
        "mlp.router.weight": (e, d),
        "mlp.router.bias": (e,),
        "mlp.experts.gate_up_proj_bias": (e, 2 * f),
        "mlp.experts.down_proj_bias": (e, d),
    }
    if mxfp4:
        layer |= {
            "mlp.experts.gate_up_proj_blocks": (e, 2 * f, d // 32, 16),
            "mlp.experts.gate_up_proj_scales": (e, 2 * f, d // 32),
            "mlp.experts.down_proj_blocks": (e, d, f // 32, 16),
            "mlp.experts.down_proj_scales": (e, d, f // 32),
        }
    else:
        layer |= {
            "mlp.experts.gate_up_proj": (e, d, 2 * f),
            "mlp.experts.down_proj": (e, f, d),
        }
    keys = {
        f"model.layers.{i}.{name}": shape
        for i in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    keys |= {
        "model.embed_tokens.weight": (vocab, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (vocab, d),
    }
    return {
        key: (shape, U8 if key.endswith(("_blocks", "_scales")) else BF16)
        for key, shape in keys.items()
    }
