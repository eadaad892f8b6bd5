"""Two collectives on whole tensors, by the names that they have in this torch."""

from typing import Any

from torch import Tensor, distributed
from torch.distributed import ProcessGroup

# torch 2.13 gave them other names, and warns of the old ones.
_NEW_NAMES = "all_gather_single" in distributed.__dict__
_all_gather: Any = getattr(distributed, "all_gather_single" if _NEW_NAMES else "all_gather_into_tensor")
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single" if _NEW_NAMES else "reduce_scatter_tensor")


def all_gather(part: Tensor, group: ProcessGroup) -> Tensor:
    """The parts of all ranks, one below the other."""
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    _all_gather(whole, part.contiguous(), group=group)
    return whole


def reduce_scatter(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum over ranks; parts lie one below the other."""
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    _reduce_scatter(part, whole.contiguous(), group=group)
    return part
