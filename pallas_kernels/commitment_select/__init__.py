"""Expert selection of a verification block: router logits to combine weights in one launch."""

from pallas_kernels.commitment_select.cases import SHAPES, kernel_cases, random_arguments
from pallas_kernels.commitment_select.op import IMPLEMENTATIONS, commitment_select, supports

__all__ = [
    "IMPLEMENTATIONS",
    "SHAPES",
    "commitment_select",
    "kernel_cases",
    "random_arguments",
    "supports",
]
