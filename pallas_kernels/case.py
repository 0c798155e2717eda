"""One kernel at one shape: what a report compiles, and what a device is measured with."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """An implementation of an op, bound to a named shape.

    Attributes:
      op: the folder's name; each of its launches has a name that begins with it.
      implementation: as `implementation=` of the op.
      shape: name of the shape.
      dtype: of the weights or of what else is largest: "bfloat16", "float32", "mxfp4".
      function: jittable, of `arguments`.
      arguments: `jax.ShapeDtypeStruct`s in the function's structure.
      bytes: what has to cross the memory bus once at a typical set of used experts.
      flops: of the products, at the same set.
      tensor_cores: whether its products should run on them.
      archs: what it compiles for.
      everyday: compiled in `make test`; the others in `make check`.
    """

    op: str
    implementation: str
    shape: str
    dtype: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes: int
    flops: int = 0
    tensor_cores: bool = False
    archs: tuple[str, ...] = ("sm_90", "sm_120")
    everyday: bool = False
