"""A tiny random target with its head, every dimension a different number, for engine tests."""

import dataclasses

import jax
import jax.numpy as jnp

from acceptmoe_jax.models import eagle3, qwen3_moe
from acceptmoe_jax.models.config import Eagle3Config, Qwen3MoeConfig
from acceptmoe_jax.runtime.programs import Setup, Weights
from acceptmoe_jax.speculation import TreeConfig

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
    rope_theta=1e4,
    max_positions=1024,
    dense_layers=(1,),
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
    rope_theta=1e4,
    aux_layer_ids=(0, 1, 3),
)
TREE = TreeConfig(steps=3, top_k=4, nodes=15)


def setup(tree: TreeConfig = TREE, **changes) -> Setup:
    """The static part; `changes` go to the target's config."""
    target = dataclasses.replace(TARGET, **changes)
    return Setup(target, HEAD, HEAD.aux_layer_ids, False, tree)


def weights(seed: int = 0, **changes) -> Weights:
    """Random weights, large enough that every part matters to the argmax."""
    target_key, bank_key, head_key, map_key = jax.random.split(jax.random.key(seed), 4)
    config = dataclasses.replace(TARGET, **changes)

    def wide(tree):
        return jax.tree.map(
            lambda leaf: leaf * 10 if leaf.ndim > 1 and leaf.dtype == jnp.float32 else leaf, tree
        )

    chosen = jax.random.permutation(map_key, TARGET.vocab_size)[: HEAD.draft_vocab_size]
    return Weights(
        target=wide(qwen3_moe.init_params(target_key, config)),
        banks=wide(qwen3_moe.init_banks(bank_key, config)),
        head=wide(eagle3.init_params(head_key, HEAD)),
        target_ids=jnp.sort(chosen).astype(jnp.int32),
    )
