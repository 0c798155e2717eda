"""The flag that says how many experts a block uses, of the programs that time experts."""

from absl import flags

from acceptmoe_jax.errors import UserError
from pallas_kernels.masked_expert_gemm.cases import ExpertShape

_USED = flags.DEFINE_list("used", ["8", "16", "28", "48", "64", "96", "120", "128"], "Set sizes.")


def set_sizes(shape: ExpertShape) -> list[int]:
    """The sizes asked for.

    Raises:
      UserError: if one is no number, or the rows' picks cannot name so many experts.
    """
    try:
        sizes = [int(text) for text in _USED.value]
    except ValueError:
        raise UserError(f"--used: {_USED.value} are not all numbers") from None
    most = min(shape.experts, shape.rows * shape.top_k)
    if not sizes or not all(shape.top_k <= size <= most for size in sizes):
        raise UserError(f"--used: sizes should lie between {shape.top_k} and {most}")
    return sizes
