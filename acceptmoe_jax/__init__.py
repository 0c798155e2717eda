"""Speculative decoding of mixture-of-experts models with verifier-side expert selection.

    from acceptmoe_jax import Engine, selection

`selection.select` is the method as a pure, jittable function; `Engine` decodes with it.
"""

from typing import TYPE_CHECKING, Any

from acceptmoe_jax import selection

if TYPE_CHECKING:
    from acceptmoe_jax.runtime.engine import Engine

__all__ = ["Engine", "selection"]


def __getattr__(name: str) -> Any:
    """Imports `Engine` when it is first asked for: the kernels import `selection` and are imported
    by the engine."""
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from acceptmoe_jax.runtime.engine import Engine

    return Engine
