"""FP8-only weights of trained linears: one byte an element, and no high-precision copy beside it.

Their FP32 masters are elsewhere (`octavo.optim.offload_master`: in host memory), and their optimiser writes the FP8
values they round to (`groups.py`). The Parameter keeps its identity, its shape, its dtype and its gradient, but no
memory: it reads as NaN everywhere, and cannot be written to. `full_precision` returns its values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_MARK = "_octavo_held"


@dataclass(eq=False)
class OffloadedWeight:
    """The FP8-only weight of one linear, and the way to its master."""

    data: Tensor  # [N, K] in FP8, a part of the group's
    scale: Tensor
    group_scale: Tensor  # of all weights that it shares a product with
    read: Callable[[], Tensor]  # the master, in FP32
    load: Callable[[Tensor], None]  # another master

    def replace_values_of(self, parameter: Tensor) -> None:
        """Free the memory of a Parameter: it becomes a view of one NaN.

        Reading a storage without memory, such as FSDP leaves, would end the process.
        """
        nan = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
        parameter.data = nan.expand(parameter.shape)
        setattr(parameter, _MARK, self)

    def restore_values_of(self, parameter: Tensor) -> None:
        """Give a Parameter the values of its master, rounded to its dtype."""
        parameter.data = self.read().to(parameter.device, parameter.dtype, copy=True)
        delattr(parameter, _MARK)


def offloaded_of(parameter: Tensor) -> OffloadedWeight | None:
    """Return the FP8-only weight in the place of a Parameter; None if that has values of its own."""
    weight: OffloadedWeight | None = getattr(parameter, _MARK, None)
    return weight


def full_precision(parameter: Tensor) -> Tensor:
    """Return the values of a Parameter: its own, or those of its master if it is FP8-only."""
    weight = offloaded_of(parameter)
    return parameter if weight is None else weight.read()
