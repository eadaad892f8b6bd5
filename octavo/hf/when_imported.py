"""Changing a module of another library when it is imported, which may be never.

Importing TRL's trainers of reinforcement learning imports vLLM, where it is installed, and that takes 20 seconds. So
their classes are changed when a script imports them, before or after a model is loaded.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def when_imported(name: str, change: Change) -> None:
    """Call `change(module)` for the module of this name: now, if it is imported already, and when it is."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.changes.setdefault(name, []).append(change)
    if name in sys.modules:
        change(sys.modules[name])


class _Finder(MetaPathFinder):
    """Finds modules as the other finders do, with a loader that changes them."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Change]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.changes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.changes[name])
        return spec


class _Loader(Loader):
    """Executes a module by its own loader, of which others may have the same one, and changes it."""

    def __init__(self, own: Any, changes: Sequence[Change]) -> None:
        self.own, self.changes = own, changes

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self.own.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        for change in self.changes:
            change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


_FINDER = _Finder()
