"""GPT-OSS experts on disk, in either format, and in memory.

On disk gate and up are one tensor whose rows alternate: gate 0, up 0, gate 1, ... Published
checkpoints hold MXFP4 blocks and scales with the output axis first, `[E, 2F, D / 32, ...]`;
converted ones hold floats with the input axis first, `[E, D, 2F]` and `[E, F, D]`. In memory gate,
up and down are apart, output axis first, as in the other family; MXFP4 stays packed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.experts import EXPERT_MATRICES, abstract_bank, bank_weights
from acceptmoe_jax.models.gpt_oss import GptOssConfig
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.key_maps import gpt_oss_expert_key
from acceptmoe_jax.weights.loading import Part, TreePlan, leaf_paths, plan_tree
from acceptmoe_jax.weights.safetensors_io import host_array
from pallas_kernels.masked_expert_gemm import ExpertBank, numbers
from pallas_kernels.mxfp4 import BLOCK, Mxfp4, quantise

_FLOATS = ("gate_up_proj", "down_proj")
_PACKED = tuple(f"{name}_{kind}" for name in _FLOATS for kind in ("blocks", "scales"))


def plan_bank(
    checkpoint: Checkpoint, config: GptOssConfig, layer: int, dtype: jnp.dtype
) -> TreePlan:
    """Plans the weights of a layer's bank, by name, in the format that the checkpoint's keys show.

    Args:
      checkpoint: opened, not read.
      config: of the model.
      layer: whose experts.
      dtype: of the biases, and of the matrices unless they are packed.

    Raises:
      UserError: naming file and keys, if the layer's keys show neither format or both, or if
        MXFP4's blocks do not fit the config.
    """
    packed = _is_packed(checkpoint, layer)
    if packed:
        check_blocks(config.hidden_size, config.expert_width, checkpoint.config_file)
    weights = bank_weights(abstract_bank(config, dtype, packed=packed))
    shapes = {path: leaf.shape for path, leaf in leaf_paths(weights)}
    return plan_tree(weights, lambda path: _part(layer, path, shapes[path]), dtype=dtype)


def bank_tensors(
    layer: int, bank: ExpertBank, dtype: jnp.dtype, mxfp4: bool
) -> dict[str, np.ndarray]:
    """The tensors of a bank whose slots are in expert order.

    Args:
      layer: the bank's.
      bank: its matrices may be packed or not, whatever the format to write.
      dtype: of the biases, and of the matrices unless they are packed.
      mxfp4: the format: MXFP4, or matrices in `dtype`.
    """
    # What is appended to the projection's name -> matrix -> its weights, output axis first.
    parts: dict[str, dict[str, np.ndarray]] = {}
    for matrix in EXPERT_MATRICES:
        weights = getattr(bank, matrix)
        of_matrix = {"_bias": host_array(getattr(bank, f"{matrix}_bias"), dtype)}
        if mxfp4:
            packed = weights if isinstance(weights, Mxfp4) else jax.jit(quantise)(weights)
            of_matrix["_blocks"] = np.asarray(packed.blocks)
            of_matrix["_scales"] = np.asarray(packed.scales)
        else:
            of_matrix[""] = host_array(numbers(weights), dtype)
        for suffix, array in of_matrix.items():
            parts.setdefault(suffix, {})[matrix] = array
    tensors = {}
    for suffix, arrays in parts.items():
        gate, up, down = (arrays[matrix] for matrix in EXPERT_MATRICES)
        experts, rows, *rest = gate.shape
        gate_up = np.stack([gate, up], axis=2).reshape(experts, 2 * rows, *rest)
        for name, array in zip(_FLOATS, (gate_up, down)):
            key = gpt_oss_expert_key(layer, f"{name}{suffix}")
            tensors[key] = array if suffix else array.swapaxes(1, 2)
    return tensors


def check_blocks(hidden_size: int, expert_width: int, source: str) -> None:
    """Raises a UserError that names `source` and the key if MXFP4 cannot hold such experts."""
    for name, width in (("hidden_size", hidden_size), ("intermediate_size", expert_width)):
        if width % BLOCK:
            raise UserError(
                f"{source}: {name} = {width} is not a multiple of {BLOCK}, a block of MXFP4"
            )


def _is_packed(checkpoint: Checkpoint, layer: int) -> bool:
    floats, packed = (
        [key for name in names if (key := gpt_oss_expert_key(layer, name)) in checkpoint.entries]
        for names in (_FLOATS, _PACKED)
    )
    if floats and packed:
        raise UserError(
            f"{checkpoint.source} holds a layer's experts in two formats: "
            f"{', '.join([*floats, *packed])}"
        )
    if not floats and not packed:
        raise UserError(
            f"{checkpoint.source} holds neither {gpt_oss_expert_key(layer, _FLOATS[0])} nor "
            f"{gpt_oss_expert_key(layer, _PACKED[0])}"
        )
    return bool(packed)


def _part(layer: int, path: tuple[str, ...], shape: tuple[int, ...]) -> str | Part:
    """Where a leaf of the bank lies: ("up", "scales") in the odd rows of `gate_up_proj_scales`."""
    matrix, *suffix = path[0].split("_")  # "gate", or "gate_bias"
    suffix += path[1:]
    experts, rows, *rest = shape
    if matrix == "down":
        name, first, step = "down_proj", 0, 1
    else:
        name, first, step = "gate_up_proj", ("gate", "up").index(matrix), 2
    key = gpt_oss_expert_key(layer, "_".join([name, *suffix]))
    if suffix and step == 1:
        return key
    on_disk = (experts, step * rows, *rest)
    if suffix:
        return Part(key, on_disk, lambda tensor: tensor[:, first::step])
    on_disk = (experts, *rest, step * rows)
    return Part(key, on_disk, lambda tensor: tensor[:, :, first::step].swapaxes(1, 2))
