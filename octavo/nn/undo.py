"""Undoing what was changed on modules: a change that fails half-way, and a class that was swapped for a fused one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_INNER = ("_parameters", "_buffers", "_modules")


class Fused(nn.Module):
    """Base of classes that a module is given in place of its own to run fused; `octavo.restore` calls `unfuse`."""

    def unfuse(self) -> None:
        """Give the module its own class back."""
        raise NotImplementedError


@contextmanager
def all_or_nothing(*models: nn.Module) -> Iterator[None]:
    """Restore classes, attributes, Parameters and children of all modules if the block raises."""
    before = [_Before(module) for module in dict.fromkeys(module for model in models for module in model.modules())]
    try:
        yield
    except BaseException:
        for module in before:
            module.bring_back()
        raise


class _Before:
    """Snapshot of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.cls = type(module)
        self.attributes = dict(module.__dict__)
        self.inner = {name: dict(module.__dict__[name]) for name in _INNER}
        self.config: Any = module.__dict__.get("config")
        self.attention = getattr(self.config, "_attn_implementation", None)  # of transformers' configurations

    def bring_back(self) -> None:
        self.module.__class__ = self.cls
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for name, content in self.inner.items():
            self.module.__dict__[name].clear()
            self.module.__dict__[name].update(content)
        if getattr(self.config, "_attn_implementation", None) != self.attention:
            self.config._attn_implementation = self.attention
