"""The expert MLPs of a block of rows, over the used experts only."""

from pallas_kernels.masked_expert_gemm.activation import GatedActivation
from pallas_kernels.masked_expert_gemm.bank import ExpertBank, Matrix, numbers
from pallas_kernels.masked_expert_gemm.op import IMPLEMENTATIONS, masked_expert_gemm

__all__ = [
    "IMPLEMENTATIONS",
    "ExpertBank",
    "GatedActivation",
    "Matrix",
    "masked_expert_gemm",
    "numbers",
]
