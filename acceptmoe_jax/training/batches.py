"""Batches of packed rows: which rows a step sees, and which tokens see each other."""

import dataclasses

import flax.struct
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.pocket import corpus, families


@flax.struct.dataclass
class Batch:
    """Rows of packed documents; `segments` is 0 on padding."""

    tokens: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    loss_weights: Float[Array, "B T"]  # of predicting tokens[b, t]


def take_rows(packed: corpus.PackedRows, rows: np.ndarray | slice) -> Batch:
    """The given rows."""
    names = [field.name for field in dataclasses.fields(Batch)]
    return Batch(**{name: np.asarray(getattr(packed, name))[rows] for name in names})


def batch_rows(num_rows: int, batch: int, seed: int, step: int) -> np.ndarray:
    """The rows of step `step`: every epoch is a permutation of its own, a function of the seed.

    The last, incomplete batch of an epoch is left out.

    Raises:
      ValueError: if there are fewer rows than a batch.
    """
    per_epoch = num_rows // batch
    if per_epoch == 0:
        raise ValueError(f"{num_rows} rows do not fill a batch of {batch}")
    epoch, index = divmod(step, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    return order[index * batch : (index + 1) * batch]


def held_out_batches(
    tokenizer: tokenizers.Tokenizer, batch: int = 48, count: int = 2
) -> list[Batch]:
    """`count` batches of records of the test split, of all families alike."""
    records = [
        record
        for family in families.FAMILIES
        for record in families.generate(family, "test", 0, batch * count)
    ]
    packed = corpus.pack(corpus.record_documents(tokenizer, records))
    order = np.random.default_rng(0).permutation(len(packed.tokens))
    return [take_rows(packed, order[i * batch : (i + 1) * batch]) for i in range(count)]


def packed_mask(segments: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Row t sees the columns up to t of its own document."""
    length = segments.shape[-1]
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)
    return (segments[..., :, None] == segments[..., None, :]) & causal


def shift_left(x: Array, by: int) -> Array:
    """`x[..., t + by]` at t, with zeros at the end."""
    return jnp.pad(x[..., by:], [(0, 0)] * (x.ndim - 1) + [(0, by)])
