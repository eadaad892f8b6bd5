"""Changing a module of another library when it is imported, which may be never.

Importing TRL's trainers of reinforcement learning imports vLLM, where it is installed, and that takes 20 seconds. So
their classes are changed when a script imports them, before or after a model is loaded.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change(module)` for the module of this name: now, if it is imported already, or when it is."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder:
    """Finds one module as the other finders do, once, and has it changed after it was executed."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.change(module)

            loader.exec_module = exec_module
        return spec
