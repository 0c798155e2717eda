"""EAGLE-3's training-time test: the head is trained on the drafts it will make (arXiv 2503.01840).

Row t is a place to draft from: the target has read tokens 0 to t, and token t + 1 is known. Step 1
reads token t + 1 with the target's states at t and predicts the target's distribution of token
t + 2. Step i reads token t + i with the hidden that step i - 1 left at row t, and predicts token
t + i + 1. As when drafting, a row of step i sees the real prefix (the rows of step 1 up to t) and
its own ancestors (row t of steps 2 to i).
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.models import eagle3
from acceptmoe_jax.models.attention import LayerCache, empty_cache
from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.decoder import Decoder
from acceptmoe_jax.models.eagle3 import Eagle3Config
from acceptmoe_jax.training import target
from acceptmoe_jax.training.batches import Batch, packed_mask, shift_left

STEP_DECAY = 0.8  # weight of a step's loss relative to the step before


@flax.struct.dataclass
class Lesson:
    """What the target says about a batch; the head's loss needs no more.

    Attributes:
      embeddings: of each token.
      captured: the target's hidden states at each position, concatenated over layers.
      probs: the target's next-token distribution, over the draft vocabulary and renormalised.
      best: draft id of the target's greedy token; -1 where the draft vocabulary lacks it.
      segments, positions, loss_weights: as in `Batch`.
    """

    embeddings: Float[Array, "B T D"]
    captured: Float[Array, "B T A"]
    probs: Float[Array, "B T V"]
    best: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    loss_weights: Float[Array, "B T"]


@flax.struct.dataclass
class HeadMetrics:
    """Agreement is with the target's greedy token, over completions; a token that the draft
    vocabulary lacks is a miss."""

    loss: Float[Array, ""]  # cross-entropy of step 1, nats
    top1: Float[Array, "n"]  # agreement by step
    top10: Float[Array, "n"]
    chain: Float[Array, ""]  # mean length of the all-agreeing run of n drafts, plus the bonus


def frequent_tokens(tokens: Int[np.ndarray, "N"], vocab_size: int, count: int) -> np.ndarray:
    """The ids of the `count` most frequent tokens, ascending; ties go to the smaller id."""
    frequency = np.bincount(np.ravel(tokens), minlength=vocab_size)
    return np.sort(np.argsort(-frequency, kind="stable")[:count]).astype(np.int32)


def init_head(
    key: jax.Array,
    config: Eagle3Config,
    target_params: target.TargetParams,
    target_ids: Int[Array, "V"],
) -> dict[str, Any]:
    """Random parameters, with copies of the target's final norm and output rows to start from."""
    params = eagle3.init_params(key, config)
    dense = target_params["dense"]
    return params | {
        "norm": {"weight": jnp.array(dense["norm"]["weight"])},
        "lm_head": {"weight": dense["lm_head"]["weight"][target_ids]},
    }


def teach(
    params: target.TargetParams,
    batch: Batch,
    target_ids: Int[Array, "V"],
    config: TargetConfig,
    aux_layer_ids: tuple[int, ...],
) -> Lesson:
    """Runs the target on a batch.

    Args:
      params: the target's.
      batch: packed rows.
      target_ids: target id of each draft id.
      config: the target's.
      aux_layer_ids: layers whose outputs the head reads.
    """
    out = target.forward(params, batch, config, capture=aux_layer_ids)
    logits = target.unembed(params, out.hidden, config)
    draft_id = jnp.full(config.vocab_size, -1).at[target_ids].set(jnp.arange(len(target_ids)))
    return Lesson(
        embeddings=Decoder(config).apply({"params": params["dense"]}, batch.tokens, method="embed"),
        captured=out.captured,
        probs=jax.nn.softmax(logits[..., target_ids], axis=-1),
        best=draft_id[jnp.argmax(logits, axis=-1)],
        segments=batch.segments,
        positions=batch.positions,
        loss_weights=batch.loss_weights,
    )


def step_mask(prefix: Bool[Array, "B T T"], step: int) -> Bool[Array, "B T S"]:
    """What the rows of step `step` (1, 2, ...) see of the S = step * T rows so far."""
    own = jnp.broadcast_to(jnp.eye(prefix.shape[-1], dtype=bool), prefix.shape)
    return jnp.concatenate([prefix] + [own] * (step - 1), axis=-1)


def unroll(
    params: dict[str, Any], lesson: Lesson, config: Eagle3Config, steps: int
) -> list[Float[Array, "B T D"]]:
    """The hidden (before the norm) that each step leaves at each row.

    The rows of all steps lie in one cache, as they do when drafting; rows whose tokens would lie
    beyond the end of the document hold nothing of use.
    """
    head = eagle3.Eagle3Head(config)
    prefix = packed_mask(lesson.segments)
    batch, length = lesson.segments.shape
    block = empty_cache(length, config.num_kv_heads, config.head_dim, lesson.captured.dtype)
    block = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape)), block)
    cache = LayerCache(k=block.k[:, :0], v=block.v[:, :0])
    hidden = head.apply({"params": params}, lesson.captured, method="fuse")
    hiddens = []
    for step in range(1, steps + 1):
        cache = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), cache, block)
        embeddings = jnp.pad(lesson.embeddings[:, step:], ((0, 0), (0, step), (0, 0)))
        start = jnp.int32((step - 1) * length)
        hidden, cache = jax.vmap(lambda *row: head.apply({"params": params}, *row, start))(
            embeddings, hidden, lesson.positions + step - 1, step_mask(prefix, step), cache
        )
        hiddens.append(hidden)
    return hiddens


def head_loss(
    params: dict[str, Any], lesson: Lesson, config: Eagle3Config, steps: int
) -> tuple[Float[Array, ""], HeadMetrics]:
    """Soft cross-entropy with the target's distribution, over the steps, weighted 0.8^(step - 1).

    A place counts with its token's loss weight, if the predicted token lies in the document and
    the target's greedy token in the draft vocabulary.
    """
    head = eagle3.Eagle3Head(config)
    losses, top1, top10 = [], [], []
    agreeing = jnp.ones(lesson.segments.shape, bool)
    run_length = jnp.ones(lesson.segments.shape)
    for step, hidden in enumerate(unroll(params, lesson, config, steps), start=1):
        logits = head.apply({"params": params}, hidden, method="logits")
        inside = (shift_left(lesson.segments, step + 1) == lesson.segments) & (lesson.segments > 0)
        weights = shift_left(lesson.loss_weights, step + 1) * inside
        best = shift_left(lesson.best, step)
        probs = jnp.pad(lesson.probs[:, step:], ((0, 0), (0, step), (0, 0)))
        cross_entropy = -jnp.sum(probs * jax.nn.log_softmax(logits), axis=-1)
        losses.append(_mean(cross_entropy, weights * (best >= 0)))
        chosen = jnp.take_along_axis(logits, jnp.maximum(best, 0)[..., None], axis=-1)
        rank = jnp.sum(logits > chosen, axis=-1)
        graded = weights == 1
        top1.append(_mean((rank < 1) & (best >= 0), graded))
        top10.append(_mean((rank < 10) & (best >= 0), graded))
        agreeing &= (rank < 1) & (best >= 0)
        run_length += agreeing
    loss = sum(STEP_DECAY**i * value for i, value in enumerate(losses))
    # `graded` is now that of the last step: the rows all of whose drafts lie in the document.
    return loss, HeadMetrics(
        losses[0], jnp.stack(top1), jnp.stack(top10), _mean(run_length, graded)
    )


def _mean(values: Array, weights: Array) -> Float[Array, ""]:
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)
