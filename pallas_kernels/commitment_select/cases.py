"""Named shapes of commitment_select, and its kernels at them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from acceptmoe_jax.selection import SelectorConfig
from pallas_kernels.case import KernelCase
from pallas_kernels.commitment_select.op import KERNELS, commitment_select, supports


@dataclasses.dataclass(frozen=True)
class SelectionShape:
    """Axes of one launch: T nodes, E experts, k experts a token, P depths of the table."""

    rows: int
    experts: int
    top_k: int
    depths: int = 6


# The pocket checkpoints route as the models they stand for; here with the trees of short blocks.
SHAPES = {
    "qwen3-30b-a3b": SelectionShape(64, 128, 8),
    "gpt-oss-120b": SelectionShape(64, 128, 4),
    "pocket-qwen3-moe": SelectionShape(16, 128, 8),
    "pocket-gpt-oss": SelectionShape(16, 128, 4),
    "awkward": SelectionShape(37, 60, 6, 5),
    "awkward-one-row": SelectionShape(1, 96, 5, 3),
}
EVERYDAY = ("qwen3-30b-a3b", "gpt-oss-120b")

# Beside the method itself, the settings whose kernels differ most.
CONFIGS = {
    "": SelectorConfig,
    "/native": functools.partial(SelectorConfig, policy="native"),
    "/moe_spec": functools.partial(SelectorConfig, policy="moe_spec", budget=29),
    "/truncate": functools.partial(
        SelectorConfig,
        policy="moe_spec",
        budget=29,
        moe_spec_mode="truncate",
        renormalize_truncated=True,
    ),
    "/not_renormalised": functools.partial(SelectorConfig, norm_topk_prob=False),
    "/mass": functools.partial(SelectorConfig, size_rule="mass"),
    "/path_admit": functools.partial(SelectorConfig, path=True, admit=8),
    "/cache_conditional": functools.partial(SelectorConfig, policy="cache_conditional"),
}


def abstract_arguments(shape: SelectionShape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Logits, depth, valid, phat and resident, as `commitment_select` takes them by position."""
    return tuple(
        jax.ShapeDtypeStruct(axes, dtype)
        for axes, dtype in (
            ((shape.rows, shape.experts), jnp.float32),
            ((shape.rows,), jnp.int32),
            ((shape.rows,), jnp.bool_),
            ((shape.depths,), jnp.float32),
            ((shape.experts,), jnp.bool_),
        )
    )


def random_arguments(key: Array, shape: SelectionShape) -> tuple[Array, ...]:
    """A tree that widens with depth, skewed experts, a tenth of the rows padded, 40 % resident."""
    keys = jax.random.split(key, 4)
    rows = jnp.arange(shape.rows)
    logits = 1.5 * jax.random.normal(keys[0], (shape.rows, shape.experts))
    logits += jax.random.normal(keys[1], (shape.experts,))
    deep = jnp.sort(jax.random.randint(keys[2], (shape.rows,), 1, max(shape.depths, 2)))
    depth = jnp.where(rows == 0, 0, deep).astype(jnp.int32)
    valid = rows < shape.rows - shape.rows // 10
    phat = 0.7 ** jnp.arange(shape.depths, dtype=jnp.float32)
    resident = jax.random.uniform(keys[3], (shape.experts,)) < 0.4
    return logits, depth, valid, phat, resident


def moved_bytes(shape: SelectionShape) -> int:
    """Of all arguments and results."""
    arguments = abstract_arguments(shape)
    select = functools.partial(commitment_select, config=SelectorConfig(top_k=shape.top_k))
    results = jax.tree.leaves(jax.eval_shape(select, *arguments))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in (*arguments, *results))


def kernel_cases(implementation: str) -> list[KernelCase]:
    """The kernels to compile and measure: every shape, and every setting at the first one."""
    if implementation not in KERNELS:
        return []
    cases = [(name, "") for name in SHAPES]
    first = next(iter(SHAPES))
    cases += [
        (first, suffix)
        for suffix, config in CONFIGS.items()
        if suffix and supports(config(top_k=SHAPES[first].top_k), implementation)
    ]
    return [_case(implementation, name, suffix) for name, suffix in cases]


def _by_position(*arguments, **settings):
    """`commitment_select` of its arguments by position, and then path_phat or nothing."""
    arguments, path_phat = arguments[:5], arguments[5:]
    return commitment_select(*arguments, path_phat=path_phat[0] if path_phat else None, **settings)


def _case(implementation, name, suffix):
    shape = SHAPES[name]
    config = CONFIGS[suffix](top_k=shape.top_k)
    arguments = abstract_arguments(shape)
    if config.weighs_paths:
        arguments += (jax.ShapeDtypeStruct((shape.rows,), jnp.float32),)
    return KernelCase(
        op="commitment_select",
        implementation=implementation,
        shape=name + suffix,
        dtype="float32",
        function=functools.partial(_by_position, config=config, implementation=implementation),
        arguments=arguments,
        bytes=moved_bytes(shape),
        everyday=name in EVERYDAY and not suffix,
    )
