"""One expert at a time out of a checkpoint, for experts that do not live on the device."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.loading import TreePlan, copy
from acceptmoe_jax.weights.safetensors_io import TensorEntry


def read_expert(
    checkpoint: Checkpoint, plan: TreePlan, expert: int, leaves: Sequence[np.ndarray]
) -> None:
    """Fills `leaves` with one expert of a layer's bank; no other expert's bytes are read.

    What lies in the file as it will lie in memory is read in place. Else (another dtype, or a part
    of a tensor) a tensor of this expert is held besides, read once for all of its parts.

    Args:
      checkpoint: checked against the plan (`check_complete`).
      plan: of the bank: its leaves have the expert as their first axis, and a `Part`'s tensor has
        it too and its view leaves it there.
      expert: its id.
      leaves: what to fill, in the plan's order: contiguous, in the shape and dtype of the plan's
        leaves without their first axis.

    Raises:
      UserError: if a file has become shorter since it was opened.
    """
    tensors: dict[str, np.ndarray] = {}
    for leaf, out in zip(plan.leaves, leaves, strict=True):
        if leaf.stacked:
            entry = checkpoint.entries[leaf.keys[expert]]
        else:
            entry = _only(checkpoint.entries[leaf.keys[0]], expert)
        if leaf.view is None and entry.dtype == out.dtype:
            entry.read_into(out.reshape(entry.shape))
            continue
        if entry.name not in tensors:
            tensors[entry.name] = entry.read()
        tensor = tensors[entry.name]
        if leaf.view is not None:
            tensor = leaf.view(tensor)
        copy(tensor.reshape(out.shape) if leaf.view is None else tensor[0], out)


def _only(entry: TensorEntry, index: int) -> TensorEntry:
    """`entry[index : index + 1]`, which lies in one piece."""
    nbytes = entry.nbytes // entry.shape[0]
    begin = entry.begin + index * nbytes
    return dataclasses.replace(entry, shape=(1, *entry.shape[1:]), begin=begin, end=begin + nbytes)
