"""Programs that are compiled when first needed, with the time that this takes kept apart."""

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax


class CompiledPrograms:
    """Compiled programs by key.

    Attributes:
      seconds: spent compiling, in all.
    """

    def __init__(self):
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._programs)

    def run(
        self, key: Hashable, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        """Calls the program of `key`; `function` is what is compiled if there is none yet.

        Args:
          key: stands for the function with what is static in it, and for the shapes of `args`.
          donate: places of the arguments that are consumed.
        """
        program = self._programs.get(key)
        if program is None:
            begin = time.perf_counter()
            program = self.compile(key, function, args, donate)
            self._programs[key] = program
            self.seconds += time.perf_counter() - begin
        return program(*args)

    def compile(
        self, key: Hashable, function: Callable[..., Any], args: tuple, donate: tuple[int, ...]
    ) -> Callable[..., Any]:
        """The program that `run` keeps under `key`."""
        del key
        return jax.jit(function, donate_argnums=donate).lower(*args).compile()
