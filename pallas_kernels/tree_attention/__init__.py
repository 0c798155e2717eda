"""Attention of a block of rows to a cache, over an arbitrary mask."""

from pallas_kernels.tree_attention.cases import SHAPES, kernel_cases, random_arguments
from pallas_kernels.tree_attention.op import IMPLEMENTATIONS, tree_attention
from pallas_kernels.tree_attention.ref import attend

__all__ = [
    "IMPLEMENTATIONS",
    "SHAPES",
    "attend",
    "kernel_cases",
    "random_arguments",
    "tree_attention",
]
