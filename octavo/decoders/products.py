"""The products of fused decoders: linears with one input as one product, and a gated MLP as one function.

Weights are trained (`FP8Linear`), or frozen in FP8 with or without PEFT's adapters around them; `ops.weight.Weight`
knows the difference. A function returns None where the modules have to be called one by one: they are watched from
outside (`hooks.py`), they are not all of one kind, or their scales are not those of one weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import activation_of, base_of
from octavo.dist import parallel
from octavo.nn import mlp_function
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import why_no_group
from octavo.nn.linear import FP8Linear, LinearInFP8
from octavo.nn.linear_function import linear, linear_and_input
from octavo.numerics.norm import Norm
from octavo.ops.adapters import Adapter, Adapters
from octavo.ops.mlp import MLPSpec


def linear_group(members: Sequence[Any], x: Tensor) -> Tensor | None:
    """The outputs of linears with one input, side by side."""
    bases = [base_of(member) for member in members]
    if parallel.is_parallel(*bases):
        return parallel.linear_group(members, x)
    if x.numel() == 0 or not _are_one_product(bases):
        return None
    adapters = _adapters_of(members)
    if adapters is None:
        return None
    one, *others = bases
    return linear(
        x, one.as_weight(*others), one.spec(x), one.states, bias=_bias_of(bases), adapters=adapters,
        x_is_saved=all(base.input_is_saved for base in bases),
    )  # fmt: skip


def linear_group_after_norm(members: Sequence[Any], h: Tensor, norm: Norm) -> tuple[Tensor, Tensor] | None:
    """The outputs of linears whose input is norm(h), side by side, and h, to be used in the place of the given one."""
    bases = [base_of(member) for member in members]
    # The gradient of h by way of the norm is yet to be summed over ranks, where the products are parallel; h's is not.
    one_product = not parallel.is_parallel(*bases) and _are_one_product(bases)
    adapters = _adapters_of(members) if h.numel() and one_product else None
    if adapters is None:
        return None
    one, *others = bases
    weight, bias = one.as_weight(*others), _bias_of(bases)
    return linear_and_input(h, weight, one.spec(h), one.states, bias=bias, norm=norm, adapters=adapters)


def _bias_of(bases: Sequence[LinearInFP8]) -> Tensor | None:
    if len(bases) == 1 or bases[0].bias is None:
        return bases[0].bias
    return torch.cat([base.bias for base in bases])


def gated_mlp(mlp: Any, x: Tensor, norm: Norm | None = None, *, residual: bool = False) -> Tensor | None:
    """The output of a gated MLP.

    `norm`: x has yet to go through it. `residual`: x, as it is before that, is added to the output.
    """
    activation = activation_of(mlp)
    members = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    gate, up, down = (base_of(member) for member in members)
    if x.numel() == 0 or activation is None or is_hooked(mlp.act_fn):
        return None
    if parallel.is_parallel(gate, up, down):
        return None if norm is not None else parallel.gated_mlp(members, activation, x)
    if not _is_one_function(gate, up, down):
        return None
    adapters, adapters_down = _adapters_of(members[:2]), _adapters_of(members[2:])
    if adapters is None or adapters_down is None:
        return None
    trained = gate.is_trained
    spec = MLPSpec(gate.spec(x), activation, saves_fp8=trained and gate.config.activations == "fp8")
    y = mlp_function.gated_mlp(
        x, gate.as_weight(up), down.as_weight(), spec, gate.states, down.states, norm=norm, adapters=adapters,
        adapters_down=adapters_down, residual=residual and not trained,
    )  # fmt: skip
    return x + y if residual and trained else y


def _are_one_product(bases: Sequence[Any]) -> bool:
    """Whether linears can be one product: trained ones with one scaling state, or frozen ones whose scales fit."""
    if all(type(base) is FP8Linear for base in bases):
        return all(base.state_x is bases[0].state_x for base in bases)
    return _are_frozen(bases) and not why_no_group(bases)


def _is_one_function(gate: Any, up: Any, down: Any) -> bool:
    """Whether the linears of a gated MLP can be one function."""
    if all(type(base) is FP8Linear for base in (gate, up, down)):
        return _are_one_product((gate, up))
    return _are_frozen((gate, up, down)) and not why_no_frozen_mlp(gate, up, down)


def _are_frozen(bases: Sequence[Any]) -> bool:
    """Whether linears are frozen in FP8, and have values: on the meta device, only the module knows what to do."""
    return all(isinstance(base, FP8FrozenLinear) and not base.weight.is_meta for base in bases)


def why_no_frozen_mlp(gate: Any, up: Any, down: Any) -> str:
    """Why a frozen gated MLP cannot be one function, whatever its adapters are; empty if it can."""
    bases = [base_of(member) for member in (gate, up, down)]
    if not all(isinstance(base, FP8FrozenLinear) for base in bases):
        return "not all of it is in FP8"
    if len({(base.fp8_products, base.fp8_forward) for base in bases}) > 1:
        return "only some of its products are in FP8"
    if any(base.bias is not None for base in bases):
        return "its linears have biases"
    if bases[0].fp8_products and (bases[2].granularity != bases[0].granularity or bases[2].recipe != bases[0].recipe):
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
        if is_hooked(member, base):
            return None
        if member is not base:
            names = member.fusible()
            if names is None:
                return None
            adapters += [Adapter(start, end, float(member.scaling[name])) for name in names]
            matrices += [member.matrices(name) for name in names]
        start = end
    return Adapters(tuple(adapters), tuple(a for a, _ in matrices), tuple(b for _, b in matrices))
