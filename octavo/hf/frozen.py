"""Groups of linears frozen in FP8, with or without PEFT's adapters around them.

PEFT is not imported here: a layer with adapters is known by what it offers (`fusible`, see `hf/lora.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.frozen_group import why_no_group
from octavo.nn.lora import Adapter, frozen_lora


def base_of(module: Any) -> Any:
    """The linear itself, without adapters."""
    return module.base_layer if hasattr(module, "fusible") else module


def product_of_group(members: Sequence[Any], x: Tensor) -> Tensor | None:
    """Their outputs side by side, with those adapters that are active; None if they have to be computed one by one."""
    bases = [base_of(member) for member in members]
    if not all(isinstance(base, FP8FrozenLinear) for base in bases) or why_no_group(bases):
        return None
    adapters: list[Adapter] = []
    matrices: list[tuple[Tensor, Tensor]] = []
    first = 0
    for member, base in zip(members, bases, strict=True):
        last = first + base.out_features
        if member is not base:
            names = member.fusible()
            if names is None:
                return None
            adapters += [Adapter(first, last, member.scaling[name]) for name in names]
            matrices += [member.matrices(name) for name in names]
        first = last
    bias = None if bases[0].bias is None else torch.cat([base.bias for base in bases])
    one = bases[0]
    weights = [base.quantized for base in bases]
    return frozen_lora(x, weights, bias, one.product(x), (one.row_x, one.row_g), adapters, matrices)
