"""The products of fused decoders: linears with one input as one product, and a gated MLP as one function.

Weights are trained (`FP8Linear`), or frozen in FP8 with or without PEFT's adapters around them; `ops.weight.Weight`
knows the difference. A function returns None where the modules have to be called one by one: they are watched from
outside (`hooks.py`), they are not all of one kind, or their scales are not those of one weight.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.decoders.gathering import around
from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import activation_of, base_of, own_class
from octavo.dist import parallel
from octavo.nn import mlp_function
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import why_no_group
from octavo.nn.linear import FP8Linear, LinearInFP8
from octavo.nn.linear_function import linear, linear_and_input
from octavo.numerics.norm import Norm
from octavo.ops.adapters import Adapter, Adapters
from octavo.ops.mlp import MLPSpec

Names = Sequence[str]  # of adapters


def linear_group(members: Sequence[Any], x: Tensor) -> Tensor | None:
    """The outputs of linears with one input, side by side."""
    bases = [base_of(member) for member in members]
    if parallel.is_parallel(*bases):
        return parallel.linear_group(members, x)
    names = one_product(members, x)
    if names is None:
        return None
    one, *others = bases

    def product(x: Tensor) -> Tensor:
        return linear(
            x, one.as_weight(*others), one.spec(x), one.states, bias=_bias_of(bases),
            adapters=_adapters_of(members, names), x_is_saved=all(base.input_is_saved for base in bases),
        )  # fmt: skip

    return around(_holders(members, names), product, x)


def linear_group_after_norm(
    members: Sequence[Any], h: Tensor, norm: Norm, names: Sequence[Names]
) -> tuple[Tensor, Tensor]:
    """The outputs of linears whose input is norm(h), side by side, and h, to be used in the place of the given one.

    `names`: what `one_product` says of them.
    """
    one, *others = bases = [base_of(member) for member in members]

    def product(h: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias, adapters = one.as_weight(*others), _bias_of(bases), _adapters_of(members, names)
        return linear_and_input(h, weight, one.spec(h), one.states, bias=bias, norm=norm, adapters=adapters)

    return around(_holders(members, names), product, h)


def one_product(members: Sequence[Any], x: Tensor) -> list[Names] | None:
    """The active adapters of each of these linears with input x, if they can be one product; else None."""
    bases = [base_of(member) for member in members]
    # Where products are parallel, the gradient of a norm's input by way of the norm is yet to be summed over ranks.
    if x.numel() == 0 or parallel.is_parallel(*bases) or not _are_one_product(bases):
        return None
    return _active(members)


def _bias_of(bases: Sequence[LinearInFP8]) -> Tensor | None:
    if len(bases) == 1 or bases[0].bias is None:
        return bases[0].bias
    return torch.cat([base.bias for base in bases])


def gated_mlp(mlp: Any, x: Tensor, norm: Norm | None = None, *, residual: bool = False) -> Tensor | None:
    """The output of a gated MLP.

    `norm`: x has yet to go through it. `residual`: x, as it is before that, is added to the output.
    """
    members, activation = _members_of(mlp), activation_of(mlp)
    if activation is not None and norm is None and parallel.is_parallel(*map(base_of, members)):
        return parallel.gated_mlp(members, activation, x) if x.numel() and not is_hooked(mlp.act_fn) else None
    names = one_function(mlp, x)
    return None if names is None else gated_mlp_as(mlp, x, names, norm, residual=residual)


def one_function(mlp: Any, x: Tensor) -> list[Names] | None:
    """The active adapters of gate, up and down, if an MLP can compute this input in one function; else None."""
    members = _members_of(mlp)
    if x.numel() == 0 or activation_of(mlp) is None or is_hooked(mlp.act_fn):
        return None
    if parallel.is_parallel(*map(base_of, members)):
        return None
    return _active(members) if _is_one_function(*(base_of(member) for member in members)) else None


def gated_mlp_as(
    mlp: Any, x: Tensor, names: Sequence[Names], norm: Norm | None = None, *, residual: bool = False
) -> Tensor:
    """The output of a gated MLP, of which `one_function` has returned these names."""
    activation, members = activation_of(mlp), _members_of(mlp)
    gate, up, down = (base_of(member) for member in members)
    assert activation is not None
    trained = gate.is_trained

    def function(x: Tensor) -> Tensor:
        spec = MLPSpec(gate.spec(x), activation, saves_fp8=trained and gate.config.activations == "fp8")
        adapters, adapters_down = _adapters_of(members[:2], names[:2]), _adapters_of(members[2:], names[2:])
        y = mlp_function.gated_mlp(
            x, gate.as_weight(up), down.as_weight(), spec, gate.states, down.states, norm=norm, adapters=adapters,
            adapters_down=adapters_down, residual=residual and not trained,
        )  # fmt: skip
        return x + y if residual and trained else y

    return around(_holders(members, names), function, x)


def _members_of(mlp: Any) -> tuple[Any, Any, Any]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _are_one_product(bases: Sequence[Any]) -> bool:
    """Whether linears can be one product: trained ones with one scaling state, or frozen ones whose scales fit."""
    if all(is_trained(base) for base in bases):
        return all(base.state_x is bases[0].state_x for base in bases)
    return _are_frozen(bases) and not why_no_group(bases)


def _is_one_function(gate: Any, up: Any, down: Any) -> bool:
    """Whether the linears of a gated MLP can be one function."""
    if all(is_trained(base) for base in (gate, up, down)):
        return _are_one_product((gate, up))
    return _are_frozen((gate, up, down)) and not why_no_frozen_mlp(gate, up, down)


def is_trained(base: Any) -> bool:
    """Whether a linear is a trained one in FP8, by its own class."""
    return type(base) is FP8Linear or (isinstance(base, FP8Linear) and own_class(base) is FP8Linear)


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


def _active(members: Sequence[Any]) -> list[Names] | None:
    """The names of the active adapters of each linear; None if one of them has to be called by itself."""
    active: list[Names] = []
    for member in members:
        base = base_of(member)
        if is_hooked(member, base):
            return None
        names = () if member is base else member.fusible()
        if names is None:
            return None
        active.append(names)
    return active


def _holders(members: Sequence[Any], active: Sequence[Names]) -> Iterator[Any]:
    """The modules that hold the weights of linears and of their active adapters."""
    for member, names in zip(members, active, strict=True):
        yield member
        if hasattr(member, "fusible"):
            yield member.base_layer
            yield from member.adapter_modules(names)


def _adapters_of(members: Sequence[Any], active: Sequence[Names]) -> Adapters:
    """The active adapters of linears side by side."""
    adapters: list[Adapter] = []
    matrices: list[tuple[Tensor, Tensor]] = []
    start = 0
    for member, names in zip(members, active, strict=True):
        end = start + base_of(member).out_features
        adapters += [Adapter(start, end, float(member.scaling[name])) for name in names]
        matrices += [member.matrices(name) for name in names]
        start = end
    return Adapters(tuple(adapters), tuple(a for a, _ in matrices), tuple(b for _, b in matrices))
