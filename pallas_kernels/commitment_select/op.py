"""The public function of commitment_select."""

from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.selection import SelectionResult, SelectorConfig
from pallas_kernels.commitment_select.mosaic import mosaic
from pallas_kernels.commitment_select.ref import reference
from pallas_kernels.commitment_select.triton import triton

KERNELS = {"triton": triton, "mosaic": mosaic}
IMPLEMENTATIONS = ("reference", *KERNELS)
# Policies that a kernel lacks. Cache-conditional routing is a baseline to compare with.
_LACKING = {"mosaic": ("cache_conditional",)}


def supports(config: SelectorConfig, implementation: str) -> bool:
    """Whether an implementation has the config's policy; the reference has all of them.

    Raises:
      ValueError: if there is no such implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    return config.policy not in _LACKING.get(implementation, ())


def commitment_select(
    logits: Float[Array, "T E"],
    depth: Int[Array, "T"],
    valid: Bool[Array, "T"],
    phat: Float[Array, "P"],
    resident: Bool[Array, "E"] | None = None,
    *,
    config: SelectorConfig,
    eligible_override: Bool[Array, "E"] | None = None,
    path_phat: Float[Array, "T"] | None = None,
    implementation: str = "reference",
    interpret: bool = False,
) -> SelectionResult:
    """`acceptmoe_jax.selection.select`, which says what arguments and results mean.

    The kernels do all of it in one launch, one program a block, and agree with it: decisions
    where rounding decides none of them, floats within rounding (NaN counts as the largest logit,
    whatever its sign). A batch is `jax.vmap` over the arrays. Blocks of up to 64 rows and 128
    experts fit the registers; larger ones are right, and slower.

    Args:
      implementation: a name in `IMPLEMENTATIONS`.
      interpret: run a kernel's interpreter, on any device.

    Raises:
      NotImplementedError: if this version of jax lacks what the implementation needs, or the
        implementation the config's policy; see `supports`.
      ValueError: as `select`, or if there is no such implementation.
    """
    if not supports(config, implementation):
        raise NotImplementedError(f"{implementation!r} has no policy {config.policy!r}")
    arrays = (logits, depth, valid, phat, resident, eligible_override, path_phat)
    if implementation == "reference":
        return reference(*arrays, config)
    return KERNELS[implementation](*arrays, config, interpret)
