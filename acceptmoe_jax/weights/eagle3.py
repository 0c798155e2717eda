"""Loading an EAGLE-3 head: the parameters, and the map from its vocabulary to the target's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.key_maps import eagle3_key, eagle3_keys
from acceptmoe_jax.weights.loading import Place, load_trees, plan_tree


class Eagle3Weights(NamedTuple):
    """`params` as the module declares them; `target_ids` int32 [V_draft], draft id -> target id."""

    params: Any
    target_ids: np.ndarray


def load_eagle3(
    checkpoint: Checkpoint,
    abstract: Any,
    *,
    draft_vocab: int,
    target_vocab: int,
    dtype: jnp.dtype | None = None,
    place: Place = jax.device_put,
    progress: Callable[[int], None] | None = None,
) -> Eagle3Weights:
    """Loads a head under either spelling of its keys (see `eagle3_keys`).

    Args:
      checkpoint: of the head.
      abstract: its parameters as `jax.ShapeDtypeStruct`s. Whether the head brings an embedding of
        its own is for the caller to see (`owns_embedding`).
      draft_vocab: rows of its `lm_head`; the target's vocabulary where it has none.
      target_vocab: the target's vocabulary.
      dtype, place, progress: as in `loading.load_tree`.

    Raises:
      UserError: naming file and key; see `loading.check_complete` and `draft_to_target_ids`.
    """
    source = str(checkpoint.source)
    actual = eagle3_keys(checkpoint.entries, source)
    tables = {name: actual[name] for name in ("d2t", "t2d") if name in actual}
    if "t2d" in tables and checkpoint.entries[tables["t2d"]].shape != (target_vocab,):
        found = list(checkpoint.entries[tables["t2d"]].shape)
        raise UserError(
            f"{source}: t2d has the shape {found}, but the target's vocabulary is {target_vocab}"
        )
    d2t = checkpoint.read(tables["d2t"]) if "d2t" in tables else None
    target_ids = draft_to_target_ids(d2t, draft_vocab, target_vocab, source)
    plan = plan_tree(
        abstract,
        lambda path: actual.get(eagle3_key(path), eagle3_key(path)),
        dtype=dtype,
        place=place,
    )
    params = load_trees(checkpoint, [plan], ignore=tables.values(), progress=progress)[0]
    return Eagle3Weights(params, target_ids)


def owns_embedding(checkpoint: Checkpoint) -> bool:
    """Whether a head brings `embed_tokens` of its own instead of sharing the target's."""
    return "embed_tokens.weight" in eagle3_keys(checkpoint.entries, str(checkpoint.source))


def owns_output(checkpoint: Checkpoint) -> bool:
    """Whether a head brings an `lm_head` of its own instead of sharing the target's."""
    return "lm_head.weight" in eagle3_keys(checkpoint.entries, str(checkpoint.source))


def draft_to_target_ids(
    d2t: np.ndarray | None, draft_vocab: int, target_vocab: int, source: str
) -> np.ndarray:
    """Target ids of the draft vocabulary, int32 [V_draft].

    `d2t` holds offsets: target id = draft id + d2t[draft id]. All zeros is the identity, and so is
    no table at all where both vocabularies are one.

    Raises:
      UserError: naming `source`, if the vocabulary is compressed and `d2t` is missing, or if its
        targets lie outside the target's vocabulary or repeat.
    """
    if draft_vocab > target_vocab:
        raise UserError(
            f"{source}: a draft vocabulary of {draft_vocab} does not fit a target of {target_vocab}"
        )
    if d2t is None:
        if draft_vocab < target_vocab:
            raise UserError(
                f"{source} holds no d2t, which a draft vocabulary of {draft_vocab} out of "
                f"{target_vocab} needs"
            )
        return np.arange(draft_vocab, dtype=np.int32)
    if d2t.shape != (draft_vocab,) or not np.issubdtype(d2t.dtype, np.integer):
        raise UserError(
            f"{source}: d2t is {d2t.dtype}{list(d2t.shape)}, expected integers [{draft_vocab}]"
        )
    draft_ids = np.arange(draft_vocab)
    # Bounds before the sum: an absurd offset must not wrap around.
    outside = np.flatnonzero((d2t < -draft_ids) | (d2t >= target_vocab - draft_ids))
    if outside.size:
        draft_id = int(outside[0])
        raise UserError(
            f"{source}: d2t sends draft id {draft_id} to {draft_id + int(d2t[draft_id])}, outside "
            f"the target's vocabulary of {target_vocab} ({outside.size} such entries)"
        )
    target_ids = draft_ids + d2t
    unique, counts = np.unique(target_ids, return_counts=True)
    if unique.size < draft_vocab:
        repeated = int(unique[np.argmax(counts > 1)])
        raise UserError(
            f"{source}: d2t sends draft ids {np.flatnonzero(target_ids == repeated).tolist()} to "
            f"the same target id {repeated}"
        )
    return target_ids.astype(np.int32)
