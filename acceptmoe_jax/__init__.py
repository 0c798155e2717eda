"""Speculative decoding of mixture-of-experts models with verifier-side expert selection.

    from acceptmoe_jax import Engine, selection

`selection.select` is the method as a pure, jittable function; `Engine` decodes with it.
"""

from acceptmoe_jax import selection
from acceptmoe_jax.runtime.engine import Engine

__all__ = ["Engine", "selection"]
