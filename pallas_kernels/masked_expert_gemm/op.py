"""The public function of masked_expert_gemm."""

from jaxtyping import Array, Float, Int

from pallas_kernels.masked_expert_gemm.activation import GatedActivation
from pallas_kernels.masked_expert_gemm.bank import ExpertBank
from pallas_kernels.masked_expert_gemm.blocks import blocks
from pallas_kernels.masked_expert_gemm.ref import reference

IMPLEMENTATIONS = {"reference": reference, "blocks": blocks}


def masked_expert_gemm(
    x_TD: Float[Array, "T D"],
    bank: ExpertBank,
    expert_ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    used_ids_E: Int[Array, "E"],
    used_count: Int[Array, ""],
    *,
    activation: GatedActivation,
    implementation: str = "blocks",
) -> Float[Array, "T D"]:
    """`y_t = sum_i w[t,i] * (down_e activation(gate_e x_t, up_e x_t))`, with `e = expert_ids[t,i]`.

    Each of the three products adds the expert's bias where the bank has one.

    Args:
      x_TD: rows of the block.
      bank: weights by slot and the slot of each expert, which is read for used experts only.
      expert_ids_Tk: experts of each row, by rank; distinct within a row.
      weights_Tk: their weights; a pick of weight 0 is not computed and adds an exact zero.
      used_ids_E: the experts of the picks of non-zero weight, ascending, then padding.
      used_count: how many of them count.
      activation: of the family.
      implementation: a name in `IMPLEMENTATIONS`.

    Returns:
      The combined output, in the dtype of `x_TD`; sums over picks are float32, in rank order.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {list(IMPLEMENTATIONS)}")
    run = IMPLEMENTATIONS[implementation]
    return run(x_TD, bank, expert_ids_Tk, weights_Tk, used_ids_E, used_count, activation)
