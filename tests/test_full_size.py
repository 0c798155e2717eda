"""The published sizes, without their weights: shapes, key maps, and the compiled round."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from acceptmoe_jax.models import eagle3, qwen3_moe
from acceptmoe_jax.models.config import Eagle3Config, Qwen3MoeConfig
from acceptmoe_jax.models.experts import abstract_bank
from acceptmoe_jax.runtime import programs
from acceptmoe_jax.selection import SelectorConfig
from acceptmoe_jax.speculation import TreeConfig
from acceptmoe_jax.weights.key_maps import bank_names, qwen3_moe_key
from acceptmoe_jax.weights.loading import leaf_paths

# config.json of Qwen/Qwen3-30B-A3B-Instruct-2507 and of the SpecForge heads for it.
TARGET = Qwen3MoeConfig.from_hf(
    {
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
    },
    "config.json",
)
HEAD = Eagle3Config.from_hf(
    {
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
    },
    "config.json",
)


def _abstract_weights(dtype: jnp.dtype = jnp.bfloat16) -> programs.Weights:
    return programs.Weights(
        target=qwen3_moe.abstract_params(TARGET, dtype),
        banks=(abstract_bank(TARGET, dtype),) * TARGET.num_layers,
        head=eagle3.abstract_params(HEAD, dtype),
        target_ids=jax.ShapeDtypeStruct((HEAD.draft_vocab_size,), jnp.int32),
    )


def test_the_parameters_are_those_of_the_published_model():
    """30.5 B in the model card; the exact count is the sum over the published shapes."""
    weights = _abstract_weights()
    count = sum(
        leaf.size
        for leaf in jax.tree.leaves((weights.target, weights.banks))
        if leaf.dtype == jnp.bfloat16
    )
    assert count == 30_532_122_624


def test_the_key_map_covers_the_hubs_keys():
    matrices = dict.fromkeys(
        ("gate", "up", "down"), jax.ShapeDtypeStruct((128, 1, 1), jnp.bfloat16)
    )
    keys = [qwen3_moe_key(path) for path, _ in leaf_paths(_abstract_weights().target)]
    for layer in range(TARGET.num_layers):
        for path, _ in leaf_paths(matrices):
            keys += bank_names(layer, TARGET.num_experts)(path)
    layer_parts = (
        "self_attn.[qkvo]_proj",
        "self_attn.[qk]_norm",
        "(input|post_attention)_layernorm",
        "mlp.gate",
        r"mlp.experts.\d+.(gate|up|down)_proj",
    )
    layers = rf"model.layers.\d+.({'|'.join(layer_parts)})"
    pattern = re.compile(rf"({layers}|model.embed_tokens|model.norm|lm_head).weight")
    assert all(pattern.fullmatch(key) for key in keys)
    # 48 layers of 4 projections, 4 norms, a router and 384 expert matrices; and 3 more.
    assert len(set(keys)) == len(keys) == 48 * (4 + 4 + 1 + 384) + 3


def test_the_default_layers_that_a_head_reads_are_sglangs():
    assert TARGET.default_aux_layers() == (1, 23, 44)


@pytest.mark.slow
def test_the_full_round_compiles_and_copies_neither_weights_nor_caches():
    # In float32: for the CPU, XLA turns bfloat16 weights into float32 copies, ahead of the loops.
    dtype = jnp.float32
    setup = programs.Setup(TARGET, HEAD, TARGET.default_aux_layers(), False, TreeConfig())
    state = jax.eval_shape(lambda: programs.empty_state(setup, 4096, dtype))
    run = functools.partial(
        programs.speculative_round, setup, selector=SelectorConfig(policy="acceptmoe")
    )
    phat = jax.ShapeDtypeStruct((6,), jnp.float32)
    compiled = jax.jit(run, donate_argnums=1).lower(_abstract_weights(dtype), state, phat).compile()
    memory = compiled.memory_analysis()
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.99 * caches, "a donated cache is copied"
    one_layer = 128 * 3 * 2048 * 768 * 4
    assert memory.temp_size_in_bytes < one_layer, "weights are copied"
