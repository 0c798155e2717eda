"""From a checkpoint to placed parameters, one tensor at a time.

All trees that a checkpoint should fill are planned first, then every key, shape and kind of dtype
is checked over their union, and only then is anything read. Each leaf goes through one host buffer
straight to where it will live, so host memory beyond the placed bytes is one leaf, and one tensor
of the file where that differs from the leaf (another dtype or layout, or only a part of it).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.safetensors_io import TensorEntry, aligned_empty


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a leaf lies in a tensor that holds more, or holds it in another order.

    Attributes:
      key: of the tensor.
      shape: of the tensor.
      view: the tensor -> a view of it that has the leaf's shape.
    """

    key: str
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray]


# A parameter's path -> its key in the checkpoint, or the keys to stack on a new leading axis, or
# the part of a tensor that it is.
Names = Callable[[tuple[str, ...]], str | Sequence[str] | Part]
Place = Callable[[np.ndarray], Any]

_LISTED = 12  # keys that a message spells out


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One parameter: the keys it is read from and what it becomes.

    Attributes:
      keys: of its tensors.
      tensor_shape: of each of them in the file.
      shape: of the leaf.
      dtype: of the leaf.
      stacked: `keys[i]` fills `leaf[i]`; else the only key fills the leaf.
      view: what of the only tensor it is, if not the whole as it lies there.
    """

    keys: tuple[str, ...]
    tensor_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    stacked: bool = False
    view: Callable[[np.ndarray], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class TreePlan:
    """A pytree to fill from a checkpoint; `place` puts each finished host array where it lives."""

    leaves: tuple[LeafPlan, ...]
    structure: jax.tree_util.PyTreeDef
    place: Place


def plan_tree(
    abstract: Any,
    names: Names,
    *,
    dtype: jnp.dtype | None = None,
    place: Place = jax.device_put,
) -> TreePlan:
    """Plans one tree; reads nothing.

    Args:
      abstract: pytree of `jax.ShapeDtypeStruct`.
      names: leaf path -> key, or -> the keys to stack (experts), or -> the part of a tensor.
      dtype: overrides the dtype of floating leaves.
      place: takes a finished host array, returns the leaf (device, sharding, pinned host).
    """
    plans = []
    for path, leaf in leaf_paths(abstract):
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        wanted = np.dtype(dtype if dtype is not None and floating else leaf.dtype)
        shape = tuple(leaf.shape)
        match names(path):
            case str(key):
                plan = LeafPlan((key,), shape, shape, wanted)
            case Part(key, tensor_shape, view):
                plan = LeafPlan((key,), tensor_shape, shape, wanted, view=view)
            case keys:
                if len(keys) != shape[0]:
                    raise ValueError(f"{len(keys)} keys for a leaf of shape {shape}: {keys[:2]} ..")
                plan = LeafPlan(tuple(keys), shape[1:], shape, wanted, stacked=True)
        plans.append(plan)
    return TreePlan(tuple(plans), jax.tree.structure(abstract), place)


def check_complete(
    checkpoint: Checkpoint, plans: Iterable[TreePlan], ignore: Collection[str] = ()
) -> None:
    """Checks that the plans together take exactly the tensors of the checkpoint.

    Args:
      checkpoint: opened, not read.
      plans: every tree that it should fill.
      ignore: keys that may be left over (read elsewhere, or known to be unused).

    Raises:
      UserError: naming file and keys, for tensors that are missing, left over, misshapen or of
        another kind of dtype (an integer table where a weight belongs).
    """
    leaf_of = {key: leaf for plan in plans for leaf in plan.leaves for key in leaf.keys}
    entries = checkpoint.entries
    faults = []
    missing = [key for key in leaf_of if key not in entries]
    if missing:
        faults.append(f"{checkpoint.source} lacks {_listed(missing)}")
    misfits = [
        misfit
        for key, leaf in leaf_of.items()
        if key in entries and (misfit := _misfit(entries[key], leaf))
    ]
    if misfits:
        more = f" (and {len(misfits) - 1} more like it)" if len(misfits) > 1 else ""
        faults.append(misfits[0] + more)
    extra = [key for key in entries if key not in leaf_of and key not in ignore]
    if extra:
        faults.append(
            f"{entries[extra[0]].file} holds {_listed(extra)}, unknown to the model of config.json"
        )
    if faults:
        raise UserError("; ".join(faults))


def load_trees(
    checkpoint: Checkpoint,
    plans: Sequence[TreePlan],
    *,
    ignore: Collection[str] = (),
    progress: Callable[[int], None] | None = None,
) -> list[Any]:
    """Checks all plans together (see `check_complete`), then fills their trees in order.

    Args:
      checkpoint: what to read.
      plans: dense parameters, one bank a layer, ...
      ignore: keys that may be left over.
      progress: called with the bytes of each leaf once it is placed.

    Returns:
      One tree for each plan, its leaves as `place` returned them.
    """
    check_complete(checkpoint, plans, ignore)
    return [_load(checkpoint, plan, progress) for plan in plans]


def load_tree(
    checkpoint: Checkpoint,
    abstract: Any,
    names: Names,
    *,
    dtype: jnp.dtype | None = None,
    place: Place = jax.device_put,
    ignore: Collection[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Any:
    """`plan_tree` and `load_trees` for a checkpoint that fills a single tree."""
    plan = plan_tree(abstract, names, dtype=dtype, place=place)
    return load_trees(checkpoint, [plan], ignore=ignore, progress=progress)[0]


def leaf_paths(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, leaf) of a tree of dicts and dataclasses, in the tree's own order."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(_entry_name(entry) for entry in path), leaf


def _listed(keys: Sequence[str]) -> str:
    """ "3 tensors (a, b, c)" for messages; long lists are cut."""
    shown = ", ".join(keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")
    return f"{len(keys)} tensor{'s' if len(keys) > 1 else ''} ({shown})"


def _load(checkpoint: Checkpoint, plan: TreePlan, progress: Callable[[int], None] | None) -> Any:
    leaves: list[Any] = [None] * len(plan.leaves)
    for indices in _by_tensor(plan.leaves):
        tensor = None  # read once for all of its parts
        for index in indices:
            leaf = plan.leaves[index]
            if leaf.view is not None and tensor is None:
                tensor = checkpoint.entries[leaf.keys[0]].read()
            host = aligned_empty(leaf.shape, leaf.dtype)
            if leaf.view is not None:
                copy(leaf.view(tensor), host)
            else:
                _read(checkpoint, leaf, host)
            nbytes = host.nbytes
            # Waiting frees this host buffer before the next is made: transfers are asynchronous.
            leaves[index] = jax.block_until_ready(plan.place(host))
            del host
            if progress is not None:
                progress(nbytes)
    return jax.tree_util.tree_unflatten(plan.structure, leaves)


def _by_tensor(leaves: Sequence[LeafPlan]) -> Iterable[list[int]]:
    """Indices of the leaves in order, those that are parts of one tensor together."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault(leaf.keys, []).append(index)
    return groups.values()


