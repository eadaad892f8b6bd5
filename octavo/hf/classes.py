"""A module that computes otherwise: the same object, of a subclass with another forward, which pickles and copies.

The subclass is made for the class that the module had, and has its name.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

from octavo.hf import attention, frozen
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import put_together, why_no_group

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
ORIGINAL = "_octavo_original"  # where a module has the class that it had


def take_class(module: Any, forward: Callable[..., Any]) -> None:
    original: Any = type(module)
    module.__dict__[ORIGINAL] = original
    module.__class__ = _subclass(original, forward)


@cache
def _subclass(cls: Any, forward: Callable[..., Any]) -> type[nn.Module]:
    """With the name of its parent, which ends up in saved configurations, and its signature, which trainers read."""

    @wraps(cls.forward)
    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, cls.forward, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _unpickled, (cls, forward), *cls.__reduce_ex__(self, protocol)[2:]  # by its name there is the parent

    def set_state(self: Any, state: Any) -> None:
        cls.__setstate__(self, state)
        if getattr(getattr(self, "config", None), "_attn_implementation", None) == attention.NAME:
            attention.register()  # it may have been saved by another process
        _put_group_together(self)

    body = {"forward": fused, "__reduce_ex__": reduce, "__setstate__": set_state}
    return type(cls.__name__, (cls,), body | {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _unpickled(cls: Any, forward: Callable[..., Any]) -> Any:
    """An empty module of the subclass, for `pickle` and `copy`."""
    fused = _subclass(cls, forward)
    return fused.__new__(fused)


def _put_group_together(module: nn.Module) -> None:
    """Copies of frozen weights that lay side by side: each has come with its own part alone."""
    for names in (QKV, GATE_UP):
        members = [frozen.base_of(getattr(module, name, None)) for name in names]
        if all(isinstance(member, FP8FrozenLinear) for member in members) and not why_no_group(members):
            put_together(members)
