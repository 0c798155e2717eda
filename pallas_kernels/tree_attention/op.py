"""The public function of tree_attention."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention.mosaic import mosaic
from pallas_kernels.tree_attention.ref import attend
from pallas_kernels.tree_attention.triton import triton

_KERNELS = {"triton": triton, "mosaic": mosaic}
IMPLEMENTATIONS = ("xla", *_KERNELS)


def tree_attention(
    q_TNH: Float[Array, "T N H"],
    k_SKH: Float[Array, "S K H"],
    v_SKH: Float[Array, "S K H"],
    mask_TS: Bool[Array, "T S"],
    sinks_N: Float[Array, "N"] | None = None,
    *,
    begin: Int[Array, ""],
    end: Int[Array, ""],
    implementation: str = "xla",
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Softmax attention, scaled by `H ** -0.5`, to the columns that `mask_TS` shows each row.

    Only columns in [begin, end) may be shown. A kernel reads no others, so that its cost follows
    them and not the capacity S, and others may hold anything, NaN too; XLA reads all.

    Args:
      q_TNH: queries; N is a multiple of K, and consecutive heads share a kv head.
      k_SKH: keys, in whose columns from `begin` to `end` every number is finite.
      v_SKH: values, likewise.
      mask_TS: which columns each row sees; at least one, or with sinks none.
      sinks_N: the logit a head of one more column, whose value is zero.
      begin: int32, the first column that any row may see.
      end: int32, the one after the last.
      implementation: a name in `IMPLEMENTATIONS`.
      interpret: run a Pallas kernel in interpret mode; plain XLA runs anywhere.

    Returns:
      The weighted values, in the dtype of `q_TNH`; scores, softmax and, in kernels, the sum are
      float32, and weights are rounded to the dtype of the values.

    Raises:
      NotImplementedError: if this version of jax lacks what the implementation needs.
      ValueError: if there is no such implementation, or it does not take these numbers.
    """
    if implementation == "xla":
        return attend(q_TNH, k_SKH, v_SKH, mask_TS, sinks_N)
    if implementation in _KERNELS:
        run = _KERNELS[implementation]
        return run(q_TNH, k_SKH, v_SKH, mask_TS, sinks_N, begin, end, interpret=interpret)
    raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
