"""Muon for the matrices inside the layers, Adam for the rest, one schedule shape for both."""

import dataclasses
from typing import Any

import jax
import optax
from optax import contrib

# Weights are [out, in] on disk and here; a leading axis of experts is a batch of matrices.
_MATRIX = contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Peak learning rates, and the length of the linear warm-up in steps."""

    muon: float = 0.02
    adam: float = 3e-3
    warmup_steps: int = 40


def schedule(peak: float, warmup_steps: int, steps: int) -> optax.Schedule:
    """Linear warm-up, constant, then linear decay to 0 over the last half of `steps`."""
    half = steps // 2
    warmup_steps = min(warmup_steps, half)
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / (warmup_steps + 1), peak, warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, steps - half),
        ],
        [warmup_steps, half],
    )


def muon_dimensions(params: Any) -> Any:
    """For each leaf how Muon sees it, or None where Adam trains it.

    Muon takes the projections (`*_proj`, `fc`) and the experts, one by one. Embeddings, output
    heads, routers and norms are no maps between hidden spaces: Adam.
    """

    def of(path: tuple[Any, ...], leaf: jax.Array) -> contrib.MuonDimensionNumbers | None:
        names = [getattr(entry, "key", None) for entry in path]
        projection = any(str(name).endswith("_proj") or name == "fc" for name in names)
        return _MATRIX if leaf.ndim == 3 or (leaf.ndim == 2 and projection) else None

    return jax.tree_util.tree_map_with_path(of, params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Muon and Adam for a run of `steps` steps."""
    return contrib.muon(
        schedule(config.muon, config.warmup_steps, steps),
        adam_learning_rate=schedule(config.adam, config.warmup_steps, steps),
        adam_b2=0.95,
        muon_weight_dimension_numbers=muon_dimensions,
    )
