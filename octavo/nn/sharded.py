"""Parameters and modules that an engine has sharded: the local part of a tensor, and the class beneath an engine's.

FSDP2 replaces each Parameter by a DTensor and gives each module that is a unit a subclass of its class. DeepSpeed's
ZeRO-3 keeps the Parameter and empties it. Code that compares classes, or that reads a tensor's storage, asks here.
"""

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor


def ranks() -> int:
    """The number of ranks in the default process group; 1 where there is none."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: all of one that is not a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of a module, beneath the subclass that FSDP2 gives to a unit."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) else kind