def _read(checkpoint: Checkpoint, leaf: LeafPlan, host: np.ndarray) -> None:
    for i, key in enumerate(leaf.keys):
        entry = checkpoint.entries[key]
        # `host[i, ...]` and not `host[i]`: a view even where tensors are scalars.
        out = host[i, ...] if leaf.stacked else host
        if entry.dtype == out.dtype:
            entry.read_into(out)
        else:
            out[...] = entry.read()


def copy(view: np.ndarray, host: np.ndarray) -> None:
    """Fills `host` from a view that may be strided; several times as fast as one assignment."""
    if view.dtype == host.dtype:  # numpy is slow with dtypes that are not its own, as bfloat16
        raw = np.dtype(f"u{view.dtype.itemsize}")
        view, host = view.view(raw), host.view(raw)
    if host.ndim < 3:
        host[...] = view
        return
    for i in range(len(host)):  # a transposed matrix at a time stays in the cache
        host[i] = view[i]


def _misfit(entry: TensorEntry, leaf: LeafPlan) -> str | None:
    """What is wrong with the tensor for this leaf, if anything."""
    where = f"{entry.file}: {entry.name}"
    if entry.shape != leaf.tensor_shape:
        return f"{where} has the shape {list(entry.shape)}, expected {list(leaf.tensor_shape)}"
    both_floating = all(jnp.issubdtype(d, jnp.floating) for d in (entry.dtype, leaf.dtype))
    if entry.dtype != leaf.dtype and not both_floating:
        return f"{where} has the dtype {entry.dtype}, expected {leaf.dtype}"
    return None


def _entry_name(entry: Any) -> str:
    match entry:
        case jax.tree_util.DictKey(key=name) | jax.tree_util.GetAttrKey(name=name):
            return str(name)
        case _:
            raise TypeError(f"parameters live in dicts and dataclasses, not under {entry}")
