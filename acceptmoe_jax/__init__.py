"""Speculative decoding of mixture-of-experts models with verifier-side expert selection.

    from acceptmoe_jax import Engine, selection

`selection.select` is the method as a pure, jittable function; `Engine` decodes with it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acceptmoe_jax import selection
    from acceptmoe_jax.runtime.engine import Engine

__all__ = ["Engine", "selection"]

_HOMES = {"Engine": "acceptmoe_jax.runtime.engine", "selection": "acceptmoe_jax.selection"}


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is first asked for: both bring jax, which the scorers and
    the sandbox do without, and the kernels import `selection` and are imported by the engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if name == "selection" else getattr(module, name)
