"""Weights of trained linears that are held in FP8 only: one byte an element, and no high-precision copy beside it.

Whoever trains them has their FP32 masters elsewhere (`octavo.optim.offload_master`: in host memory), and writes what
they round to (`held_group.py`). The Parameter keeps its identity, its shape, its dtype and its gradient, but no memory:
whoever reads it finds NaN everywhere, and cannot write to it. `full_precision` finds its values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_MARK = "_octavo_held"


@dataclass(eq=False)
class HeldWeight:
    """The weight of one linear, and the way to its master."""

    data: Tensor  # [N, K] in FP8, a part of the group's
    scale: Tensor
    group_scale: Tensor  # of all weights that it shares a product with
    read: Callable[[], Tensor]  # the master, in FP32
    load: Callable[[Tensor], None]  # another master

    def replace_values_of(self, parameter: Tensor) -> None:
        """By one NaN, seen everywhere. To read a storage without memory, such as FSDP leaves, ends the process."""
        nan = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
        parameter.data = nan.expand(parameter.shape)
        setattr(parameter, _MARK, self)

    def give_back(self, parameter: Tensor) -> None:
        """The values of the master, rounded to the Parameter's dtype."""
        parameter.data = self.read().to(parameter.device, parameter.dtype, copy=True)
        delattr(parameter, _MARK)


def held_of(parameter: Tensor) -> HeldWeight | None:
    """What a Parameter is held as; None if it has values of its own."""
    found: HeldWeight | None = getattr(parameter, _MARK, None)
    return found


def full_precision(parameter: Tensor) -> Tensor:
    """The values of a Parameter: its own, or those of its master if it is held in FP8."""
    held = held_of(parameter)
    return parameter if held is None else held.read()
