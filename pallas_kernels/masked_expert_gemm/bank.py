"""The experts of one layer as the kernels take them, addressed through slots.

No code indexes expert weights by expert id: it asks `slot_of`. With every expert resident the
bank has C = E slots and the identity table; offloaded, it has fewer.
"""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.mxfp4 import Mxfp4, dequantise

Matrix = Float[Array, "C out in"] | Mxfp4


@flax.struct.dataclass
class ExpertBank:
    """Weights of C experts, `[out, in]` as on disk, and expert -> slot.

    The matrices are arrays, or MXFP4 blocks and scales that are dequantised where they are used.
    """

    gate: Matrix  # [C, F, D]
    up: Matrix  # [C, F, D]
    down: Matrix  # [C, D, F]
    slot_of: Int[Array, "E"]
    gate_bias: Float[Array, "C F"] | None = None
    up_bias: Float[Array, "C F"] | None = None
    down_bias: Float[Array, "C D"] | None = None

    @property
    def num_slots(self) -> int:
        """C."""
        return self.down.shape[0]


def numbers(matrix: Matrix, dtype: jnp.dtype = jnp.float32) -> Float[Array, "..."]:
    """The matrices as numbers: packed ones as `dtype`, others as they are."""
    return dequantise(matrix, dtype) if isinstance(matrix, Mxfp4) else matrix


def gathered(matrix: Matrix, slots: Int[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """The matrices in `slots` as numbers, `[..., out, in]`; packed ones come as `dtype`."""
    return numbers(matrix[slots], dtype)


def gathered_bias(
    bias: Float[Array, "C out"] | None, slots: Int[Array, "..."]
) -> Float[Array, "..."] | float:
    """The biases in `slots`, `[..., out]`, or 0 where the family has none."""
    return 0.0 if bias is None else bias[slots]
