"""Tiny Qwen3-MoE checkpoints as transformers saves them, and the reference it makes of them."""

import pathlib

import numpy as np
import torch
import transformers

from tests.torch_reference import Reference, additive_mask, load_eagerly, randomise

# Every dimension of a configuration is a different number: two equal ones hide a transposed axis.
_CONFIGS = {
    "qwen3_moe_norm": dict(
        vocab_size=199,
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        num_experts=13,
        num_experts_per_tok=3,
        moe_intermediate_size=22,
        intermediate_size=56,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        rms_norm_eps=1e-6,
    ),
    "qwen3_moe_nonorm": dict(
        vocab_size=211,
        hidden_size=44,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=14,
        num_experts=17,
        num_experts_per_tok=5,
        moe_intermediate_size=18,
        intermediate_size=58,
        mlp_only_layers=[],
        norm_topk_prob=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rms_norm_eps=1e-5,
    ),
}
# The first checkpoint is one file; the second is cut into shards with an index.
_SHARD_SIZE = {"qwen3_moe_norm": "1GB", "qwen3_moe_nonorm": "200KB"}

_WEIGHT_STD = 0.2  # ten times transformers' default, so that a wrong weight shows in the logits


def save_checkpoint(name: str, directory: pathlib.Path, seed: int) -> None:
    """Saves a random checkpoint with transformers' own `save_pretrained`.

    Args:
      name: one of `reference_cases.QWEN3_MOE`.
      directory: where config.json and the safetensors file or files go.
      seed: of the weights.
    """
    config = transformers.Qwen3MoeConfig(max_position_embeddings=512, **_CONFIGS[name])
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.float32)
    randomise(model, seed, lambda name, parameter: _WEIGHT_STD)
    model.save_pretrained(directory, max_shard_size=_SHARD_SIZE[name])


def load_reference(directory: pathlib.Path) -> Reference:
    """The reference that transformers makes of a checkpoint directory."""
    model = load_eagerly(transformers.Qwen3MoeForCausalLM, directory)
    layers = enumerate(model.model.layers)
    routers = {index: layer.mlp.gate for index, layer in layers if hasattr(layer.mlp, "gate")}
    return Reference(model, routers, _route_inside, _masks)


def _route_inside(
    router: torch.nn.Module, x: torch.Tensor, logits: torch.Tensor, allowed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of rows that route inside `allowed` [E].

    Masking the logits decides which experts a row gets. With norm_topk_prob the weights are the
    softmax over the k chosen. Without it transformers' formula on masked logits would be a softmax
    over the allowed experts alone, which inflates every weight as soon as an expert is masked;
    the method keeps the model's own gate values, softmax over ALL experts gathered at the chosen.
    """
    del x
    masked = logits.masked_fill(~allowed, -torch.inf)
    chosen = torch.topk(masked, router.top_k, dim=-1).indices
    if router.norm_topk_prob:
        return torch.softmax(masked.gather(-1, chosen), dim=-1), chosen
    return torch.softmax(logits, dim=-1).gather(-1, chosen), chosen


def _masks(visible: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """One mask for all layers: this family has no windows."""
    del positions
    return additive_mask(visible)
