"""Compares a kernel with its op's reference in float32, on the device at hand."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.masked_expert_gemm import cases as expert_cases
from pallas_kernels.ops import OPS

Row = dict[str, Any]

# Largest error that is allowed, over the largest number of the reference.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "mxfp4": 2e-2}
_SPARE_SLOTS = 3
_FAR = float(np.finfo(np.float32).max)  # JSON knows no infinity


def parity_row(op: str, shape: str, dtype: str, implementation: str, interpret: bool) -> Row:
    """Runs an implementation on random arguments and says how far off it is.

    The reference gets the same numbers as float32, and multiplies without TF32.
    """
    which, named = OPS[op], OPS[op].shapes[shape]
    function = which.function(named)
    reference = functools.partial(function, implementation=which.reference)
    key = jax.random.key(0)
    if op == "masked_expert_gemm":
        reference = _by_rows(reference)
        slots = min(named.experts, named.used + _SPARE_SLOTS)
        arguments = expert_cases.random_arguments(key, named, dtype, slots=slots)
    else:
        arguments = which.arguments(key, named, dtype)
    kernel = functools.partial(function, implementation=implementation, interpret=interpret)
    ours = jax.jit(kernel)(*arguments)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(reference)(*jax.tree.map(_as_float32, arguments))
    row = differences(ours, expected)
    within = row["largest_error"] <= TOLERANCES[dtype] and not row["decisions_that_differ"]
    return row | {"tolerance": TOLERANCES[dtype], "within": "yes" if within else "NO"}


def differences(ours: Any, expected: Any) -> Row:
    """How far two results of one structure are apart.

    Returns:
      `largest_error` and `error_of_999_in_1000`, which 99.9 % of the numbers do not exceed, both
      over the largest number of `expected` in the same leaf; `decisions_that_differ`, elements of
      integer and boolean leaves. A number that is not finite is off by float32's largest.
    """
    errors, decisions = [np.zeros(1)], 0
    for leaf, reference in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        leaf, reference = np.asarray(leaf), np.asarray(reference)
        if not jnp.issubdtype(reference.dtype, jnp.floating):
            decisions += int(np.sum(leaf != reference))
            continue
        leaf, reference = leaf.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
        scale = np.max(np.abs(reference), initial=np.finfo(np.float32).tiny)
        errors.append(np.nan_to_num(np.abs(leaf - reference) / scale, nan=_FAR, posinf=_FAR))
    together = np.concatenate(errors)
    return {
        "largest_error": float(np.max(together)),
        "error_of_999_in_1000": float(np.quantile(together, 0.999)),
        "decisions_that_differ": decisions,
    }


def _as_float32(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _by_rows(reference: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """masked_expert_gemm a row at a time: its reference gathers the matrices of every pick."""

    def run(x_TD, bank, expert_ids_Tk, weights_Tk, *used):
        def row(of_row):
            x_D, ids_k, weights_k = of_row
            return reference(x_D[None], bank, ids_k[None], weights_k[None], *used)[0]

        return jax.lax.map(row, (x_TD, expert_ids_Tk, weights_Tk))

    return run
