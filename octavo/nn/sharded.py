"""Parameters and modules that an engine has sharded: the local part of a tensor, and the class beneath an engine's.

FSDP2 replaces each Parameter by a DTensor and gives each module that is a unit a subclass of its class. DeepSpeed's
ZeRO-3 keeps the Parameter and empties it. Code that compares classes, or that reads a tensor's storage, asks here.
"""

import math
import os
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
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
    if not isinstance(tensor, DTensor):
        return tensor
    with nullcontext() if tensor.requires_grad else torch.no_grad():  # with it, a view, which low-bit states take badly
        return tensor.to_local()


def placed_like(values: Tensor, example: Tensor) -> Tensor:
    """The tensor whose local part is `values`, distributed as `example` is; `values` themselves if that is a whole one.

    `values` stay on their device, also where that is not the mesh's: host memory, say.
    """
    if not isinstance(example, DTensor):
        return values
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(example.shape, example.stride(), values.dtype)
    spec = DTensorSpec(example.device_mesh, tuple(example.placements), tensor_meta=meta)
    return DTensor(values, spec, requires_grad=False)


def place_of(tensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor, by dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def first_index(tensor: Tensor) -> int:
    """The index of this rank's first element in the whole tensor, laid out in rows; 0 for a whole one."""
    if not isinstance(tensor, DTensor) or not local(tensor.detach()).numel():
        return 0
    starts = (place.start for place in place_of(tensor))
    return sum(start * math.prod(tensor.shape[i + 1 :]) for i, start in enumerate(starts))


def sizes_of_shards(tensor: Tensor) -> set[int]:
    """The numbers of elements that ranks may hold: where they do not divide a dimension, more than one."""
    lengths = [{length} for length in tensor.shape]
    if isinstance(tensor, DTensor):
        for dimension, placement in enumerate(tensor.placements):
            at: int | None = getattr(placement, "dim", None)  # of those that shard
            if at is not None:
                parts = tensor.device_mesh.size(dimension)
                lengths[at] = {part for length in lengths[at] for part in _chunks(length, parts)}
    sizes = {1}
    for several in lengths:
        sizes = {size * length for size in sizes for length in several}
    return sizes


def _chunks(length: int, parts: int) -> set[int]:
    each = -(-length // parts)
    return {max(0, min(each, length - i * each)) for i in range(parts)}


def refuse_fsdp1(what: str, model: torch.nn.Module) -> None:
    """Refuse a model in FSDP1: each rank has flat parts of plain Parameters there, which look whole."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            f"{what} with FullyShardedDataParallel (FSDP1): this rank's parts of the parameters would be taken for "
            "all of them; shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )


def part_in_zero(parameter: Tensor) -> Tensor | None:
    """This rank's part of a Parameter that ZeRO-3 has emptied, flat; None of any other tensor."""
    part: Tensor | None = getattr(parameter, "ds_tensor", None)
    return part if part is not None and parameter.numel() == 0 else None


def whole_numel(parameter: Tensor) -> int:
    """The number of elements of a Parameter, also of one that ZeRO-3 has emptied."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


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
    """The class of a unit of class `kind`, if it had been of class `cls` before."""
    over = kind.__mro__[: kind.__mro__.index(FSDPModule)]
    body = {name: value for each in reversed(over) for name, value in vars(each).items() if name == "__deepcopy__"}
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), body | {"__module__": kind.__module__})


def forget_uncalled(model: torch.nn.Module) -> None:
    """Have units of FSDP2 whose modules were not all called gather their weights again in the next forward.

    torch does so after a backward, and since 2.13 after every forward.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            getattr(module._get_fsdp_state(), "_modules_to_run_forward", set()).clear()
