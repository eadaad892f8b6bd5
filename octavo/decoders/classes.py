"""A module with another forward: the same object, of a subclass made for the class that it had, under the same name.

It pickles and copies like its parent. `give_class_back` undoes it.
"""

import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

from octavo.decoders import attention
from octavo.decoders.match import GATE_UP, ORIGINAL, QKV, base_of
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import put_together, why_no_group
from octavo.nn.linear import change_class
from octavo.nn.sharded import plain_class, set_plain_class

INSTEAD = "octavo_instead"  # an argument of a fused module: what to compute in the place of its forward
HEAD = "_octavo_head"  # in a fused causal language model: its FP8 head, and that head's scaling state
CAUSAL = "_octavo_causal"  # in its decoder: an `Owner`, which knows the causal language model
PADDED = "_octavo_padded"  # in a fused causal language model: how many calls computed padding, by reason
UNFUSED = "_octavo_unfused"  # in it, too: how many calls with labels computed all logits, by reason


class Owner:
    """A weak reference to the module that a module belongs to. Copies and pickles of it refer to nothing.

    With a strong reference, a model that is deleted would wait for the garbage collector, and its memory with it.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    def __call__(self) -> Any:
        return None if self._module is None else self._module()

    def __reduce__(self) -> tuple[type["Owner"], tuple[()]]:
        return Owner, ()


def take_class(module: Any, forward: Callable[..., Any]) -> None:
    """Have a module compute `forward(module, original, ...)`, where `original` is the forward of its class.

    In the place of another such forward, if it has one: a model may be loaded fused, and then converted.
    """
    original: Any = module.__dict__.get(ORIGINAL, plain_class(module))
    module.__dict__[ORIGINAL] = original
    set_plain_class(module, _subclass(original, forward))


def give_class_back(module: nn.Module) -> bool:
    """Undo `take_class`. Returns whether there was anything to undo."""
    original = module.__dict__.pop(ORIGINAL, None)
    if original is not None:
        change_class(module, original)
        for name in (HEAD, PADDED, UNFUSED, CAUSAL):
            module.__dict__.pop(name, None)
    return original is not None


def is_fused(module: nn.Module) -> bool:
    return ORIGINAL in module.__dict__


@cache
def _subclass(cls: Any, forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass with its parent's name, which ends up in saved configurations, and signature, which trainers read."""

    @wraps(cls.forward)
    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        instead = kwargs.pop(INSTEAD, None)
        return forward(self, cls.forward, *args, **kwargs) if instead is None else instead(*args)

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _unpickled, (cls, forward), *cls.__reduce_ex__(self, protocol)[2:]  # by its name there is the parent

    def set_state(self: Any, state: Any) -> None:
        cls.__setstate__(self, state)
        if getattr(getattr(self, "config", None), "_attn_implementation", None) == attention.NAME:
            attention.register()  # it may have been saved by another process
        _put_group_together(self)
        own_decoder(self)

    body = {ORIGINAL: cls, "forward": fused, "__reduce_ex__": reduce, "__setstate__": set_state}
    return type(cls.__name__, (cls,), body | {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def own_decoder(model: Any) -> None:
    """Let the decoder of a fused causal language model know it."""
    decoder = model._modules.get("model")
    if HEAD in model.__dict__ and decoder is not None and is_fused(decoder):
        decoder.__dict__[CAUSAL] = Owner(model)


def _unpickled(cls: Any, forward: Callable[..., Any]) -> Any:
    """An empty module of the subclass, for `pickle` and `copy`."""
    fused = _subclass(cls, forward)
    return fused.__new__(fused)


def _put_group_together(module: nn.Module) -> None:
    """Put copies of frozen weights side by side again: each has come with its own part alone."""
    for names in (QKV, GATE_UP):
        members = [base_of(getattr(module, name, None)) for name in names]
        if all(isinstance(member, FP8FrozenLinear) for member in members) and not why_no_group(members):
            put_together(members)
