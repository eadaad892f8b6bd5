"""The products of fused decoders: linears with one input as one product, and a gated MLP as one function.

Weights are trained (`FP8Linear`), or frozen in FP8 with or without PEFT's adapters around them. A function returns None
where the modules have to be called one by one: they are watched from outside (`hooks.py`), they are not all of one
kind, or their weights are on the meta device, and only the module itself knows what to do about that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import activation_of, base_of
from octavo.nn import mlp_function
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import why_no_group
from octavo.nn.linear import FP8Linear
from octavo.nn.linear_function import linear
from octavo.numerics.norm import Norm
from octavo.ops.adapters import Adapter, Adapters
from octavo.ops.mlp import MLPSpec


def linear_group(members: Sequence[Any], x: Tensor, norm: Norm | None = None) -> Tensor | None:
    """The outputs of linears with one input, side by side.

    `norm`: x has yet to go through it.
    """
    if x.numel() == 0:
        return None
    if all(type(member) is FP8Linear for member in members):
        return _trained_group(members, x, norm)
    bases = [base_of(member) for member in members]
    if not all(isinstance(base, FP8FrozenLinear) for base in bases) or why_no_group(bases):
        return None
    adapters = _adapters_of(members)
    return None if adapters is None else frozen_product(x, bases, adapters, norm=norm)


def gated_mlp(mlp: Any, x: Tensor, norm: Norm | None = None, *, residual: bool = False) -> Tensor | None:
    """The output of a gated MLP.

    `norm`: x has yet to go through it. `residual`: x, as it is before that, is added to the output.
    """
    activation = activation_of(mlp)
    if x.numel() == 0 or activation is None or is_hooked(mlp.act_fn):
        return None
    members = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if all(type(member) is FP8Linear for member in members):
        y = _trained_mlp(*members, x, activation, norm)
        return x + y if residual and y is not None else y
    return _frozen_mlp(*members, x, activation, norm, residual)


def _trained_group(members: Sequence[Any], x: Tensor, norm: Norm | None) -> Tensor | None:
    if not _share_scales(members):
        return None
    biases = [member.bias for member in members]
    bias = None if biases[0] is None else torch.cat(biases)
    first, *others = members
    return linear(x, first.as_weight(*others), first.spec(x), first.states, bias=bias, norm=norm)


def _trained_mlp(gate: Any, up: Any, down: Any, x: Tensor, activation: str, norm: Norm | None) -> Tensor | None:
    if is_hooked(down) or not _share_scales((gate, up)):
        return None
    spec = MLPSpec(gate.spec(x), activation, saves_fp8=gate.config.activations == "fp8")
    return mlp_function.gated_mlp(x, gate.as_weight(up), down.as_weight(), spec, gate.states, down.states, norm=norm)


def _share_scales(members: Sequence[Any]) -> bool:
    """Whether trained linears can be one product: with one scaling state, and none to be called by itself."""
    return not is_hooked(*members) and all(member.row_x is members[0].row_x for member in members)


def frozen_product(
    x: Tensor,
    bases: Sequence[FP8FrozenLinear],
    adapters: Adapters,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The outputs of frozen linears side by side, with adapters. `residual`: is added to them."""
    one, *others = bases
    bias = one.bias if not others or one.bias is None else torch.cat([base.bias for base in bases])
    return linear(
        x, one.as_weight(*others), one.spec(x), one.states, bias=bias, adapters=adapters, norm=norm, residual=residual,
        x_is_saved=all(base.input_is_kept for base in bases),
    )  # fmt: skip


def _frozen_mlp(
    gate: Any, up: Any, down: Any, x: Tensor, activation: str, norm: Norm | None, residual: bool
) -> Tensor | None:
    if why_no_frozen_mlp(gate, up, down):
        return None
    adapters, adapters_down = _adapters_of((gate, up)), _adapters_of((down,))
    if adapters is None or adapters_down is None:
        return None
    gate, up, down = (base_of(member) for member in (gate, up, down))
    return mlp_function.gated_mlp(
        x, gate.as_weight(up), down.as_weight(), MLPSpec(gate.spec(x), activation), gate.states, down.states,
        adapters=adapters, adapters_down=adapters_down, norm=norm, residual=residual,
    )  # fmt: skip


def why_no_frozen_mlp(gate: Any, up: Any, down: Any) -> str:
    """Why a frozen gated MLP cannot be one function, whatever its adapters are; empty if it can."""
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


def adds_residual(module: Any) -> bool:
    """Whether this linear has adapters, and adds a `residual` that it is given to its output."""
    return hasattr(module, "fusible") and not is_hooked(module) and module.fusible() is not None


def _adapters_of(members: Sequence[Any]) -> Adapters | None:
    """The active adapters of linears side by side; None if one of them has to be called by itself."""
    adapters: list[Adapter] = []
    matrices: list[tuple[Tensor, Tensor]] = []
    start = 0
    for member in members:
        base = base_of(member)
        end = start + base.out_features
        if is_hooked(member, base) or base.weight.is_meta:
            return None
        if member is not base:
            names = member.fusible()
            if names is None:
                return None
            adapters += [Adapter(start, end, float(member.scaling[name])) for name in names]
            matrices += [member.matrices(name) for name in names]
        start = end
    return Adapters(tuple(adapters), tuple(a for a, _ in matrices), tuple(b for _, b in matrices))
