"""The flags that every program with an engine shares, and the engine they ask for."""

from typing import Any

from absl import flags

from acceptmoe_jax.runtime.engine import Engine
from acceptmoe_jax.speculation import TreeConfig

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
_NODES = flags.DEFINE_integer("draft_nodes", 64, "Nodes of the draft tree, the root counted.")


def load_engine(commitment: str | None = None, use_commitment: bool = True) -> Engine:
    """The engine of the flags; see `Engine.from_pretrained` for the arguments and errors."""
    return Engine.from_pretrained(
        TARGET.value,
        DRAFT.value,
        commitment=commitment,
        use_commitment=use_commitment,
        dtype=DTYPE.value,
        max_length=_MAX_LENGTH.value,
        tree=TreeConfig(_STEPS.value, _TOP_K.value, _NODES.value),
    )


def chat_options() -> dict[str, Any]:
    """What the flags say about chats, as arguments of `Engine.generate` and `Engine.encode`."""
    variables = {"reasoning_effort": _REASONING_EFFORT.value}
    given = {name: value for name, value in variables.items() if value is not None}
    return {"chat": _CHAT.value, "chat_variables": given}
