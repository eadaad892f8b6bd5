"""All of a change to modules, or nothing of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_INNER = ("_parameters", "_buffers", "_modules")


@contextmanager
def all_or_nothing(*models: nn.Module) -> Iterator[None]:
    """Whatever is raised inside leaves the models' modules as they were: classes, attributes, Parameters, children."""
    before = [_Before(module) for module in dict.fromkeys(module for model in models for module in model.modules())]
    try:
        yield
    except BaseException:
        for module in before:
            module.bring_back()
        raise


class _Before:
    """A module as it is now."""

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
