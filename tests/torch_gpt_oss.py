"""Tiny GPT-OSS checkpoints, the reference transformers makes of them, and its rotary positions.

One checkpoint is what transformers saves of a model it has converted: bfloat16, the experts as
`[E, in, out]`. The other is laid out as on the hub, experts in MXFP4 and config.json in the older
spelling, which transformers reads and does not write.
"""

import json
import pathlib

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers.models.gpt_oss import modeling_gpt_oss

from tests.reference_cases import ROPES
from tests.torch_reference import (
    Reference,
    UnfitSeedError,
    additive_mask,
    block_forward,
    forward,
    load_eagerly,
    randomise,
    visible_keys,
)

# Every dimension is a different number, the window among them. The layers of the first do not
# alternate; the second starts with the type that the hub's models do not start with.
_CONVERTED = dict(
    vocab_size=173,
    hidden_size=36,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=14,
    num_local_experts=11,
    num_experts_per_tok=3,
    intermediate_size=22,
    sliding_window=7,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    # The ramp runs from 0.95 to 2.35 of the 7 pairs.
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e3,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
)
_MXFP4 = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 151,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "experts_per_token": 3,
    "intermediate_size": 96,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"],
    "max_position_embeddings": 640,
    "initial_context_length": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    # The ramp, from 0.37 to 3.16 of the 5 pairs, is widened to whole ones.
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 320,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    },
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_SCALES = {"gate_up_proj": (124, 127), "down_proj": (118, 121)}  # from, up to and without

_MIN_CLAMPED = 0.05  # of all gates, and of all ups
_MIN_DIFFERENCE = 0.01  # in the logits, of windows that count rows


def save_checkpoint(name: str, directory: pathlib.Path, seed: int) -> None:
    """Saves a random checkpoint.

    Args:
      name: one of `reference_cases.GPT_OSS`.
      directory: where config.json and model.safetensors go.
      seed: of the weights.
    """
    if name == "gpt_oss_converted":
        model = _random_model(transformers.GptOssConfig(**_CONVERTED), seed)
        model.save_pretrained(directory)
        return
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(_MXFP4, indent=2) + "\n")
    dense = {key: value for key, value in _MXFP4.items() if key != "quantization_config"}
    tensors = _random_model(transformers.GptOssConfig(**dense), seed).state_dict()
    rng = np.random.default_rng(seed)
    for key in [key for key in tensors if key.endswith(tuple(_SCALES))]:
        experts, width, out = tensors.pop(key).shape
        blocks = rng.integers(256, size=(experts, out, width // 32, 16), dtype=np.uint8)
        low, high = _SCALES[key.rpartition(".")[2]]
        scales = rng.integers(low, high, size=blocks.shape[:-1], dtype=np.uint8)
        tensors[f"{key}_blocks"] = torch.from_numpy(blocks)
        tensors[f"{key}_scales"] = torch.from_numpy(scales)
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _random_model(config: transformers.GptOssConfig, seed: int) -> transformers.GptOssForCausalLM:
    """A model in bfloat16 in which biases and sinks matter and gates and ups are often large."""

    def std(name: str, parameter: torch.nn.Parameter) -> float:
        if name.endswith("gate_up_proj"):
            return 6 * config.hidden_size**-0.5
        if name.endswith("down_proj"):
            return 0.1 * config.intermediate_size**-0.5
        if name.endswith(("sinks", "bias")):
            return 1.0
        return 1.2 * parameter.shape[-1] ** -0.5

    model = transformers.GptOssForCausalLM(config)
    randomise(model, seed, std)
    return model.to(torch.bfloat16)


def load_reference(directory: pathlib.Path) -> Reference:
    """The reference that transformers makes of a checkpoint directory, MXFP4 dequantised."""
    config = transformers.GptOssConfig.from_pretrained(directory)
    packed = {}
    if hasattr(config, "quantization_config"):
        packed["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model = load_eagerly(transformers.GptOssForCausalLM, directory, **packed)

    def masks(visible: np.ndarray, positions: np.ndarray) -> dict[str, torch.Tensor]:
        """The window counts positions, the row's own among them."""
        behind = positions[:, None] - positions
        return {
            "full_attention": additive_mask(visible),
            "sliding_attention": additive_mask(visible & (behind < config.sliding_window)),
        }

    return Reference(
        model,
        {index: layer.mlp.router for index, layer in enumerate(model.model.layers)},
        _route_inside,
        masks,
        block_nodes=20,
        max_depth=8,  # more than a window: some nodes do not see the root
    )


def _route_inside(
    router: torch.nn.Module, x: torch.Tensor, logits: torch.Tensor, allowed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of rows that route inside `allowed` [E].

    A bias of -inf masks the logits before the router's own top-k and softmax.
    """
    del logits
    bias = router.bias
    router.bias = torch.nn.Parameter(bias.masked_fill(~allowed, -torch.inf))
    try:
        _, weights, experts = router.forward(x)  # not by a call, which would run the hooks again
    finally:
        router.bias = bias
    return weights, experts


def refuse_lenient_cases(
    reference: Reference, prompt: dict[str, np.ndarray], block: dict[str, np.ndarray]
) -> None:
    """Raises UnfitSeedError if the cases would not notice a missing clamp or a window of rows.

    Args:
      prompt: a `prompt_case` of this reference.
      block: its `block_case`.
    """
    limit = reference.model.config.swiglu_limit
    gates, ups = [], []
    experts = [layer.mlp.experts for layer in reference.model.model.layers]
    for module in experts:

        def watch(gate_up: torch.Tensor, apply=module._apply_gate) -> torch.Tensor:
            gates.append((gate_up[..., ::2] > limit).flatten())
            ups.append((gate_up[..., 1::2].abs() > limit).flatten())
            return apply(gate_up)

        module._apply_gate = watch
    try:
        forward(reference, prompt["input_ids"].astype(np.int64))
    finally:
        for module in experts:
            del module._apply_gate
    clamped = min(torch.cat(kind).float().mean().item() for kind in (gates, ups))
    if clamped < _MIN_CLAMPED:
        raise UnfitSeedError(f"only {clamped:.1%} of the gates or ups are clamped")
    visible = visible_keys(len(block["prefix_ids"]), block["parents"])
    by_rows = block_forward(
        reference, block, masks=reference.masks(visible, np.arange(len(visible)))
    )
    difference = np.abs(by_rows["logits"] - block["natural/logits"]).max()
    if difference < _MIN_DIFFERENCE:
        raise UnfitSeedError(f"a window of rows changes the logits by {difference:.1e} only")


def rope_case() -> dict[str, np.ndarray]:
    """What transformers makes of each of `reference_cases.ROPES`.

    Returns:
      For each name, NAME/inv_freq float32 [H / 2] and NAME/attention_factor float64 [].
    """
    record = {}
    for name, raw in ROPES.items():
        rotary = modeling_gpt_oss.GptOssRotaryEmbedding(transformers.GptOssConfig(**raw))
        record[f"{name}/inv_freq"] = rotary.inv_freq.numpy()
        record[f"{name}/attention_factor"] = np.array(rotary.attention_scaling, np.float64)
    return record
