"""The expert MLPs of a block of rows, over the used experts only."""

from pallas_kernels.masked_expert_gemm.activation import GatedActivation
from pallas_kernels.masked_expert_gemm.bank import ExpertBank, Matrix, numbers
from pallas_kernels.masked_expert_gemm.op import IMPLEMENTATIONS, expert_picks, masked_expert_gemm
from pallas_kernels.masked_expert_gemm.ref import combine

__all__ = [
    "IMPLEMENTATIONS",
    "ExpertBank",
    "GatedActivation",
    "Matrix",
    "combine",
    "expert_picks",
    "masked_expert_gemm",
    "numbers",
]
