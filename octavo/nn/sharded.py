"""Parameters and modules that an engine has sharded: the local part of a tensor, and the class beneath an engine's.

FSDP2 replaces each Parameter by a DTensor and gives each module that is a unit a subclass of its class. DeepSpeed's
ZeRO-3 keeps the Parameter and empties it. Code that compares classes, or that reads a tensor's storage, asks here.
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def ranks() -> int:
    """The number of ranks in the default process group; 1 where there is none."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def own_gpu() -> int:
    """The GPU of this process, which is made the current one: LOCAL_RANK's, unless another has been chosen already.

    A launcher that shows each process one GPU has chosen.
    """
    current, count = torch.cuda.current_device(), torch.cuda.device_count()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if current != 0 or count == 1:
        return current
    if rank >= count:
        raise ValueError(f"LOCAL_RANK={rank}: torch sees {count} GPUs here; start one process for each of them")
    torch.cuda.set_device(rank)
    return rank


def capture_error_mode() -> str:
    """The mode in which a CUDA graph is captured: with a process group, calls of NCCL's own thread are no mistake."""
    return "thread_local" if distributed.is_available() and distributed.is_initialized() else "global"


def may_be_freed() -> bool:
    """Whether an engine may free Parameters between forward and backward: DeepSpeed does, also on one rank."""
    return not torch.compiler.is_compiling() and distributed.is_available() and distributed.is_initialized()


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: all of one that is not a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of a module, beneath the subclass that FSDP2 gives to a unit."""
    kind = type(module)
    return kind.__mro__[kind.__mro__.index(FSDPModule) + 1] if issubclass(kind, FSDPModule) else kind


def set_plain_class(module: Any, cls: Any) -> None:
    """Let a module be of another class, beneath the subclass that FSDP2 may have given it."""
    kind: Any = type(module)
    module.__class__ = _unit(kind, cls) if issubclass(kind, FSDPModule) else cls


@cache
def _unit(kind: type, cls: type) -> type:
    """What `kind`, the class of a unit, would be if the unit had been of class `cls`."""
    over = kind.__mro__[: kind.__mro__.index(FSDPModule)]
    body = {name: value for each in reversed(over) for name, value in vars(each).items() if name == "__deepcopy__"}
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), body | {"__module__": kind.__module__})
