"""Writing checkpoints that Hugging Face programs, and `loading`, read back.

`config.json` is written last: a directory whose save was cut short has none and is refused.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.files import write_json
from acceptmoe_jax.models.experts import ExpertBank
from acceptmoe_jax.weights.key_maps import (
    EXPERT_MATRICES,
    eagle3_key,
    expert_keys,
    qwen3_moe_key,
)
from acceptmoe_jax.weights.loading import Names, leaf_paths
from acceptmoe_jax.weights.safetensors_io import save_sharded


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
    tensors = _tensors(params, qwen3_moe_key, dtype)
    for layer, bank in enumerate(banks):
        if bank is not None:
            tensors |= _expert_tensors(layer, bank, dtype)
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


def _tensors(params: Any, names: Names, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    return {names(path): _host(leaf, dtype) for path, leaf in leaf_paths(params)}


def _expert_tensors(layer: int, bank: ExpertBank, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    slots = np.asarray(bank.slot_of)
    if slots.min() < 0:
        raise ValueError(f"layer {layer}: only a bank that holds every expert can be saved")
    host = {matrix: _host(getattr(bank, matrix), dtype) for matrix in EXPERT_MATRICES}
    keys = {matrix: expert_keys(layer, matrix, len(slots)) for matrix in EXPERT_MATRICES}
    return {
        keys[matrix][expert]: host[matrix][slot]
        for expert, slot in enumerate(slots)
        for matrix in EXPERT_MATRICES
    }


def _host(array: jax.Array | np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    return np.asarray(array).astype(dtype, copy=False)


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
