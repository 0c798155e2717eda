"""The GPUs that kernels are compiled, chosen and modelled for, as their data sheets tell them."""

import dataclasses

# Bytes a second from pinned host memory in practice, of a raw rate of 64 GB/s.
_PCIE5_X16 = 57e9


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU. Units: bytes, bytes a second, floating-point operations a second.

    Attributes:
      name: for tables.
      kind: a `device_kind` that jax knows, for lowering where no such device is.
      compute_capability: major and minor.
      multiprocessors: streaming multiprocessors.
      shared_per_multiprocessor: shared memory that its thread blocks divide among them.
      shared_per_block: the most that one thread block may ask for.
      memory_bandwidth: of the device's own memory.
      link_bandwidth: from pinned host memory.
      tensor_flops: dense bfloat16 products accumulated in float32.
    """

    name: str
    kind: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_per_multiprocessor: int
    shared_per_block: int
    l2: int
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    tensor_flops: float

    @property
    def arch(self) -> str:
        """As in "sm_90"."""
        return "sm_{}{}".format(*self.compute_capability)

    def floor_seconds(self, bytes_moved: float, flops: float = 0) -> float:
        """The least time for a launch: its bytes or its arithmetic, whichever takes longer."""
        return max(bytes_moved / self.memory_bandwidth, flops / self.tensor_flops)


_HOPPER = {
    "compute_capability": (9, 0),
    "multiprocessors": 132,
    "shared_per_multiprocessor": 233472,
    "shared_per_block": 232448,
    "l2": 50 << 20,
    "link_bandwidth": _PCIE5_X16,
    "tensor_flops": 990e12,
}
# A GeForce card's kind is not in jax's table, and asks for the same code.
_BLACKWELL = {
    "kind": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "compute_capability": (12, 0),
    "shared_per_multiprocessor": 102400,
    "shared_per_block": 101376,
    "memory_bandwidth": 1.79e12,
    "link_bandwidth": _PCIE5_X16,
}
DEVICES = {
    "h100": Device(
        name="H100 SXM",
        kind="NVIDIA H100 80GB HBM3",
        memory=80 * 10**9,
        memory_bandwidth=3.35e12,
        **_HOPPER,
    ),
    "h200": Device(
        name="H200 SXM",
        kind="NVIDIA H200",
        memory=141 * 10**9,
        memory_bandwidth=4.8e12,
        **_HOPPER,
    ),
    "rtx-5090": Device(
        name="RTX 5090",
        multiprocessors=170,
        l2=96 << 20,
        memory=32 * 10**9,
        tensor_flops=210e12,
        **_BLACKWELL,
    ),
    "rtx-pro-6000": Device(
        name="RTX PRO 6000 Blackwell",
        multiprocessors=188,
        l2=128 << 20,
        memory=96 * 10**9,
        tensor_flops=500e12,
        **_BLACKWELL,
    ),
}
