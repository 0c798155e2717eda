"""commitment_select in Mosaic GPU: whole tiles for the kernel, and its masks as bytes."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.selection import SelectionResult, SelectorConfig
from pallas_kernels.commitment_select.ref import reference
from pallas_kernels.compat import require_mosaic

# Experts come in multiples of the threads that hold a vector of them.
_EXPERTS = 128
_ROWS = 32


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def mosaic(
    logits: Float[Array, "T E"],
    depth: Int[Array, "T"],
    valid: Bool[Array, "T"],
    phat: Float[Array, "P"],
    resident: Bool[Array, "E"] | None,
    eligible_override: Bool[Array, "E"] | None,
    path_phat: Float[Array, "T"] | None,
    config: SelectorConfig,
    interpret: bool,
) -> SelectionResult:
    """See `commitment_select`. Where rows and experts are no multiples of 64, XLA pads and cuts."""
    require_mosaic("mosaic")
    arguments = (logits, depth, valid, phat, resident, eligible_override, path_phat)
    select = functools.partial(reference, config=config)
    results = jax.eval_shape(select, *arguments)
    rows, experts = logits.shape
    padding = {"T": (0, -rows % _ROWS), "E": (0, -experts % _EXPERTS), "P": (0, 0)}
    padded = [
        array
        if array is None
        else jnp.pad(array, [padding[axis] for axis in axes], constant_values=nothing)
        for array, axes, nothing in zip(
            arguments,
            ("TE", "T", "T", "P", "E", "E", "T"),
            (-jnp.inf, 0, False, 0, True, False, 0),
        )
    ]
    out = _launch(
        _masks_as(jnp.int8, padded),
        _masks_as(jnp.int8, jax.eval_shape(select, *padded)),
        config=config,
        num_experts=experts,
        interpret=interpret,
    )
    return jax.tree.map(
        lambda values, like: values[tuple(map(slice, like.shape))].astype(like.dtype), out, results
    )


def _launch(arguments, out_type, *, interpret, **settings):
    # They import what jax has from 0.11 on.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import mosaic_helpers as helpers
    from pallas_kernels.commitment_select.mosaic_kernel import kernel

    operands, in_structure = jax.tree.flatten(arguments)
    outputs, out_structure = jax.tree.flatten(out_type)
    experts = arguments[0].shape[1]

    def body(*refs):
        in_refs, out_refs, scratch = (
            refs[: len(operands)],
            refs[len(operands) : -2],
            refs[-2:],
        )
        kernel(
            jax.tree.unflatten(in_structure, in_refs),
            jax.tree.unflatten(out_structure, out_refs),
            scratch,
            **settings,
        )

    launch = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=[plgpu.SMEM((experts,), dtype) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=helpers.EXPLICIT_LAYOUTS,
        interpret=helpers.interpreter(interpret),
        kernel_name="commitment_select",
    )
    return jax.tree.unflatten(out_structure, launch(*operands))


def _masks_as(dtype, tree):
    """Arrays, or what stands for them, with another dtype where they are bool."""

    def converted(leaf):
        if leaf.dtype != jnp.bool_:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, dtype)
        return leaf.astype(dtype)

    return jax.tree.map(converted, tree)
