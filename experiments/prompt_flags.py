"""The flags that choose prompts: a file's, or held-out tasks of the pocket families."""

from absl import flags

from acceptmoe_jax.pocket import families
from acceptmoe_jax.prompts import read_prompts
from acceptmoe_jax.runtime.engine import Prompt

_PROMPTS = flags.DEFINE_string("prompts", None, "A JSONL file of prompts; default: pocket tasks.")
_TASKS = flags.DEFINE_integer("tasks", 4, "Held-out pocket tasks of each family.", lower_bound=1)


def prompts() -> dict[str, Prompt]:
    """Prompts by id.

    Raises:
      UserError: naming the file, if it cannot be read.
    """
    if _PROMPTS.value is not None:
        return read_prompts(_PROMPTS.value, "--prompts")
    return {
        f"{family}/{index}": record.prompt
        for family in families.FAMILIES
        for index, record in enumerate(families.generate(family, "test", 0, _TASKS.value))
    }
