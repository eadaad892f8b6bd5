"""The weights of linears that are one product, held in FP8 only: q, k and v, or gate and up, or one linear alone.

They lie side by side in one buffer, so that the product needs no copy, and are written together: per tensor they have
one scale, from the amax of all, because dx contracts over all of N. It is that of the moment they are written, also
where inputs and gradients have delayed ones: writing looks at all of the weight anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from octavo.nn.held import HeldWeight
from octavo.nn.linear import FP8Linear
from octavo.numerics.quantize import BLOCK
from octavo.numerics.scaling import new_rows
from octavo.ops.quantize import quantize_group

GRANULARITIES = ("tensor", "block")


class HeldGroup:
    """Nothing is in it until `write`; `hold` then takes it into use, and `let_go` undoes that."""

    def __init__(self, linears: Sequence[FP8Linear]) -> None:
        self.linears = list(linears)
        first = linears[0]
        self.recipe = replace(first.recipe.w, delayed=False)
        rows, columns, device = sum(x.out_features for x in linears), first.in_features, first.weight.device
        blocks = [-(-rows // BLOCK), -(-columns // BLOCK)] if self.recipe.granularity == "block" else []
        self.data = torch.empty(rows, columns, dtype=self.recipe.format.dtype, device=device)
        self.scale = torch.empty(blocks, dtype=torch.float32, device=device)
        self._row = new_rows(device=device)

    @property
    def parameters(self) -> list[Tensor]:
        return [linear.weight for linear in self.linears]

    def write(self, masters: Sequence[Tensor]) -> None:
        """What these round to, in the place of what was there."""
        data, scale = quantize_group(masters, self._row, self.recipe, False, "rows")[0]
        self.data.view(torch.uint8).copy_(data.view(torch.uint8))
        self.scale.copy_(scale)

    def hold(self, read: Callable[[Tensor], Tensor], load: Callable[[Tensor, Tensor], None]) -> None:
        """Take the place of the linears' weights. `read`, `load`: the master of a Parameter."""
        start = 0
        for linear in self.linears:
            end = start + linear.out_features
            scale = self.scale[start // BLOCK : -(-end // BLOCK)] if self.scale.dim() else self.scale
            weight = linear.weight
            linear.held = HeldWeight(
                self.data[start:end], scale, self.scale, partial(read, weight), partial(load, weight)
            )
            linear.held.replace_values_of(weight)
            start = end

    def let_go(self) -> None:
        for linear in self.linears:
            assert linear.held is not None
            linear.held.give_back(linear.weight)
            linear.held = None
            linear.row_w.zero_()  # a delayed scale from before would be out of date


def linears_by_product(model: nn.Module) -> list[list[FP8Linear]]:
    """The trained linears in FP8; together those that are one product, which have one row for their scale."""
    groups: dict[int, list[FP8Linear]] = {}
    for module in model.modules():
        if isinstance(module, FP8Linear):
            groups.setdefault(id(module.row_w), []).append(module)
    return list(groups.values())


def why_not_held(linears: Sequence[FP8Linear]) -> str:
    """Why the weights of these cannot be held in FP8 only, and what to do; empty if they can."""
    recipe = linears[0].recipe.w
    if recipe.granularity not in GRANULARITIES:
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
