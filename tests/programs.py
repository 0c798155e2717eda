"""Programs as modules: for tests of what they hold, beside tests that run others in this process."""

import importlib
import types

from absl import flags


def imported(name: str) -> types.ModuleType:
    """The module `experiments.NAME`, none of whose flags are defined afterwards.

    Two programs may define the same flag, which absl refuses within one process.
    """
    before = {flag: flags.FLAGS[flag] for flag in flags.FLAGS}
    for flag in before:
        delattr(flags.FLAGS, flag)
    try:
        return importlib.import_module(f"experiments.{name}")
    finally:
        for flag in list(flags.FLAGS):
            delattr(flags.FLAGS, flag)
        for flag, holder in before.items():
            flags.FLAGS[flag] = holder
