"""Which checkpoint key belongs to which parameter, for each family. Names only: no reading."""

import re
from collections.abc import Iterable

from acceptmoe_jax.errors import UserError


def target_key(path: tuple[str, ...]) -> str:
    """Dense parameters of both families: ("layers_3", "mlp", "gate", "weight") ->
    "model.layers.3.mlp.gate.weight"; only `lm_head` stands outside "model."."""
    name = re.sub(r"^layers_(\d+)\.", r"layers.\1.", ".".join(path))
    return name if path[0] == "lm_head" else f"model.{name}"


def qwen3_moe_expert_keys(layer: int, matrix: str, num_experts: int) -> tuple[str, ...]:
    """Qwen3-MoE, one tensor an expert, in expert order; `matrix` is gate, up or down."""
    return tuple(
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
        for expert in range(num_experts)
    )


def gpt_oss_expert_key(layer: int, name: str) -> str:
    """GPT-OSS, one tensor for all experts of a layer; `name` such as "down_proj_bias"."""
    return f"model.layers.{layer}.mlp.experts.{name}"


def eagle3_key(path: tuple[str, ...]) -> str:
    """The canonical key of a head's parameter: its path, dotted."""
    return ".".join(path)


def eagle3_keys(keys: Iterable[str], source: str) -> dict[str, str]:
    """Canonical key -> the key as this head's file spells it.

    Heads write the layer as `midlayer.*` or, newer ones, `layers.0.*`, and all of it with or
    without "model." in front. Keys that are no part of a head keep their place, to be refused as
    left over.

    Raises:
      UserError: if two keys are spellings of one.
    """
    actual: dict[str, str] = {}
    for key in keys:
        canonical = re.sub(r"^layers\.0\.", "midlayer.", key.removeprefix("model."))
        if canonical in actual:
            raise UserError(f"{source}: {actual[canonical]} and {key} are the same tensor")
        actual[canonical] = key
    return actual
