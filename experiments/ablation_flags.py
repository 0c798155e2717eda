"""The flags that take AcceptMoE apart: each changes one setting of its policies in this run."""

from typing import Any

from absl import flags

from acceptmoe_jax.selection import SelectorConfig
from acceptmoe_jax.selection.config import SIZE_RULES

_UNIFORM = flags.DEFINE_bool("uniform_weights", None, "Every node weighs 1.")
_ANCHOR = flags.DEFINE_bool("anchor", None, "The root's own experts are always eligible.")
_PROTECT = flags.DEFINE_bool("protect_anchor", None, "Pruning never drops the root's experts.")
_SIZE_RULE = flags.DEFINE_enum("size_rule", None, SIZE_RULES, "How acceptmoe sizes its set.")
_MASS = flags.DEFINE_float("mass", None, "Share of the demand that --size_rule=mass covers.")
_BETA = flags.DEFINE_float("beta", None, "Exponent of the commitment probability.")
_GAMMA = flags.DEFINE_float("gamma", None, "Exponent of the nodes at a depth.")
_PATH = flags.DEFINE_bool("path_commitment", None, "Weigh nodes by their own draft path.")
_ADMIT = flags.DEFINE_integer(
    "admit", None, "With --expert_slots: resident experts outside the set let back in at most."
)
_SETTINGS = {
    "uniform": _UNIFORM,
    "anchor": _ANCHOR,
    "protect_anchor": _PROTECT,
    "size_rule": _SIZE_RULE,
    "mass": _MASS,
    "beta": _BETA,
    "gamma": _GAMMA,
    "path": _PATH,
    "admit": _ADMIT,
}
assert _SETTINGS.keys() <= SelectorConfig.__dataclass_fields__.keys()


def ablations() -> dict[str, Any]:
    """The settings given, as fields of `SelectorConfig`; they are in force for every method of
    AcceptMoE, and stand above what a method's name says."""
    return {name: flag.value for name, flag in _SETTINGS.items() if flag.value is not None}
