"""The flags of how engines run, whatever their models, and engines that run so."""

import dataclasses
from typing import Any

from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.families import target_config
from acceptmoe_jax.offload import EVICTION_POLICIES
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.offload.transfers import Link
from acceptmoe_jax.runtime.engine import Engine
from acceptmoe_jax.speculation import TreeConfig
from acceptmoe_jax.weights.checkpoint import Checkpoint, resolve_directory
from pallas_kernels.implementations import KERNELS

DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Of weights and caches.")
_CHAT = flags.DEFINE_bool("chat", None, "Use the chat template; default: if the target has one.")
_REASONING_EFFORT = flags.DEFINE_enum(
    "reasoning_effort",
    None,
    ["low", "medium", "high"],
    "For chat templates that know it, such as GPT-OSS's; default: the template's own.",
)
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Limit for each answer.")
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length", None, "Longest prompt plus answer, in tokens; default: the model's, at most 4096."
)
_STEPS = flags.DEFINE_integer("draft_steps", 5, "Depth of the draft tree.")
_TOP_K = flags.DEFINE_integer("draft_top_k", 10, "Beams a level, and children a beam.")
_KERNELS = flags.DEFINE_enum(
    "kernels",
    "auto",
    ["auto", *KERNELS],
    "Pallas kernels for NVIDIA GPUs, or plain JAX (xla); auto chooses by the device.",
)
_EXPERT_SLOTS = flags.DEFINE_integer(
    "expert_slots", None, "Experts a layer on the device, the rest in host memory; default: all."
)
_EVICTION = flags.DEFINE_enum(
    "eviction", "lru", list(EVICTION_POLICIES), "With --expert_slots: which expert leaves."
)
_LINK_GBPS = flags.DEFINE_float(
    "link_gbps",
    None,
    "With --expert_slots: simulate a link of so many 1e9 bytes a second on top of the real one.",
)
_KEEP_RESIDENCY = flags.DEFINE_bool(
    "keep_residency",
    False,
    "With --expert_slots: a prompt begins with the experts that the one before left.",
)
_PER_NODE = flags.DEFINE_bool(
    "per_node_phat", False, "Commitment probabilities of a node, not of a depth's position."
)
_NODES = flags.DEFINE_integer("draft_nodes", 64, "Nodes of the draft tree, the root counted.")


def load_engine(
    target: str,
    draft: str | None,
    commitment: str | None = None,
    use_commitment: bool = True,
    default_slot_share: float | None = None,
) -> Engine:
    """An engine that runs as the flags say; see `Engine.from_pretrained`.

    Args:
      target, draft: directories or hub ids.
      commitment, use_commitment: where the commitment table is, and whether to look for one.
      default_slot_share: the share of a layer's experts that --expert_slots is by default.
    """
    engine = Engine.from_pretrained(
        target,
        draft,
        commitment=commitment,
        use_commitment=use_commitment,
        dtype=DTYPE.value,
        max_length=_MAX_LENGTH.value,
        tree=TreeConfig(_STEPS.value, _TOP_K.value, _NODES.value),
        kernels=_KERNELS.value,
        offload=offload_config(_default_slots(target, default_slot_share)),
    )
    if _PER_NODE.value and engine.commitment is not None:
        engine.commitment = engine.commitment.with_per_node(True)
    return engine


def offload_config(default_slots: int | None = None) -> OffloadConfig | None:
    """What the flags say about experts in host memory.

    Args:
      default_slots: what --expert_slots is by default.

    Raises:
      UserError: naming the flag.
    """
    slots = default_slots if _EXPERT_SLOTS.value is None else _EXPERT_SLOTS.value
    try:
        link = Link(_LINK_GBPS.value)
    except ValueError as error:
        raise UserError(f"--link_gbps: {error}") from None
    if slots is None:
        if link.simulated:
            raise UserError("--link_gbps is of use with --expert_slots only")
        return None
    return OffloadConfig(slots, _EVICTION.value, link, _KEEP_RESIDENCY.value)


def _default_slots(target: str, share: float | None) -> int | None:
    """So many slots as are this share of the target's experts."""
    if share is None or _EXPERT_SLOTS.value is not None:
        return None
    checkpoint = Checkpoint.open(resolve_directory(target))
    config = target_config(checkpoint.config, checkpoint.config_file)
    return max(config.top_k, round(share * config.num_experts))


def settings() -> dict[str, Any]:
    """What answers and times depend on, as JSON: what the flags say, and the device."""
    offload = offload_config()
    tree = TreeConfig(_STEPS.value, _TOP_K.value, _NODES.value)
    return {
        "device": reporting.device_description(),
        "dtype": DTYPE.value,
        "kernels": _KERNELS.value,
        "tree": dataclasses.asdict(tree),
        "per_node_phat": _PER_NODE.value,
        "max_new_tokens": MAX_NEW_TOKENS.value,
        "reasoning_effort": _REASONING_EFFORT.value,
        "offload": None if offload is None else dataclasses.asdict(offload),
    }


def offload_facts(engine: Engine) -> dict[str, Any]:
    """For summaries: slots and link of an engine whose experts are in host memory, else nothing."""
    config = engine.offload
    if config is None:
        return {}
    return {
        "slots": config.slots,
        "experts": engine.model.setup.target.num_experts,
        "eviction": config.eviction,
        "link": str(config.link),
        "link_simulated": config.link.simulated,
    }


def measured_on(engine: Engine) -> str:
    """For titles: device, dtype and, where experts are offloaded, slots and link."""
    return conditions(engine.offload)


def conditions(offload: OffloadConfig | None) -> str:
    """See `measured_on`; of engines that offload so."""
    where = f"{reporting.device_description()}, {DTYPE.value}"
    if offload is None:
        return where
    return f"{where}, {offload.slots} slots a layer, link: {offload.link}"


def chat_options() -> dict[str, Any]:
    """What the flags say about chats, as arguments of `Engine.generate` and `Engine.encode`."""
    variables = {"reasoning_effort": _REASONING_EFFORT.value}
    given = {name: value for name, value in variables.items() if value is not None}
    return {"chat": _CHAT.value, "chat_variables": given}
