"""What the tests of expert selection share: blocks, policies, and sets out of results."""

import dataclasses

import jax
import numpy as np
import pytest

from acceptmoe_jax import selection
from acceptmoe_jax.selection import SelectorConfig

# Compiling would be most of the tests' time. The worked cases, of many shapes, are compiled
# without optimisation, as are other odd shapes; random blocks share one and run op by op.
select = selection.select
compiled_select = jax.jit(
    select,
    static_argnames="config",
    compiler_options={"xla_backend_optimization_level": 0},
)

POLICY_CONFIGS = {
    "native": SelectorConfig(policy="native", top_k=3),
    "acceptmoe": SelectorConfig(policy="acceptmoe", top_k=3),
    "acceptmoe_fix": SelectorConfig(policy="acceptmoe_fix", top_k=3, budget=6),
    "moe_spec": SelectorConfig(policy="moe_spec", top_k=3, budget=6),
}
each_policy = pytest.mark.parametrize("policy", POLICY_CONFIGS)
each_norm = pytest.mark.parametrize("norm_topk_prob", [True, False])


def members(mask):
    return set(np.flatnonzero(mask).tolist())


def mask_of(ids, size):
    return np.isin(np.arange(size), ids)


def used(result):
    return set(np.asarray(result.used_ids)[: int(result.used_count)].tolist())


def block(seed, rows=17, experts=14, padded=3, spread=1.5):
    """A random block with a few padded rows at its end, and a random residency."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=spread, size=(rows, experts)).astype(np.float32)
    logits += rng.normal(scale=1.0, size=experts).astype(np.float32)
    depth = np.sort(np.concatenate([[0], rng.integers(1, 5, rows - 1)])).astype(np.int32)
    valid = np.arange(rows) < rows - padded
    phat = np.concatenate([[1.0], np.sort(rng.uniform(0.05, 0.9, 4))[::-1]]).astype(np.float32)
    return logits, depth, valid, phat, rng.random(experts) < 0.4


def assert_same(ours, theirs, exactly=True):
    """Every field of two results: equal, or floats within rounding and the rest equal."""
    for field in dataclasses.fields(ours):
        a = np.asarray(getattr(ours, field.name))
        b = np.asarray(getattr(theirs, field.name))
        assert a.dtype == b.dtype and a.shape == b.shape, field.name
        if exactly or a.dtype != np.float32:
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=field.name)
