"""The families of targets: which config a `config.json` asks for."""

from collections.abc import Mapping
from typing import Any

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.gpt_oss import GptOssConfig
from acceptmoe_jax.models.qwen3_moe import Qwen3MoeConfig

_FAMILIES = {"qwen3_moe": Qwen3MoeConfig, "gpt_oss": GptOssConfig}


def target_config(raw: Mapping[str, Any], source: str) -> TargetConfig:
    """The config of a target, whose `model_type` says which family it is of.

    Args:
      raw: the parsed `config.json`.
      source: its name, for messages.

    Raises:
      UserError: naming `source` and the key, also where the family is another.
    """
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise UserError(
            f"{source}: model_type = {family!r} is not supported (only {', '.join(_FAMILIES)})"
        )
    return _FAMILIES[family].from_hf(raw, source)
