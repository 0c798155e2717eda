"""Writing checkpoints that Hugging Face programs, and `loading`, read back.

`config.json` is written last: a directory whose save was cut short has none and is refused.
"""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.files import write_json
from acceptmoe_jax.models.experts import bank_weights, resident_bank
from acceptmoe_jax.weights import gpt_oss, qwen3_moe
from acceptmoe_jax.weights.key_maps import eagle3_key, target_key
from acceptmoe_jax.weights.loading import leaf_paths
from acceptmoe_jax.weights.safetensors_io import host_array, save_sharded
from pallas_kernels.masked_expert_gemm import ExpertBank


def save_qwen3_moe(
    directory: str | os.PathLike,
    config: Mapping[str, Any],
    params: Mapping[str, Any],
    banks: Sequence[ExpertBank | None],
    *,
    dtype: jnp.dtype = jnp.bfloat16,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes `config.json` and the weights, one tensor an expert.

    Args:
      directory: made if it is not there.
      config: the `config.json`, such as `Qwen3MoeConfig.to_hf()`.
      params: the dense parameters.
      banks: a layer's experts, all of them resident; None for a dense layer.
      dtype: of all tensors in the file.
      max_shard_bytes: see `save_sharded`.
    """
    tensors = _tensors(params, target_key, dtype)
    for layer, bank in enumerate(banks):
        if bank is not None:
            tensors |= qwen3_moe.bank_tensors(layer, _in_expert_order(layer, bank), dtype)
    _write(directory, config, tensors, max_shard_bytes)


def save_gpt_oss(
    directory: str | os.PathLike,
    config: Mapping[str, Any],
    params: Mapping[str, Any],
    banks: Sequence[ExpertBank],
    *,
    mxfp4: bool,
    dtype: jnp.dtype = jnp.bfloat16,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes `config.json` and the weights, the experts in the format asked for.

    Args:
      directory: made if it is not there.
      config: the `config.json`, such as `GptOssConfig.to_hf(mxfp4)`.
      params: the dense parameters.
      banks: a layer's experts, all of them resident, packed or not.
      mxfp4: write MXFP4 blocks and scales, as published checkpoints do: packed matrices as they
        are, others rounded (see `quantise`). Else matrices in `dtype`, as converted ones.
      dtype: of all tensors in the file but blocks and scales.
      max_shard_bytes: see `save_sharded`.

    Raises:
      UserError: before anything is written, if MXFP4's blocks do not fit the matrices.
    """
    tensors = _tensors(params, target_key, dtype)
    for layer, bank in enumerate(banks):
        if mxfp4:
            gpt_oss.check_blocks(*bank.down.shape[1:], str(directory))
        tensors |= gpt_oss.bank_tensors(layer, _in_expert_order(layer, bank), dtype, mxfp4)
    _write(directory, config, tensors, max_shard_bytes)


def save_eagle3(
    directory: str | os.PathLike,
    config: Mapping[str, Any],
    params: Mapping[str, Any],
    d2t: np.ndarray,
    t2d: np.ndarray,
    *,
    dtype: jnp.dtype = jnp.bfloat16,
) -> None:
    """Writes a head under the published heads' names.

    Args:
      directory: made if it is not there.
      config: the `config.json`, such as `Eagle3Config.to_hf()`.
      params: as the head's module declares them.
      d2t: integers [V_draft], offsets: target id = draft id + d2t[draft id].
      t2d: bool [V], which target ids have a draft id.
      dtype: of the floating tensors.
    """
    tensors = _tensors(params, eagle3_key, dtype)
    tensors["d2t"] = np.asarray(d2t, np.int64)
    tensors["t2d"] = np.asarray(t2d, np.bool_)
    _write(directory, config, tensors, None)


def draft_tables(target_ids: np.ndarray, target_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(d2t int64 [V_draft], t2d bool [V]) of a head whose draft id i stands for target_ids[i]."""
    d2t = np.asarray(target_ids, np.int64) - np.arange(len(target_ids))
    t2d = np.zeros(target_vocab, np.bool_)
    t2d[target_ids] = True
    return d2t, t2d


def _tensors(
    params: Any, names: Callable[[tuple[str, ...]], str], dtype: jnp.dtype
) -> dict[str, np.ndarray]:
    return {names(path): host_array(leaf, dtype) for path, leaf in leaf_paths(params)}


def _in_expert_order(layer: int, bank: ExpertBank) -> ExpertBank:
    """The bank on the host, slot e holding expert e."""
    slots = np.asarray(bank.slot_of)
    if not (0 <= slots.min() and slots.max() < bank.num_slots):
        raise ValueError(f"layer {layer}: only a bank that holds every expert can be saved")
    ordered = jax.tree.map(lambda leaf: np.asarray(leaf)[slots], bank_weights(bank))
    return resident_bank(ordered, len(slots))


def _write(
    directory: str | os.PathLike,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    max_shard_bytes: int | None,
) -> None:
    directory = pathlib.Path(directory)
    (directory / "config.json").unlink(missing_ok=True)
    save_sharded(directory, tensors, max_shard_bytes)
    write_json(directory / "config.json", dict(config))
