"""FP8 weights that lie side by side: linears with one input as one product, such as q, k and v, or gate and up.

The weights of a group are one buffer, and each module's own is a slice of it, so the product needs no copy.

Frozen weights: a move to another device parts them; the product is then computed from a copy, until `put_together`.

FP8-only weights (`FP8OnlyGroup`) are written together: per tensor they have one scale, from the amax of all, because dx
contracts over all of N. It is that of the moment they are written, also where inputs and gradients have delayed ones:
writing looks at all of the weight anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from octavo.nn.fp8_only import OffloadedWeight
from octavo.nn.frozen import SCALE_NAME, FP8FrozenLinear, FrozenTensor
from octavo.nn.linear import FP8Linear
from octavo.numerics.quantize import BLOCK
from octavo.numerics.scaling import new_states
from octavo.ops.quantize import quantize_group
from octavo.ops.weight import are_neighbours

FP8_ONLY_GRANULARITIES = ("tensor", "block")  # of weights whose master is in host memory


def why_no_group(members: Sequence[FP8FrozenLinear]) -> str:
    """Return why these cannot be one product; empty if they can."""
    if len({(member.fp8_products, member.fp8_forward) for member in members}) > 1:
        return "only some of their products are in FP8"
    if len({member.bias is None for member in members}) > 1:
        return "only some of them have a bias"
    return why_not_together(members) if members[0].fp8_products else ""


def why_not_together(members: Sequence[FP8FrozenLinear]) -> str:
    """Return why their weights and scales cannot be those of one weight; empty if they can."""
    granularity = members[0].granularity
    if len({member.granularity for member in members}) > 1 or len({member.format for member in members}) > 1:
        return "their weights are quantised differently"
    if granularity == "tensor":
        return "each has a scale of its own for the whole tensor"
    if granularity == "block" and any(member.out_features % BLOCK for member in members):
        return f"a block of {BLOCK} rows would straddle two of them"
    return ""


def put_together(members: Sequence[FP8FrozenLinear]) -> None:
    """Copy the weights of these, and their scales, into one buffer each, if they can be one weight."""
    if why_not_together(members):
        return
    for name in ("weight", SCALE_NAME):
        tensors = [getattr(member, name).data for member in members]
        if not are_neighbours(tensors):
            slices = torch.cat(tensors).split([tensor.shape[0] for tensor in tensors])
            for member, tensor in zip(members, slices, strict=True):
                setattr(member, name, FrozenTensor(tensor))


class FP8OnlyGroup:
    """The FP8-only weights of one product, or of one linear alone.

    The buffer is empty until `write`; `attach` then takes it into use, and `detach` undoes that.
    """

    def __init__(self, linears: Sequence[FP8Linear]) -> None:
        self.linears = list(linears)
        linear = linears[0]
        self.recipe = replace(linear.recipe.w, delayed=False)
        rows, columns, device = sum(x.out_features for x in linears), linear.in_features, linear.weight.device
        blocks = [-(-rows // BLOCK), -(-columns // BLOCK)] if self.recipe.granularity == "block" else []
        self.data = torch.empty(rows, columns, dtype=self.recipe.format.dtype, device=device)
        self.scale = torch.empty(blocks, dtype=torch.float32, device=device)
        self._state = new_states(device=device)

    @property
    def parameters(self) -> list[Tensor]:
        return [linear.weight for linear in self.linears]

    def write(self, masters: Sequence[Tensor]) -> None:
        """Write what the masters round to."""
        data, scale = quantize_group(masters, self._state, self.recipe, False, "rows")[0]
        self.data.view(torch.uint8).copy_(data.view(torch.uint8))
        self.scale.copy_(scale)

    def attach(self, read: Callable[[Tensor], Tensor], load: Callable[[Tensor, Tensor], None]) -> None:
        """Take the place of the linears' weights. `read`, `load`: the master of a Parameter."""
        start = 0
        for linear in self.linears:
            end = start + linear.out_features
            scale = self.scale[start // BLOCK : -(-end // BLOCK)] if self.scale.dim() else self.scale
            weight = linear.weight
            linear.fp8_only = OffloadedWeight(
                self.data[start:end], scale, self.scale, partial(read, weight), partial(load, weight)
            )
            linear.fp8_only.replace_values_of(weight)
            start = end

    def detach(self) -> None:
        """Give the Parameters their values back."""
        for linear in self.linears:
            assert linear.fp8_only is not None
            linear.fp8_only.restore_values_of(linear.weight)
            linear.fp8_only = None
            linear.state_w.zero_()  # a delayed scale from before would be out of date


def linears_by_product(model: nn.Module) -> list[list[FP8Linear]]:
    """Return the trained linears in FP8; together those that are one product, which share their scaling state."""
    groups: dict[int, list[FP8Linear]] = {}
    for module in model.modules():
        if isinstance(module, FP8Linear):
            groups.setdefault(id(module.state_w), []).append(module)
    return list(groups.values())


def why_not_fp8_only(linears: Sequence[FP8Linear]) -> str:
    """Return why the weights of these cannot be FP8-only, and what to do; empty if they can."""
    recipe = linears[0].recipe.w
    if recipe.granularity not in FP8_ONLY_GRANULARITIES:
        return (
            f"granularity={recipe.granularity!r}: forward and backward want different FP8 values of a weight, and "
            "there is one copy; use granularity='tensor' or 'block'"
        )
    if recipe.rounding == "stochastic":
        return "rounding='stochastic' of w: a run that resumes would round otherwise; use 'nearest' for w"
    sizes = [linear.out_features for linear in linears]
    if recipe.granularity == "block" and any(size % BLOCK for size in sizes[:-1]):
        return f"granularity='block' with out_features={sizes} in one product: they share a block; use 'tensor'"
    return ""
