"""The flags of how tokens are drawn, and the seed."""

from absl import flags

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.speculation import SamplingConfig

_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of the target's draws; 0 is greedy.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Draw from the k most probable tokens only.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from the smallest set of this probability only.")
SEED = flags.DEFINE_integer("seed", 0, "Of draws, and of a program's choice of prompts.")


def sampling() -> SamplingConfig:
    """What the flags say.

    Raises:
      UserError: naming the flag.
    """
    try:
        return SamplingConfig(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    except ValueError as error:
        raise UserError(f"--{error}") from None
