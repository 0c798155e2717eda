"""Programs as modules, for tests of what they hold, beside tests that run another in-process."""

import importlib
import sys
import types

from absl import flags

import experiments


def imported(name: str) -> types.ModuleType:
    """The module `experiments.NAME`, as if nobody had imported it or what it imports for itself.

    Two programs may define the same flag, which absl refuses within one process.
    """
    before = _flags_of_programs()
    known = set(sys.modules)
    _undefine(before)
    try:
        return importlib.import_module(f"experiments.{name}")
    finally:
        _undefine(_flags_of_programs())
        for module in [module for module in sys.modules if module.startswith("experiments.")]:
            if module not in known:
                del sys.modules[module]
                delattr(experiments, module.removeprefix("experiments."))
        for module, flag in before:
            flags.FLAGS[flag.name] = flag
            flags.FLAGS.register_flag_by_module(module, flag)


def _flags_of_programs() -> list[tuple[str, flags.Flag]]:
    return [
        (module, flag)
        for module, defined in flags.FLAGS.flags_by_module_dict().items()
        if module.startswith("experiments.")
        for flag in defined
    ]


def _undefine(defined: list[tuple[str, flags.Flag]]) -> None:
    for _, flag in defined:
        delattr(flags.FLAGS, flag.name)
