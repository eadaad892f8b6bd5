"""Groups of linears frozen in FP8, with or without PEFT's adapters around them.

PEFT is not imported here: a layer with adapters is known by what it offers (`fusible`, see `hf/lora.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.hf.hooks import is_hooked
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import why_no_group
from octavo.nn.linear_function import linear
from octavo.nn.mlp_function import gated_mlp
from octavo.numerics.norm import Norm
from octavo.ops.adapters import Adapter, Adapters
from octavo.ops.mlp import MLPSpec


def base_of(module: Any) -> Any:
    """The linear itself, without adapters."""
    return module.base_layer if hasattr(module, "fusible") else module


def adds_residual(module: Any) -> bool:
    """Whether it adds a `residual`, where it is given one, to what it computes."""
    return hasattr(module, "fusible") and not is_hooked(module) and module.fusible() is not None


def product_of_group(members: Sequence[Any], x: Tensor, norm: Norm | None = None) -> Tensor | None:
    """Their outputs side by side, with those adapters that are active; None if they have to be computed one by one.

    `norm`: x has yet to go through it.
    """
    bases = [base_of(member) for member in members]
    if not all(isinstance(base, FP8FrozenLinear) for base in bases) or why_no_group(bases):
        return None
    adapters = _adapters_of(members)
    if adapters is None:
        return None
    bias = None if bases[0].bias is None else torch.cat([base.bias for base in bases])
    one, *others = bases
    return linear(x, one.as_weight(*others), one.spec(x), one.states, bias=bias, norm=norm, adapters=adapters)


def why_no_mlp(gate: Any, up: Any, down: Any) -> str:
    """Why a gated MLP cannot be one function, whatever its adapters are; empty if it can."""
    bases = [base_of(member) for member in (gate, up, down)]
    if not all(isinstance(base, FP8FrozenLinear) for base in bases):
        return "not all of it is in FP8"
    if len({base.in_fp8 for base in bases}) > 1:
        return "only some of its products are in FP8"
    if any(base.bias is not None for base in bases):
        return "its linears have biases"
    if bases[0].in_fp8 and (bases[2].granularity != bases[0].granularity or bases[2].recipe != bases[0].recipe):
        return "down is quantised differently"
    return why_no_group(bases[:2])


def mlp(
    gate: Any, up: Any, down: Any, x: Tensor, activation: str, norm: Norm | None = None, *, residual: bool = False
) -> Tensor | None:
    """A gated MLP in one function; None if its linears have to be computed one by one.

    `norm`: as above. `residual`: x, as it is before that, is added to what comes out.
    """
    if why_no_mlp(gate, up, down):
        return None
    adapters, adapters_down = _adapters_of((gate, up)), _adapters_of((down,))
    if adapters is None or adapters_down is None:
        return None
    gate, up, down = (base_of(member) for member in (gate, up, down))
    how: dict[str, Any] = {"adapters": adapters, "adapters_down": adapters_down, "norm": norm, "residual": residual}
    mlp = MLPSpec(gate.spec(x), activation)
    return gated_mlp(x, gate.as_weight(up), down.as_weight(), mlp, gate.states, down.states, **how)


def _adapters_of(members: Sequence[Any]) -> Adapters | None:
    """The active adapters of linears side by side; None if one of them has to be computed by itself.

    Such as one whose weight is on the meta device: only the module itself knows what to do about that.
    """
    places: list[Adapter] = []
    matrices: list[tuple[Tensor, Tensor]] = []
    first = 0
    for member in members:
        base = base_of(member)
        last = first + base.out_features
        if is_hooked(member, base) or base.weight.is_meta:
            return None
        if member is not base:
            names = member.fusible()
            if names is None:
                return None
            places += [Adapter(first, last, float(member.scaling[name])) for name in names]
            matrices += [member.matrices(name) for name in names]
        first = last
    return Adapters(tuple(places), tuple(a for a, _ in matrices), tuple(b for _, b in matrices))
