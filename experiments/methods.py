"""The methods that programs compare, by name: a policy with its settings, and what goes with it."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.runtime.engine import AUTOREGRESSIVE, Engine
from acceptmoe_jax.selection import POLICIES, SelectorConfig
from acceptmoe_jax.selection.config import ACCEPTMOE_POLICIES, BUDGETED_POLICIES

# Resident experts outside the set that `acceptmoe_admit` lets back in at most.
ADMIT = 8


@dataclasses.dataclass(frozen=True)
class Method:
    """What a name stands for.

    Attributes:
      settings: of its `SelectorConfig`; without any it decodes autoregressively.
      evict: draft trees are cut before they are verified.
    """

    settings: Mapping[str, Any]
    evict: bool = False

    @property
    def plain(self) -> bool:
        """Whether it drafts nothing."""
        return not self.settings

    @property
    def budgeted(self) -> bool:
        """Whether it needs a budget of experts a layer."""
        return self.settings.get("policy") in BUDGETED_POLICIES


def _method(policy: str, evict: bool = False, **settings: Any) -> Method:
    return Method(types.MappingProxyType({"policy": policy} | settings), evict)


METHODS: Mapping[str, Method] = types.MappingProxyType(
    {AUTOREGRESSIVE: Method(types.MappingProxyType({}))}
    | {policy: _method(policy) for policy in POLICIES}
    | {
        "acceptmoe_no_pruning": _method("acceptmoe", prune=False),
        "acceptmoe_path": _method("acceptmoe", path=True),
        "acceptmoe_path_no_pruning": _method("acceptmoe", path=True, prune=False),
        "acceptmoe_admit": _method("acceptmoe", admit=ADMIT),
        "acceptmoe_path_admit": _method("acceptmoe", path=True, admit=ADMIT),
        "evict": _method("native", evict=True),
        "evict+acceptmoe": _method("acceptmoe", evict=True),
    }
)


def selector_of(
    engine: Engine,
    method: Method,
    budget: int | None = None,
    ablations: Mapping[str, Any] = types.MappingProxyType({}),
) -> str | SelectorConfig:
    """What `Engine.generate` takes for a method.

    Args:
      engine: whose target it is for.
      budget: experts a layer, for methods that need one.
      ablations: further settings of the policies of AcceptMoE; other policies ignore them.

    Raises:
      UserError: if the settings do not fit together, or the engine lacks what they need.
    """
    if method.plain:
        return AUTOREGRESSIVE
    settings = dict(method.settings)
    if method.budgeted:
        settings["budget"] = budget
    if settings["policy"] in ACCEPTMOE_POLICIES:
        settings |= ablations
    try:
        selector = SelectorConfig(top_k=engine.model.setup.target.top_k, **settings)
    except ValueError as error:
        raise UserError(f"selector: {error}") from None
    return engine.selector(selector)
