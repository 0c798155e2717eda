"""What experiments.ablate compares, by name: policies over budgets, and AcceptMoE taken apart."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.runtime.engine import Engine
from acceptmoe_jax.selection import SelectorConfig
from experiments.methods import Method, selector_of

# A variant's name, and its budget of experts a layer if it takes one.
Planned = tuple[str, int | None]

GROUPS = ("curves", "self_sizing", "ablations", "offloading")

# Resident experts let back in at most, and how much resident experts are favoured.
_ADMIT = (4, 8, 16, 32)
_CACHE_BIAS = (0.1, 0.25, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A policy with its settings.

    Attributes:
      method: the policy; those of the group "curves" take a budget.
      group: one of `GROUPS`; "offloading" says something where experts are not all on the device.
      line: the curve that it belongs to, or whose ranking it sizes by itself; None for neither.
      per_node: weighs by commitment probabilities of a node instead of a depth's position.
    """

    method: Method
    group: str
    line: str | None = None
    per_node: bool = False


def _of(group: str, policy: str, line: str | None = None, per_node: bool = False, **settings: Any):
    settings = types.MappingProxyType({"policy": policy} | settings)
    return Variant(Method(settings), group, line, per_node)


def _curve(line: str, policy: str = "acceptmoe_fix", **settings: Any) -> Variant:
    return _of("curves", policy, line, **settings)


def _self_sizing(line: str, **settings: Any) -> Variant:
    return _of("self_sizing", "acceptmoe", line, **settings)


def _ablation(policy: str = "acceptmoe", per_node: bool = False, **settings: Any) -> Variant:
    return _of("ablations", policy, per_node=per_node, **settings)


def _offloading(line: str, policy: str = "acceptmoe", **settings: Any) -> Variant:
    return _of("offloading", policy, line, **settings)


VARIANTS: Mapping[str, Variant] = types.MappingProxyType(
    {
        "native": _ablation("native"),
        "acceptmoe": _self_sizing("acceptmoe_fix"),
        "acceptmoe_participation": _self_sizing("acceptmoe_fix", size_rule="participation_ratio"),
        "acceptmoe_mass": _self_sizing("acceptmoe_fix", size_rule="mass"),
        "acceptmoe_path": _self_sizing("acceptmoe_fix_path", path=True),
        "acceptmoe_uniform": _self_sizing("acceptmoe_fix_uniform", uniform=True),
        "acceptmoe_no_anchor": _self_sizing("acceptmoe_fix_no_anchor", anchor=False),
        "acceptmoe_beta_0": _ablation(beta=0.0),
        "acceptmoe_beta_1": _ablation(beta=1.0),
        "acceptmoe_gamma_0": _ablation(gamma=0.0),
        "acceptmoe_gamma_1": _ablation(gamma=1.0),
        "acceptmoe_per_node": _ablation(per_node=True),
        "acceptmoe_fix": _curve("acceptmoe_fix"),
        "acceptmoe_fix_path": _curve("acceptmoe_fix_path", path=True),
        "acceptmoe_fix_uniform": _curve("acceptmoe_fix_uniform", uniform=True),
        "acceptmoe_fix_no_anchor": _curve("acceptmoe_fix_no_anchor", anchor=False),
        "moe_spec": _curve("moe_spec", "moe_spec"),
        "moe_spec_truncate": _curve("moe_spec_truncate", "moe_spec", moe_spec_mode="truncate"),
        "acceptmoe_no_pruning": _offloading("acceptmoe_no_pruning", prune=False),
        "acceptmoe_path_no_pruning": _offloading(
            "acceptmoe_path_no_pruning", path=True, prune=False
        ),
        "acceptmoe_unprotected": _offloading("acceptmoe_unprotected", protect_anchor=False),
    }
    | {f"acceptmoe_admit_{most}": _offloading("acceptmoe_admit", admit=most) for most in _ADMIT}
    | {
        f"acceptmoe_path_admit_{most}": _offloading("acceptmoe_path_admit", path=True, admit=most)
        for most in _ADMIT
    }
    | {
        f"cache_conditional_{bias:g}": _offloading(
            "cache_conditional", "cache_conditional", cache_bias=bias
        )
        for bias in _CACHE_BIAS
    }
)


def chosen(names: Sequence[str] | None, offloaded: bool) -> list[str]:
    """The variants that names of variants or groups stand for, in the order of `VARIANTS`.

    Args:
      names: None for all that say something.
      offloaded: whether experts are in host memory.

    Raises:
      UserError: if a name is unknown, or needs experts in host memory.
    """
    if names is None:
        names = GROUPS if offloaded else GROUPS[:-1]
    for name in names:
        if name not in (*GROUPS, *VARIANTS):
            raise UserError(f"--policies: {name!r} is not one of {', '.join((*GROUPS, *VARIANTS))}")
    named = [n for n, v in VARIANTS.items() if n in names or v.group in names]
    needing = [name for name in named if VARIANTS[name].group == "offloading"]
    if needing and not offloaded:
        raise UserError(f"--policies: {needing[0]} is of use with --expert_slots only")
    if not named:
        raise UserError("--policies names no policy")
    return named


def planned(
    names: Sequence[str], budgets: Sequence[int], top_k: int, num_experts: int
) -> list[Planned]:
    """Pairs of variant and budget to run; the budget is None where the variant takes none.

    Args:
      names: of variants.
      budgets: brought into [top_k, num_experts], each once.
    """
    fitting = sorted({min(max(budget, top_k), num_experts) for budget in budgets})
    return [
        (name, budget)
        for name in names
        for budget in (fitting if VARIANTS[name].method.budgeted else [None])
    ]


def selector(engine: Engine, name: str, budget: int | None) -> SelectorConfig:
    """The policy of a variant for the engine's target.

    Raises:
      UserError: as `Engine.selector`.
    """
    return selector_of(engine, VARIANTS[name].method, budget)
