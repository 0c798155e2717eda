"""The flags that choose methods and their budget, and decoding under each of them in turn."""

import dataclasses
import sys
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
from acceptmoe_jax.runtime.evict import EvictConfig
from acceptmoe_jax.runtime.statistics import summarise
from experiments import ablation_flags, engine_flags, sampling_flags
from experiments.methods import METHODS, selector_of

_SELECTORS = flags.DEFINE_list(
    "selectors",
    None,
    f"Methods, in the order of the table: {', '.join(METHODS)}; pruning and admission are "
    "by what is on the device, where something is not.",
)
_BUDGET = flags.DEFINE_integer(
    "budget", None, "Experts a layer of acceptmoe_fix and moe_spec; default: acceptmoe's mean."
)
_AUDIT_EVERY = flags.DEFINE_integer(
    "audit_every",
    1,
    "Verify every so manieth block natively as well, outside the timed seconds; 0: none.",
)
_MAX_DISAGREEMENT = flags.DEFINE_float(
    "max_disagreement",
    None,
    "Go on natively once this share of audited tokens differs from native routing's.",
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Prompts that decode at the same time.")
_EVICT_LENGTHS = flags.DEFINE_list(
    "evict_lengths",
    list(map(str, EvictConfig().lengths)),
    "Rows of a block that evict may choose, beside the whole tree's; each is compiled and timed.",
)


# What the shares of experts are carried over to: the published target of the family.
_FULL_SIZE = {
    Qwen3MoeConfig: (cost_model.QWEN3_30B_A3B, cost_model.QWEN3_30B_A3B_EAGLE3),
    GptOssConfig: (cost_model.GPT_OSS_120B, cost_model.GPT_OSS_120B_EAGLE3),
}


def full_size(engine: Engine) -> tuple[TargetShape, HeadShape]:
    """The published target of the engine's family, and its head, for the cost model."""
    return _FULL_SIZE[type(engine.model.setup.target)]


def methods(
    draft: object, default: Sequence[str] = (AUTOREGRESSIVE, "native", "acceptmoe")
) -> list[str]:
    """The methods asked for.

    Args:
      draft: what --draft or --drafts says.
      default: where the flag is not given.

    Raises:
      UserError: if one is unknown, or lacks the draft or the budget that it needs.
    """
    names = list(dict.fromkeys(default if _SELECTORS.value is None else _SELECTORS.value))
    for name in names:
        if name not in METHODS:
            raise UserError(f"--selectors: {name!r} is not one of {', '.join(METHODS)}")
    if not names:
        raise UserError("--selectors names no method")
    if not draft and names != [AUTOREGRESSIVE]:
        raise UserError("a draft is needed (--draft) by every method but autoregressive")
    budgeted = [name for name in names if METHODS[name].budgeted]
    if budgeted and _BUDGET.value is None and "acceptmoe" not in names:
        raise UserError(f"--budget is needed by {budgeted[0]}, unless acceptmoe runs too")
    return names


def decode(
    engine: Engine,
    names: Sequence[str],
    prompts: Sequence[Prompt],
    on_forward: Callable[[str], None] | None = None,
    **options: Any,
) -> tuple[dict[str, list[Generation]], dict[str, dict[str, Any]]]:
    """Decodes the prompts under every method.

    Args:
      engine: of `engine_flags`.
      names: of `methods`.
      prompts: see `Engine.generate`.
      on_forward: called with the method's name after every forward.
      **options: for `Engine.generate`.

    Returns:
      The generations and the summary (`summarise`) of each method, in the order of `names`.
    """
    generations, summaries = {}, {}
    # acceptmoe goes before the methods that take its mean set size for their budget.
    for name in sorted(names, key=lambda name: METHODS[name].budgeted):
        budget = budget_of(name, lambda: summaries["acceptmoe"]["eligible"])
        selector = selector_of(engine, METHODS[name], budget, ablation_flags.ablations())
        generations[name] = _decode_one(engine, name, selector, prompts, on_forward, options)
        statistics = [generation.statistics for generation in generations[name]]
        tokens = sum(len(generation.token_ids) for generation in generations[name])
        summaries[name] = summarise(statistics, tokens) | {"prompts": len(prompts)}
        if budget is not None:
            summaries[name]["budget"] = budget
        _say_fallback(name, summaries[name])
    return {n: generations[n] for n in names}, {n: summaries[n] for n in names}


def needs_acceptmoe(name: str) -> bool:
    """Whether a method's budget is acceptmoe's mean set size."""
    return METHODS[name].budgeted and _BUDGET.value is None


def budget_of(name: str, acceptmoe_mean: Callable[[], float | None]) -> int | None:
    """The experts a layer of a method; None for those that need no budget.

    Args:
      acceptmoe_mean: tells acceptmoe's mean set size, which is the budget without --budget. No
        set is smaller than top-k, so neither is the mean.

    Raises:
      UserError: if acceptmoe verified nothing, so that there is no mean.
    """
    if not METHODS[name].budgeted:
        return None
    if _BUDGET.value is not None:
        return _BUDGET.value
    mean = acceptmoe_mean()
    if mean is None:
        raise UserError(f"--budget is needed by {name}: acceptmoe verified nothing")
    return round(mean)


def generation_options(name: str) -> dict[str, Any]:
    """What the flags say about a method's answers, as arguments of `Engine.generate`."""
    return {
        "max_new_tokens": engine_flags.MAX_NEW_TOKENS.value,
        "sampling": sampling_flags.sampling(),
        "seed": sampling_flags.SEED.value,
        "batch_size": _BATCH_SIZE.value,
        "evict": _evict_config() if METHODS[name].evict else None,
        "audit_every": _AUDIT_EVERY.value,
        "max_disagreement": _MAX_DISAGREEMENT.value,
    } | engine_flags.chat_options()


def settings() -> dict[str, Any]:
    """For summaries: what the flags say about all methods."""
    return {
        "sampling": dataclasses.asdict(sampling_flags.sampling()),
        "seed": sampling_flags.SEED.value,
        "batch_size": _BATCH_SIZE.value,
        "audit_every": _AUDIT_EVERY.value,
        "max_disagreement": _MAX_DISAGREEMENT.value,
        "ablations": ablation_flags.ablations(),
    }


def in_words() -> str:
    """For titles: how tokens are drawn and how many prompts decode at a time, where that is not
    greedily and one; and the ablations."""
    chosen = sampling_flags.sampling()
    parts = []
    if not chosen.greedy:
        parts.append(f"temperature {chosen.temperature:g}, top-k {chosen.top_k or 'all'}, ")
        parts[-1] += f"top-p {chosen.top_p:g}, seed {sampling_flags.SEED.value}"
    if _BATCH_SIZE.value > 1:
        parts.append(f"{_BATCH_SIZE.value} prompts at a time")
    parts.extend(f"{name} = {value}" for name, value in ablation_flags.ablations().items())
    return "".join(f"; {part}" for part in parts)


def _say_fallback(name: str, summary: dict[str, Any]) -> None:
    if summary["fallback_share"]:
        print(
            f"{name} passed --max_disagreement={_MAX_DISAGREEMENT.value}: "
            f"{summary['fallback_share']:.0%} of its verifications ran natively instead",
            file=sys.stderr,
        )


def _decode_one(engine, name, selector, prompts, on_forward, options) -> list[Generation]:
    with reporting.progress("{task.fields[tokens]} tokens") as bar:
        task = bar.add_task(name, total=len(prompts), tokens=0)
        emitted = 0

        def on_tokens(index: int, new: tuple[int, ...]) -> None:
            nonlocal emitted
            emitted += len(new)
            bar.update(task, completed=index, tokens=emitted)
            if on_forward is not None:
                on_forward(name)

        return engine.generate(
            prompts,
            selector=selector,
            on_tokens=on_tokens,
            **generation_options(name),
            **options,
        )


def _evict_config() -> EvictConfig:
    try:
        lengths = tuple(map(int, _EVICT_LENGTHS.value))
    except ValueError:
        raise UserError(
            f"--evict_lengths holds numbers of rows, not {','.join(_EVICT_LENGTHS.value)}"
        ) from None
    return EvictConfig(lengths)
