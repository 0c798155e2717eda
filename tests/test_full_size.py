"""The published sizes, without their weights: shapes, key maps, and the compiled round."""

import collections
import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.models import eagle3
from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.eagle3 import Eagle3Config
from acceptmoe_jax.runtime import pretrained, programs
from acceptmoe_jax.selection import SelectorConfig
from acceptmoe_jax.speculation import TreeConfig
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.eagle3 import owns_embedding, owns_output
from acceptmoe_jax.weights.key_maps import eagle3_key
from acceptmoe_jax.weights.loading import TreePlan, check_complete, leaf_paths
from acceptmoe_jax.weights.safetensors_io import TensorEntry
from acceptmoe_jax.weights.targets import plan_target
from pallas_kernels.masked_expert_gemm import ExpertBank
from tests.gpt_oss_layout import BF16, layout

# config.json of Qwen/Qwen3-30B-A3B-Instruct-2507 and of the SpecForge heads for it.
QWEN3_MOE = {
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
QWEN3_MOE_HEAD = {
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
# config.json of openai/gpt-oss-120b and of the heads for it.
GPT_OSS = {
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
GPT_OSS_HEAD = {
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


def qwen3_moe_layout() -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Key -> (shape, dtype) of the published checkpoint."""
    layer = {
        "input_layernorm": (2048,),
        "post_attention_layernorm": (2048,),
        "self_attn.q_proj": (4096, 2048),
        "self_attn.k_proj": (512, 2048),
        "self_attn.v_proj": (512, 2048),
        "self_attn.o_proj": (2048, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate": (128, 2048),
    }
    for expert in range(128):
        layer[f"mlp.experts.{expert}.gate_proj"] = (768, 2048)
        layer[f"mlp.experts.{expert}.up_proj"] = (768, 2048)
        layer[f"mlp.experts.{expert}.down_proj"] = (2048, 768)
    shapes = {f"model.layers.{i}.{name}": shape for i in range(48) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (151936, 2048), "model.norm": (2048,)}
    shapes["lm_head"] = (151936, 2048)
    return {f"{name}.weight": (shape, BF16) for name, shape in shapes.items()}


# With the tensors and the bytes (`total_size`) that each index lists. No converted checkpoint is
# official: its bytes are twice the 116.83 billion parameters of the model card.
CHECKPOINTS = {
    "qwen3_moe": (QWEN3_MOE, qwen3_moe_layout(), 18867, 61_064_245_248),
    "gpt_oss": (GPT_OSS, layout(GPT_OSS, mxfp4=True), 687, 65_248_815_744),
    "gpt_oss_bf16": (GPT_OSS, layout(GPT_OSS, mxfp4=False), 615, 233_658_313_344),
}


def without_files(
    config: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], np.dtype]]
) -> Checkpoint:
    """A checkpoint that can be planned and checked, but not read."""
    directory = pathlib.Path("published")
    source = directory / "model.safetensors.index.json"
    entries = {
        key: TensorEntry(directory / "shard", key, dtype, shape, 0, math.prod(shape))
        for key, (shape, dtype) in tensors.items()
    }
    return Checkpoint(directory, config, source, entries)


@functools.cache
def plans_of(name: str, dtype: jnp.dtype) -> tuple[TargetConfig, list[TreePlan]]:
    checkpoint = without_files(*CHECKPOINTS[name][:2])
    config = pretrained.target_config(checkpoint)
    return config, plan_target(checkpoint, config, dtype)


def abstract_tree(plan: TreePlan) -> Any:
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves]
    return jax.tree.unflatten(plan.structure, leaves)


# --- Tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_model_takes_all_of_every_published_tensor_once(name):
    config, tensors, count, _ = CHECKPOINTS[name]
    assert len(tensors) == count
    plans = plans_of(name, jnp.bfloat16)[1]
    check_complete(without_files(config, tensors), plans)
    taken = collections.Counter()
    for plan in plans:
        for leaf in plan.leaves:
            for key in leaf.keys:
                taken[key] += math.prod(leaf.shape) // len(leaf.keys)
    assert taken == {key: math.prod(shape) for key, (shape, _) in tensors.items()}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_in_bfloat16_a_model_takes_the_bytes_of_its_file(name):
    plans = plans_of(name, jnp.bfloat16)[1]
    size = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for plan in plans for leaf in plan.leaves
    )
    assert size == CHECKPOINTS[name][3]


def test_the_published_experts_of_gpt_oss_stay_packed():
    bank = abstract_tree(plans_of("gpt_oss", jnp.bfloat16)[1][1])
    for matrix in (bank["gate"], bank["up"], bank["down"]):
        assert matrix.shape == (128, 2880, 2880)
        assert matrix.blocks.dtype == matrix.scales.dtype == jnp.uint8


# --- Heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize("own_embedding", [True, False])
def test_a_head_of_gpt_oss_is_as_published(own_embedding, own_output):
    raw = dict(GPT_OSS_HEAD, draft_vocab_size=32000 if own_output else None)
    head = Eagle3Config.from_hf(raw, "config.json")
    assert head.aux_layer_ids == (1, 17, 33)
    expected = {
        "fc.weight": (2880, 3 * 2880),
        "midlayer.input_layernorm.weight": (2880,),
        "midlayer.hidden_norm.weight": (2880,),
        "midlayer.post_attention_layernorm.weight": (2880,),
        "midlayer.self_attn.q_proj.weight": (4096, 2 * 2880),
        "midlayer.self_attn.k_proj.weight": (512, 2 * 2880),
        "midlayer.self_attn.v_proj.weight": (512, 2 * 2880),
        "midlayer.self_attn.o_proj.weight": (2880, 4096),
        "midlayer.mlp.gate_proj.weight": (17280, 2880),
        "midlayer.mlp.up_proj.weight": (17280, 2880),
        "midlayer.mlp.down_proj.weight": (2880, 17280),
        "norm.weight": (2880,),
    }
    if own_embedding:
        expected["embed_tokens.weight"] = (201088, 2880)
    if own_output:
        expected["lm_head.weight"] = (32000, 2880)
    checkpoint = without_files(raw, {key: (shape, BF16) for key, shape in expected.items()})
    assert owns_embedding(checkpoint) == own_embedding
    assert owns_output(checkpoint) == own_output
    params = eagle3.abstract_params(head, jnp.bfloat16, own_embedding)
    assert {eagle3_key(path): leaf.shape for path, leaf in leaf_paths(params)} == expected


def test_the_default_layers_that_a_head_reads_are_sglangs():
    config = plans_of("qwen3_moe", jnp.bfloat16)[0]
    assert config.default_aux_layers() == (1, 23, 44)


# --- The round ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "raw_head"), [("qwen3_moe", QWEN3_MOE_HEAD), ("gpt_oss", GPT_OSS_HEAD)]
)
def test_the_full_round_compiles_and_copies_neither_weights_nor_caches(name, raw_head):
    # In float32: for the CPU, XLA turns bfloat16 weights into float32 copies, ahead of the loops.
    dtype = jnp.float32
    config, plans = plans_of(name, dtype)
    head = Eagle3Config.from_hf(raw_head, "config.json")
    slot_of = jax.ShapeDtypeStruct((config.num_experts,), jnp.int32)
    target, *banks = (abstract_tree(plan) for plan in plans)
    weights = programs.Weights(
        target=target,
        banks=tuple(ExpertBank(**bank, slot_of=slot_of) for bank in banks),
        head=eagle3.abstract_params(head, dtype),
        target_ids=jax.ShapeDtypeStruct((head.draft_vocab_size,), jnp.int32),
    )
    capture = head.aux_layer_ids or config.default_aux_layers()
    setup = programs.Setup(config, head, capture, False, TreeConfig())
    state = jax.eval_shape(lambda: programs.empty_state(setup, 4096, dtype))
    run = functools.partial(
        programs.speculative_round, setup, selector=SelectorConfig(policy="acceptmoe")
    )
    phat = jax.ShapeDtypeStruct((6,), jnp.float32)
    compiled = jax.jit(run, donate_argnums=1).lower(weights, state, phat).compile()
    memory = compiled.memory_analysis()
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.99 * caches, "a donated cache is copied"
    one_layer = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(banks[0]))
    assert memory.temp_size_in_bytes < one_layer, "weights are copied"
