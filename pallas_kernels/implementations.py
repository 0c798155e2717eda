"""Which implementation of each op runs on which device."""

import dataclasses

import jax

from pallas_kernels.compat import require_mosaic


@dataclasses.dataclass(frozen=True)
class Implementations:
    """One implementation for each op of a verification step, as its `implementation=` takes it.

    Attributes:
      selection: of commitment_select.
      experts: of masked_expert_gemm.
      attention: of tree_attention.
      interpret: run Pallas kernels in interpret mode, as tests on a CPU do.
    """

    selection: str = "reference"
    experts: str = "blocks"
    attention: str = "xla"
    interpret: bool = False


# What --kernels takes, beside "auto".
KERNELS = {
    "xla": Implementations(),
    "triton": Implementations("triton", "triton", "triton"),
    "mosaic": Implementations("mosaic", "mosaic", "mosaic"),
}

# By the beginning of the device's kind; the first that fits. No device has decided yet between
# Triton and Mosaic: `experiments.gpu_check` measures both, and its table goes here.
_BY_DEVICE_KIND = (
    ("NVIDIA", "triton"),
    ("cpu", "xla"),
)


def implementations(kernels: str = "auto", device_kind: str | None = None) -> Implementations:
    """The implementations that a name stands for.

    Args:
      kernels: a name in `KERNELS`, or "auto" for the table's choice.
      device_kind: `device_kind` of the device at hand by default.

    Raises:
      NotImplementedError: if this version of jax lacks what the name asks for.
      ValueError: if there is no such name.
    """
    if kernels == "auto":
        kind = jax.devices()[0].device_kind if device_kind is None else device_kind
        kernels = next((name for start, name in _BY_DEVICE_KIND if kind.startswith(start)), "xla")
    if kernels not in KERNELS:
        raise ValueError(f"kernels {kernels!r} is not one of auto, {', '.join(KERNELS)}")
    if kernels == "mosaic":
        require_mosaic(kernels)
    return KERNELS[kernels]
