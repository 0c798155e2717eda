"""Every op by name, as programs take it that measure or compare all of them alike."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from acceptmoe_jax.selection import SelectorConfig
from pallas_kernels import commitment_select, masked_expert_gemm, tree_attention
from pallas_kernels.commitment_select import cases as selection_cases
from pallas_kernels.implementations import KERNELS
from pallas_kernels.masked_expert_gemm import cases as expert_cases
from pallas_kernels.tree_attention import cases as attention_cases

_WGMMA = "9.0"  # the one compute capability that has it


@dataclasses.dataclass(frozen=True)
class Op:
    """An op and its named shapes.

    Attributes:
      name: of its folder.
      implementations: all that it knows.
      plain: the one that is plain XLA, and as fast as we know.
      reference: the one that is written for the eye.
      shapes: by name.
      dtypes: of a shape; the first is the family's own.
      function: of a shape: the op of its arguments by position, with the keywords
        `implementation` and `interpret`.
      arguments: random ones, of a key, a shape and a dtype.
      bytes, flops: of one call at a shape and dtype, as in `KernelCase`.
    """

    name: str
    implementations: tuple[str, ...]
    plain: str
    reference: str
    shapes: Mapping[str, Any]
    dtypes: Callable[[Any], tuple[str, ...]]
    function: Callable[[Any], Callable[..., Any]]
    arguments: Callable[[jax.Array, Any, str], tuple]
    bytes: Callable[[Any, str], int]
    flops: Callable[[Any], int]

    def kernels(self, kind: str) -> tuple[str, ...]:
        """Its implementations of a kind, "triton" or "mosaic", for the device at hand."""
        # A CPU, which interprets kernels, passes for any of them.
        capability = getattr(jax.devices()[0], "compute_capability", _WGMMA)
        return tuple(
            name
            for name in self.implementations
            if name.startswith(kind) and (capability == _WGMMA or "wgmma" not in name)
        )


def _selection(shape: selection_cases.SelectionShape) -> Callable[..., Any]:
    config = SelectorConfig(top_k=shape.top_k)
    return functools.partial(commitment_select.commitment_select, config=config)


OPS = {
    op.name: op
    for op in (
        Op(
            name="masked_expert_gemm",
            implementations=masked_expert_gemm.IMPLEMENTATIONS,
            plain=KERNELS["xla"].experts,
            reference="reference",
            shapes=expert_cases.SHAPES,
            dtypes=lambda shape: shape.dtypes,
            function=lambda shape: functools.partial(
                masked_expert_gemm.masked_expert_gemm, activation=shape.activation
            ),
            arguments=expert_cases.random_arguments,
            bytes=expert_cases.moved_bytes,
            flops=expert_cases.product_flops,
        ),
        Op(
            name="commitment_select",
            implementations=commitment_select.IMPLEMENTATIONS,
            plain=KERNELS["xla"].selection,
            reference="reference",
            shapes=selection_cases.SHAPES,
            dtypes=lambda shape: ("float32",),
            function=_selection,
            arguments=lambda key, shape, dtype: selection_cases.random_arguments(key, shape),
            bytes=lambda shape, dtype: selection_cases.moved_bytes(shape),
            flops=lambda shape: 0,
        ),
        Op(
            name="tree_attention",
            implementations=tree_attention.IMPLEMENTATIONS,
            plain=KERNELS["xla"].attention,
            reference="xla",
            shapes=attention_cases.SHAPES,
            dtypes=lambda shape: shape.dtypes,
            function=lambda shape: attention_cases.by_position,
            arguments=attention_cases.random_arguments,
            bytes=attention_cases.moved_bytes,
            flops=attention_cases.product_flops,
        ),
    )
}
