"""Files of a model whose Parameters are shards (FSDP2): every rank calls, one layer at a time is whole, rank 0 writes.

    with whole_parameters(layer): ...           # collective: each rank has the layer whole, for the block
    tensors = kept(pairs, sharded)              # rank 0: copies in host memory, for a file; the others: nothing
    with written_by_first(sharded) as writes:   # the others wait, and raise if rank 0 could not write

None of these waits for another rank if the model is whole: rank 0 may be the only one that saves.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from octavo.dist.together import all_or_none, rank
from octavo.dist.whole import has_shards, whole
from octavo.nn.sharded import is_sharded, part_in_zero, refuse_fsdp1


def made_ready(model: nn.Module) -> bool:
    """Bring the Parameters of a model into the state in which they are saved; return whether they are shards."""
    refuse_fsdp1("saving", model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a root keeps what it gathered for a forward, in its policy's dtype
    emptied = next((name for name, p in model.named_parameters() if part_in_zero(p) is not None), None)
    if emptied is not None:
        raise ValueError(
            f"{emptied}: DeepSpeed's ZeRO-3 has emptied this Parameter; save on rank 0, within "
            "deepspeed.zero.GatheredParameters(list(model.parameters())) on all ranks"
        )
    return has_shards(model)


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Region in which the Parameters of a module, and of those in it, are whole; nothing changes if none is a shard."""
    shards: list[tuple[Any, str, Any]] = []
    try:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if is_sharded(parameter):
                    shards.append((owner, name, parameter))
                    owner._parameters[name] = whole(parameter)  # type: ignore[assignment]  # a tensor will do
        yield
    finally:
        for owner, name, parameter in shards:
            owner._parameters[name] = parameter


def kept(tensors: Iterable[tuple[str, Tensor]], sharded: bool) -> dict[str, Tensor]:
    """The tensors by name. Where gathering them is collective, rank 0 alone keeps them, in host memory.

    An error in keeping is raised when all are gathered: others would wait for a rank that has left.
    """
    if not sharded:
        return dict(tensors)
    mine: dict[str, Tensor] = {}
    failure: Exception | None = None
    for name, tensor in tensors:
        gathered = whole(tensor)
        if rank() == 0 and failure is None:
            try:
                mine[name] = alone(gathered).cpu()
            except (RuntimeError, MemoryError) as error:
                failure = error
                mine.clear()
    with all_or_none():
        if failure is not None:
            raise failure
    return mine


@contextmanager
def written_by_first(sharded: bool) -> Iterator[bool]:
    """Region in which this process writes, if it is given True. All ranks leave it together, or raise together."""
    if not sharded:
        yield True
        return
    with all_or_none():
        yield rank() == 0


def alone(value: Tensor) -> Tensor:
    """The tensor in a storage of its own: slices of a buffer, as groups and uneven shards have, are not for files."""
    if value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes:
        return value
    return value.clone(memory_format=torch.contiguous_format)
