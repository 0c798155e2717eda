"""What commitment_select computes: `acceptmoe_jax.selection.select`, in plain jnp."""

from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.selection import SelectionResult, SelectorConfig, select


def reference(
    logits: Float[Array, "T E"],
    depth: Int[Array, "T"],
    valid: Bool[Array, "T"],
    phat: Float[Array, "P"],
    resident: Bool[Array, "E"] | None,
    eligible_override: Bool[Array, "E"] | None,
    path_phat: Float[Array, "T"] | None,
    config: SelectorConfig,
) -> SelectionResult:
    """See `commitment_select`."""
    return select(
        logits,
        depth,
        valid,
        phat,
        resident,
        config=config,
        eligible_override=eligible_override,
        path_phat=path_phat,
    )
