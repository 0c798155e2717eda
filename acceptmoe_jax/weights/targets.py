"""All tensors of a target, whichever its family."""

import jax.numpy as jnp

from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.decoder import abstract_params
from acceptmoe_jax.models.gpt_oss import GptOssConfig
from acceptmoe_jax.models.qwen3_moe import Qwen3MoeConfig
from acceptmoe_jax.weights import gpt_oss, qwen3_moe
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.key_maps import target_key
from acceptmoe_jax.weights.loading import TreePlan, plan_tree

_PLAN_BANK = {Qwen3MoeConfig: qwen3_moe.plan_bank, GptOssConfig: gpt_oss.plan_bank}


def plan_target(checkpoint: Checkpoint, config: TargetConfig, dtype: jnp.dtype) -> list[TreePlan]:
    """Plans the dense parameters, then the weights of a bank for each of `config.moe_layers`.

    Args:
      checkpoint: opened, not read.
      config: its config.
      dtype: of floating leaves in memory.

    Raises:
      UserError: naming file and keys, if the experts are in no known format.
    """
    plan_bank = _PLAN_BANK[type(config)]
    return [
        plan_tree(abstract_params(config, dtype), target_key, dtype=dtype),
        *(plan_bank(checkpoint, config, layer, dtype) for layer in config.moe_layers),
    ]
