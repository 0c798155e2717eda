"""The flags of a target with its head, and the engine they ask for."""

from absl import flags

from acceptmoe_jax.runtime.engine import Engine
from experiments import engine_flags

TARGET = flags.DEFINE_string("target", None, "Directory or hub id of the target.", required=True)
DRAFT = flags.DEFINE_string("draft", None, "Directory or hub id of its EAGLE-3 head.")


def load_engine(
    commitment: str | None = None,
    use_commitment: bool = True,
    default_slot_share: float | None = None,
) -> Engine:
    """The engine of the flags; see `engine_flags.load_engine`."""
    return engine_flags.load_engine(
        TARGET.value, DRAFT.value, commitment, use_commitment, default_slot_share
    )
