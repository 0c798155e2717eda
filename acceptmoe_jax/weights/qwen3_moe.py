"""Qwen3-MoE experts on disk: a tensor for each matrix of each expert, as it lies in memory."""

import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.models.experts import EXPERT_MATRICES, abstract_bank, bank_weights
from acceptmoe_jax.models.qwen3_moe import Qwen3MoeConfig
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.key_maps import qwen3_moe_expert_keys
from acceptmoe_jax.weights.loading import TreePlan, plan_tree
from acceptmoe_jax.weights.safetensors_io import host_array
from pallas_kernels.masked_expert_gemm import ExpertBank


def plan_bank(
    checkpoint: Checkpoint, config: Qwen3MoeConfig, layer: int, dtype: jnp.dtype
) -> TreePlan:
    """Plans the weights of a layer's bank, by name, in `dtype`."""
    del checkpoint
    return plan_tree(
        bank_weights(abstract_bank(config, dtype)),
        lambda path: qwen3_moe_expert_keys(layer, path[0], config.num_experts),
        dtype=dtype,
    )


def bank_tensors(layer: int, bank: ExpertBank, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    """The tensors of a bank whose slots are in expert order."""
    host = {matrix: host_array(getattr(bank, matrix), dtype) for matrix in EXPERT_MATRICES}
    experts = range(len(bank.slot_of))
    keys = {
        matrix: qwen3_moe_expert_keys(layer, matrix, len(experts)) for matrix in EXPERT_MATRICES
    }
    return {
        keys[matrix][expert]: host[matrix][expert]
        for expert in experts
        for matrix in EXPERT_MATRICES
    }
