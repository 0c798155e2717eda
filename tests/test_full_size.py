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
from acceptmoe_jax.models.experts import bank_weights
from acceptmoe_jax.models.families import target_config
from acceptmoe_jax.models.published import (
    GPT_OSS_120B,
    GPT_OSS_120B_EAGLE3,
    PUBLISHED,
    QWEN3_30B_A3B,
)
from acceptmoe_jax.runtime import abstract
from acceptmoe_jax.selection import SelectorConfig
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.eagle3 import owns_embedding, owns_output
from acceptmoe_jax.weights.key_maps import eagle3_key
from acceptmoe_jax.weights.loading import TreePlan, check_complete, leaf_paths
from acceptmoe_jax.weights.safetensors_io import TensorEntry
from acceptmoe_jax.weights.targets import plan_target
from tests.gpt_oss_layout import BF16, layout


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
    "qwen3_moe": (QWEN3_30B_A3B, qwen3_moe_layout(), 18867, 61_064_245_248),
    "gpt_oss": (GPT_OSS_120B, layout(GPT_OSS_120B, mxfp4=True), 687, 65_248_815_744),
    "gpt_oss_bf16": (GPT_OSS_120B, layout(GPT_OSS_120B, mxfp4=False), 615, 233_658_313_344),
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
    config = target_config(checkpoint.config, checkpoint.config_file)
    return config, plan_target(checkpoint, config, dtype)


def abstract_tree(plan: TreePlan) -> Any:
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves]
    return jax.tree.unflatten(plan.structure, leaves)


def size_of(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_abstract_weights_are_those_that_a_loader_plans(name):
    setup = abstract.published_setup(PUBLISHED[name])
    weights = abstract.abstract_weights(setup, jnp.bfloat16, mxfp4=PUBLISHED[name].mxfp4)
    plans = plans_of({"qwen3-30b-a3b": "qwen3_moe", "gpt-oss-120b": "gpt_oss"}[name], jnp.bfloat16)
    target, *banks = (abstract_tree(plan) for plan in plans[1])
    assert weights.target == target
    assert [bank_weights(bank) for bank in weights.banks] == banks


# --- Heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize("own_embedding", [True, False])
def test_a_head_of_gpt_oss_is_as_published(own_embedding, own_output):
    raw = dict(GPT_OSS_120B_EAGLE3, draft_vocab_size=32000 if own_output else None)
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
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_full_round_compiles_and_copies_neither_weights_nor_caches(name):
    published = PUBLISHED[name]
    # In float32: for the CPU, XLA turns bfloat16 weights into float32 copies, ahead of the loops.
    dtype = jnp.float32
    setup = abstract.published_setup(published)
    weights = abstract.abstract_weights(setup, dtype, mxfp4=published.mxfp4)
    run, arguments = abstract.abstract_round(
        setup, weights, 4096, dtype, SelectorConfig(policy="acceptmoe", top_k=setup.target.top_k)
    )
    memory = jax.jit(run, donate_argnums=1).lower(*arguments).compile().memory_analysis()
    caches = size_of(arguments[1])
    assert memory.alias_size_in_bytes >= 0.99 * caches, "a donated cache is copied"
    assert memory.temp_size_in_bytes < size_of(weights.banks[0]), "weights are copied"
