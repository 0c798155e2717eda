"""A tiny random target with its head, every dimension a different number, for engine tests."""

import dataclasses
import zlib

import jax
import jax.numpy as jnp

from acceptmoe_jax.models import decoder, eagle3
from acceptmoe_jax.models.config import RopeConfig, TargetConfig
from acceptmoe_jax.models.eagle3 import Eagle3Config
from acceptmoe_jax.models.gpt_oss import FULL, SLIDING, GptOssConfig
from acceptmoe_jax.models.qwen3_moe import Qwen3MoeConfig
from acceptmoe_jax.runtime.programs import Setup, Weights
from acceptmoe_jax.speculation import TreeConfig
from pallas_kernels.mxfp4 import quantise

TARGET = Qwen3MoeConfig(
    vocab_size=97,
    hidden_size=24,
    num_layers=5,
    num_heads=6,
    num_kv_heads=3,
    head_dim=10,
    num_experts=13,
    top_k=4,
    expert_width=18,
    dense_width=44,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1e4),
    max_positions=1024,
    dense_layers=(1,),
)
# Its window is shorter than prompts, and its experts can be packed: 32 divides both widths.
GPT_OSS = GptOssConfig(
    vocab_size=97,
    hidden_size=32,
    num_layers=5,
    num_heads=6,
    num_kv_heads=3,
    head_dim=10,
    num_experts=13,
    top_k=4,
    expert_width=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(1e4, factor=8.0, original_positions=128, truncate=False),
    max_positions=1024,
    sliding_window=7,
    layer_types=(SLIDING, FULL, SLIDING, SLIDING, FULL),
)
HEAD = Eagle3Config(
    hidden_size=24,
    target_hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=14,
    intermediate_size=52,
    vocab_size=97,
    draft_vocab_size=61,
    rms_norm_eps=1e-5,
    rope=RopeConfig(1e4),
    aux_layer_ids=(0, 1, 3),
)
TREE = TreeConfig(steps=3, top_k=4, nodes=15)


def head_for(target: TargetConfig) -> Eagle3Config:
    """The head, as wide as this target."""
    width = target.hidden_size
    return dataclasses.replace(HEAD, hidden_size=width, target_hidden_size=width)


def setup(target: TargetConfig = TARGET) -> Setup:
    """The static part."""
    return Setup(target, head_for(target), HEAD.aux_layer_ids, False, TREE)


def weights(target: TargetConfig = TARGET) -> Weights:
    """Random weights, large enough that every part matters to the argmax; GPT-OSS's are packed."""
    target_key, bank_key, head_key, map_key, zero_key = jax.random.split(jax.random.key(0), 5)

    def wide(tree):
        """Ten times what is drawn; biases and sinks, which begin at zero, are drawn."""

        def of(path, leaf):
            if leaf.dtype != jnp.float32 or (leaf.ndim == 1 and leaf.any()):
                return leaf
            if leaf.any():
                return leaf * 10
            key = jax.random.fold_in(zero_key, zlib.crc32(jax.tree_util.keystr(path).encode()))
            return jax.random.normal(key, leaf.shape) / 2

        return jax.tree_util.tree_map_with_path(of, tree)

    banks = wide(decoder.init_banks(bank_key, target))
    if isinstance(target, GptOssConfig):
        banks = tuple(
            bank.replace(**{name: quantise(getattr(bank, name)) for name in ("gate", "up", "down")})
            for bank in banks
        )
    chosen = jax.random.permutation(map_key, target.vocab_size)[: HEAD.draft_vocab_size]
    return Weights(
        target=wide(decoder.init_params(target_key, target)),
        banks=banks,
        head=wide(eagle3.init_params(head_key, head_for(target))),
        target_ids=jnp.sort(chosen).astype(jnp.int32),
    )
