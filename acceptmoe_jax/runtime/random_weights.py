"""Weights of any size made at random where they are used: no checkpoint, no network, no copies."""

import functools

import jax
import jax.numpy as jnp

from acceptmoe_jax.runtime.programs import Weights

_DEVIATION = 0.02  # as the published models were initialised
# The first of three scales at which MXFP4's values, whose root mean square is 2.9, come near it.
_LEAST_SCALE = 119


def random_weights(abstract: Weights, seed: int = 0) -> Weights:
    """Fills `abstract_weights`: norms are one, every other weight is drawn around zero.

    Each leaf is made by itself, so that beside the weights only one leaf's numbers are in memory.
    Expert e is in slot e, and draft token i is target token i.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        structure,
        [_leaf(jax.tree_util.keystr(path), key, leaf) for key, (path, leaf) in zip(keys, leaves)],
    )


def _leaf(name: str, key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if leaf.dtype == jnp.int32:  # slots of experts, target ids of draft tokens
        return jnp.arange(leaf.size, dtype=jnp.int32)
    if leaf.dtype == jnp.uint8:
        bits = _bits(key, leaf.shape)
        return _LEAST_SCALE + bits % 3 if name.endswith("scales") else bits
    if "norm" in name:
        return jnp.ones(leaf.shape, leaf.dtype)
    return _normal(key, leaf.shape, leaf.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _bits(key, shape):
    return jax.random.bits(key, shape, jnp.uint8)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return (_DEVIATION * jax.random.normal(key, shape)).astype(dtype)
