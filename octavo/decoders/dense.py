"""Linears in high precision while a decoder generates: outputs side by side, and adapters added by one kernel.

A token takes as long as its weights take to be read, and each small launch beside that counts. PEFT adds an adapter by
two products, a multiplication and an addition, for each linear; here the adapters of all linears with one input are

    t = x · [A₁; A₂; …]ᵀ        one product
    yᵢ += sᵢ · tᵢ · Bᵢᵀ          one kernel, with the residual that is added next

and sums are rounded once. In training, and where anything is unusual, modules are called as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.decoders import decoding
from octavo.decoders.hooks import brings_weights, is_hooked
from octavo.decoders.match import added_adapters, own_class
from octavo.nn.sharded import is_sharded, plain_class
from octavo.ops.adapters import Adapter, Adapters, add_to, project_down
from octavo.ops.weight import joined


def dense_group(members: Sequence[Any], x: Tensor, residual: Tensor | None = None) -> Tensor | None:
    """The outputs of linears with one input, side by side, plus `residual`; None where the modules have to be called.

    Inside a rollout alone: weights do not change meanwhile, and nothing is differentiated.
    """
    if decoding.current() is None or torch.is_grad_enabled() or x.numel() == 0:
        return None
    found = [_base_and_names(member, x.dtype) for member in members]
    if any(each is None for each in found):
        return None
    rows = x.flatten(0, -2)
    pairs = [each for each in found if each is not None]
    y = rows.new_empty(len(rows), sum(base.out_features for base, _ in pairs))
    positions: list[Adapter] = []
    matrices: list[tuple[Tensor, Tensor]] = []
    start = 0
    for member, (base, names) in zip(members, pairs, strict=True):
        end = start + base.out_features
        _multiply(rows, base, y[:, start:end])
        positions += [Adapter(start, end, float(member.scaling[name])) for name in names]
        matrices += [(member.lora_A[name].weight, member.lora_B[name].weight) for name in names]
        start = end
    rest = None if residual is None else residual.reshape(y.shape)
    if matrices:
        # In one piece of memory, if the engine has copied them.
        down = joined([a for a, _ in matrices])
        adapters = Adapters(tuple(positions), tuple(a for a, _ in matrices), tuple(b for _, b in matrices))
        t = project_down(rows, Adapters((), (down,), ()), y.dtype)
        add_to(y, t, adapters, rest)
    elif rest is not None:
        y += rest
    return y.unflatten(0, x.shape[:-1])


def _multiply(x: Tensor, base: nn.Linear, out: Tensor) -> None:
    if base.bias is None:
        torch.mm(x, base.weight.t(), out=out)
    else:
        torch.addmm(base.bias, x, base.weight.t(), out=out)


def _base_and_names(member: Any, dtype: torch.dtype) -> tuple[nn.Linear, list[str]] | None:
    """A plain linear in this dtype and the active adapters of PEFT's around it; None for anything else."""
    base, parts, names = member, [member], list[str]()
    if _is_peft_linear(member):
        added = added_adapters(member)
        if added is None:
            return None
        base, names = member.base_layer, added
        parts += [base, *[group[name] for name in names for group in (member.lora_A, member.lora_B)]]
    linears = parts[1:] if names else [base]
    if not all(isinstance(linear, nn.Linear) and own_class(linear) is nn.Linear for linear in linears):
        return None
    if is_hooked(*parts) or any(map(brings_weights, parts)):
        return None
    usable = all(each.weight.dtype == dtype and not is_sharded(each.weight) for each in linears)
    return (base, names) if usable else None


def _is_peft_linear(module: Any) -> bool:
    """Whether this is PEFT's plain LoRA around a linear. PEFT is not imported here."""
    kind = plain_class(module)
    return kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer" and not module.fan_in_fan_out
