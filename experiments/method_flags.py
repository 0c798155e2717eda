"""The flags that choose methods and their budget, and decoding under each of them in turn."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.gpt_oss import GptOssConfig
from acceptmoe_jax.models.qwen3_moe import Qwen3MoeConfig
from acceptmoe_jax.runtime import cost_model
from acceptmoe_jax.runtime.cost_model import HeadShape, TargetShape
from acceptmoe_jax.runtime.engine import AUTOREGRESSIVE, Engine, Generation, Prompt
from acceptmoe_jax.runtime.statistics import summarise
from acceptmoe_jax.selection import POLICIES, SelectorConfig
from acceptmoe_jax.selection.config import BUDGETED_POLICIES
from experiments import engine_flags

# Method -> what its `SelectorConfig` says.
_POLICIES: dict[str, dict[str, Any]] = {policy: {"policy": policy} for policy in POLICIES}
_POLICIES["acceptmoe_no_pruning"] = {"policy": "acceptmoe", "prune": False}

_SELECTORS = flags.DEFINE_list(
    "selectors",
    None,
    f"Methods, in the order of the table: {AUTOREGRESSIVE}, {', '.join(_POLICIES)}; pruning is of "
    "experts that are not on the device, where some are not.",
)
_BUDGET = flags.DEFINE_integer(
    "budget", None, "Experts a layer of acceptmoe_fix and moe_spec; default: acceptmoe's mean."
)
_AUDIT = flags.DEFINE_bool(
    "audit", True, "Verify every block natively as well, outside the timed seconds."
)


# What the shares of experts are carried over to: the published target of the family.
_FULL_SIZE = {
    Qwen3MoeConfig: (cost_model.QWEN3_30B_A3B, cost_model.QWEN3_30B_A3B_EAGLE3),
    GptOssConfig: (cost_model.GPT_OSS_120B, cost_model.GPT_OSS_120B_EAGLE3),
}


def full_size(engine: Engine) -> tuple[TargetShape, HeadShape]:
    """The published target of the engine's family, and its head, for the cost model."""
    return _FULL_SIZE[type(engine.model.setup.target)]


def methods(default: Sequence[str] = (AUTOREGRESSIVE, "native", "acceptmoe")) -> list[str]:
    """The methods asked for.

    Args:
      default: where the flag is not given.

    Raises:
      UserError: if one is unknown, or lacks the draft or the budget that it needs.
    """
    names = list(dict.fromkeys(default if _SELECTORS.value is None else _SELECTORS.value))
    known = (AUTOREGRESSIVE, *_POLICIES)
    for name in names:
        if name not in known:
            raise UserError(f"--selectors: {name!r} is not one of {', '.join(known)}")
    if not names:
        raise UserError("--selectors names no method")
    if engine_flags.DRAFT.value is None and names != [AUTOREGRESSIVE]:
        raise UserError("--draft is needed by every method but autoregressive")
    budgeted = [name for name in names if name in BUDGETED_POLICIES]
    if budgeted and _BUDGET.value is None and "acceptmoe" not in names:
        raise UserError(f"--budget is needed by {budgeted[0]}, unless acceptmoe runs too")
    return names


def decode(
    engine: Engine,
    names: Sequence[str],
    prompts: Sequence[Prompt],
    observe: Callable[[str], None] | None = None,
    **options: Any,
) -> tuple[dict[str, list[Generation]], dict[str, dict[str, Any]]]:
    """Decodes the prompts under every method.

    Args:
      engine: of `engine_flags`.
      names: of `methods`.
      prompts: see `Engine.generate`.
      observe: called with the method's name after every forward.
      **options: for `Engine.generate`.

    Returns:
      The generations and the summary (`summarise`) of each method, in the order of `names`.
    """
    generations, summaries = {}, {}
    # acceptmoe goes before the methods that take its mean set size for their budget.
    for name in sorted(names, key=lambda name: name in BUDGETED_POLICIES):
        selector = _selector(engine, name, summaries)
        generations[name] = _decode_one(engine, name, selector, prompts, observe, options)
        statistics = [generation.statistics for generation in generations[name]]
        tokens = sum(len(generation.token_ids) for generation in generations[name])
        summaries[name] = summarise(statistics, tokens) | {"prompts": len(prompts)}
        if isinstance(selector, SelectorConfig) and selector.budget is not None:
            summaries[name]["budget"] = selector.budget
    return {n: generations[n] for n in names}, {n: summaries[n] for n in names}


def _selector(
    engine: Engine, name: str, summaries: dict[str, dict[str, Any]]
) -> str | SelectorConfig:
    if name == AUTOREGRESSIVE:
        return name
    config = engine.selector("native")
    budget = None
    if name in BUDGETED_POLICIES:
        budget = _BUDGET.value
        if budget is None:
            budget = max(round(summaries["acceptmoe"]["eligible"]), config.top_k)
    try:
        config = dataclasses.replace(config, budget=budget, **_POLICIES[name])
    except ValueError as error:
        raise UserError(f"--budget: {error}") from None
    return engine.selector(config)


def _decode_one(engine, name, selector, prompts, observe, options) -> list[Generation]:
    with reporting.progress("{task.fields[tokens]} tokens") as bar:
        task = bar.add_task(name, total=len(prompts), tokens=0)
        emitted = 0

        def on_tokens(index: int, new: tuple[int, ...]) -> None:
            nonlocal emitted
            emitted += len(new)
            bar.update(task, completed=index, tokens=emitted)
            if observe is not None:
                observe(name)

        return engine.generate(
            prompts,
            selector=selector,
            max_new_tokens=engine_flags.MAX_NEW_TOKENS.value,
            **engine_flags.chat_options(),
            audit=_AUDIT.value,
            on_tokens=on_tokens,
            **options,
        )
