"""The flags that every program with an engine shares, and the engine they ask for."""

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

TARGET = flags.DEFINE_string("target", None, "Directory or hub id of the target.", required=True)
DRAFT = flags.DEFINE_string("draft", None, "Directory or hub id of its EAGLE-3 head.")
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
    commitment: str | None = None,
    use_commitment: bool = True,
    default_slot_share: float | None = None,
) -> Engine:
    """The engine of the flags; see `Engine.from_pretrained` for the arguments and errors.

    Args:
      default_slot_share: the share of a layer's experts that --expert_slots is by default.
    """
    engine = Engine.from_pretrained(
        TARGET.value,
        DRAFT.value,
        commitment=commitment,
        use_commitment=use_commitment,
        dtype=DTYPE.value,
        max_length=_MAX_LENGTH.value,
        tree=TreeConfig(_STEPS.value, _TOP_K.value, _NODES.value),
        kernels=_KERNELS.value,
        offload=_offload_config(default_slot_share),
    )
    if _PER_NODE.value and engine.commitment is not None:
        engine.commitment = engine.commitment.with_per_node(True)
    return engine


def _offload_config(default_share: float | None) -> OffloadConfig | None:
    """What the flags say about experts in host memory."""
    slots = _EXPERT_SLOTS.value
    if slots is None and default_share is not None:
        checkpoint = Checkpoint.open(resolve_directory(TARGET.value))
        config = target_config(checkpoint.config, checkpoint.config_file)
        slots = max(config.top_k, round(default_share * config.num_experts))
    try:
        link = Link(_LINK_GBPS.value)
    except ValueError as error:
        raise UserError(f"--link_gbps: {error}") from None
    if slots is None:
        if link.simulated:
            raise UserError("--link_gbps is of use with --expert_slots only")
        return None
    return OffloadConfig(slots, _EVICTION.value, link, _KEEP_RESIDENCY.value)


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
    where = f"{reporting.device_description()}, {DTYPE.value}"
    if engine.offload is None:
        return where
    return f"{where}, {engine.offload.slots} slots a layer, link: {engine.offload.link}"


def chat_options() -> dict[str, Any]:
    """What the flags say about chats, as arguments of `Engine.generate` and `Engine.encode`."""
    variables = {"reasoning_effort": _REASONING_EFFORT.value}
    given = {name: value for name, value in variables.items() if value is not None}
    return {"chat": _CHAT.value, "chat_variables": given}
