"""The layout of a block's picks by expert, that kernels which gather rows share."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class Assignments:
    """Picks of non-zero weight laid out by expert, each expert's rows in ascending order.

    Attributes:
      count_E: rows of each expert.
      first_E: where its rows begin.
      place_Tk: where each pick lies; behind all of them if its weight is 0.
      within_Tk: where among its expert's rows it lies.
      row_of_A: the row of each place; 0 where there is none.
    """

    count_E: Int[Array, "E"]
    first_E: Int[Array, "E"]
    place_Tk: Int[Array, "T k"]
    within_Tk: Int[Array, "T k"]
    row_of_A: Int[Array, "A"]


def assign(
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    num_experts: int,
    *,
    align: int = 1,
    room: int,
) -> Assignments:
    """Lays the picks out by expert.

    Args:
      align: each expert's rows begin at a multiple of it.
      room: places behind the last expert's first row that a reader of whole tiles may touch.
    """
    rows, _ = expert_ids_Tk.shape
    picks = expert_ids_Tk.size
    places = picks + (align - 1) * min(num_experts, picks)
    places = -(-places // align) * align

    index_E = jnp.arange(num_experts)
    live_Tk = weights_Tk != 0
    picked_TE = jnp.any((expert_ids_Tk[..., None] == index_E) & live_Tk[..., None], axis=1)
    count_E = jnp.sum(picked_TE, axis=0, dtype=jnp.int32)
    width_E = -(-count_E // align) * align
    first_E = jnp.sum(jnp.where(index_E[:, None] < index_E, width_E[:, None], 0), axis=0)
    # Rows before t that pick e, as a product instead of a sort or a scan, both slow to compile;
    # sums of 0 and 1 are exact at any matmul precision.
    earlier_TE = (jnp.tri(rows, k=-1) @ picked_TE.astype(jnp.float32)).astype(jnp.int32)
    within_Tk = jnp.take_along_axis(earlier_TE, expert_ids_Tk, axis=1)
    place_Tk = jnp.where(live_Tk, first_E[expert_ids_Tk] + within_Tk, places)
    row_of_A = jnp.zeros(places + room, jnp.int32)
    row_of_A = row_of_A.at[place_Tk].set(jnp.arange(rows, dtype=jnp.int32)[:, None])
    return Assignments(count_E, first_E, place_Tk, within_Tk, row_of_A)
