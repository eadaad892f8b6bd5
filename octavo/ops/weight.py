"""`Weight`: the right operand of a linear, and the only place that knows in which state it is.

| state    | `parts`                       | `scales`                 | a product takes                         |
| -------- | ----------------------------- | ------------------------ | --------------------------------------- |
| trained  | Parameters, in high precision | none                     | the parts, quantised in every call      |
| FP8-only | FP8; the master is elsewhere  | one tensor for all parts | the FP8 copy                            |
| frozen   | FP8                           | one tensor for each part | the FP8 copy, or what it dequantises to |

A stored weight (FP8-only or frozen) is one copy of one byte an element, `[N, K]`. Forward takes it as it is. Backward
contracts over N, so it wants it transposed: into a scratch buffer that lives no longer than the operator. What becomes
of the scales depends on what they belong to:

    tensor     nothing: there is one
    block      they are transposed, too
    channel    a scale per row n would differ along the contracted dimension: it is multiplied into g before g is
               quantised (`row_factor`), and the weight goes without

    y_MN  = xq_MK · wq_NKᵀ                  dx_MK = (g · s)q_MN · wq_KNᵀ

In high precision the transposed weight is a view: products take it either way.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics.gemm import constant_along_k
from octavo.numerics.quantize import BLOCK
from octavo.ops.quantize import dequantize, is_high_precision, quantize_group, transpose_bytes


class Weight(NamedTuple):
    """Matrices `[Nᵢ, K]` that are one right operand, side by side: `[N, K]`."""

    parts: Sequence[Tensor]
    scales: Sequence[Tensor] = ()  # of a trained weight in backward: the delayed scale that forward used
    state: Tensor | None = None  # scaling state of a trained weight
    parameters: Sequence[Tensor] = ()  # the Parameters behind FP8-only parts
    sources: Sequence[
        Tensor
    ] = ()  # the Parameters that frozen parts and scales are views of, if an engine may free them

    @property
    def is_stored(self) -> bool:
        """True if the parts are in FP8 already."""
        return self.parts[0].dtype.itemsize == 1

    @property
    def trained(self) -> Sequence[Tensor]:
        """The tensors that gradients go to; none if the weight is frozen."""
        return self.parameters if self.is_stored else self.parts

    @property
    def out_features(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    def forward_operand(self, recipe: OperandRecipe | None, record: bool, dtype: torch.dtype | None) -> Quantized:
        """The operand `[N, K]` of `y = x · wᵀ`: quantised by `recipe`, or as stored; dequantised if `dtype` is given.

        `recipe`: None for a frozen weight.
        """
        if self.is_stored:
            return self._joined(dtype)
        assert recipe is not None and self.state is not None
        return quantize_group(self.parts, self.state, recipe, record, "rows")[0]

    def used_scale(self, operand: Quantized, recipe: OperandRecipe | None) -> Tensor:
        """The scale that backward has to use again: a delayed one. (The state may have changed by then.) Else empty."""
        if self.is_stored or recipe is None or not recipe.delayed:
            return operand.data.new_empty(0, dtype=torch.float32)
        return operand.scale

    def dgrad_operand(self, recipe: OperandRecipe | None, dtype: torch.dtype | None) -> Quantized:
        """The operand `[K, N]` of `dx = g · w`, without its `row_factor`."""
        if not self.is_stored:
            assert recipe is not None and self.state is not None
            known = self.scales[0] if self.scales else None
            return quantize_group(self.parts, self.state, recipe, False, "columns", scale=known)[0]
        w = self._joined(dtype)
        if is_high_precision(w):
            return Quantized(w.data.t(), w.scale)
        data = transpose_bytes(w.data)
        folds = recipe is None and _has_row_scales(w.scale, data.shape[1])
        return Quantized(data, _ones(data.shape[0], data.device) if folds else w.scale.t().contiguous())

    def row_factor(self, recipe: OperandRecipe | None, dtype: torch.dtype | None) -> Tensor | None:
        """The scales `[N]` that g has to be multiplied by, where a frozen weight in FP8 has one per row."""
        is_frozen_fp8 = self.is_stored and recipe is None and dtype is None
        folds = is_frozen_fp8 and _has_row_scales(self.scales[0], self.parts[0].shape[0])
        return joined(self.scales).view(-1) if folds else None

    def gradient_dtype(self, g: Tensor) -> torch.dtype:
        """The dtype of dw: the weight's own; for FP8 weights, that of g."""
        return g.dtype if self.is_stored else self.parts[0].dtype

    def as_one(self) -> Quantized | None:
        """Stored parts as one weight in FP8, without a copy; None if they are not that, or lie apart."""
        if not self.is_stored:
            return None
        if len(self.parts) == 1:
            return Quantized(self.parts[0], self.scales[0])
        one = are_neighbours(self.parts) and are_neighbours(self.scales) and can_join(self.parts, self.scales)
        return Quantized(joined(self.parts), joined(self.scales)) if one else None

    def _joined(self, dtype: torch.dtype | None) -> Quantized:
        """Stored parts as one: in FP8, or dequantised to `dtype`, with an empty scale."""
        one = len(self.parts) == 1
        if dtype is None or one or can_join(self.parts, self.scales):
            whole = (
                Quantized(self.parts[0], self.scales[0]) if one else Quantized(joined(self.parts), joined(self.scales))
            )
            return whole if dtype is None else Quantized(dequantize(whole, dtype), whole.scale.new_empty(0))
        parts = [dequantize(Quantized(*part), dtype) for part in zip(self.parts, self.scales, strict=True)]
        return Quantized(torch.cat(parts), self.scales[0].new_empty(0))


def can_join(parts: Sequence[Tensor], scales: Sequence[Tensor]) -> bool:
    """True if the scales one below the other are those of the parts one below the other."""
    weights = [Quantized(*part) for part in zip(parts, scales, strict=True)]
    kinds = {(w.data.dtype, constant_along_k(w)) for w in weights}
    if len(kinds) > 1 or any(w.scale.dim() == 0 for w in weights):
        return False
    return constant_along_k(weights[0]) or all(w.data.shape[0] % BLOCK == 0 for w in weights[:-1])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return matrices side by side, `[ΣN, K]`: a view where they lie so in memory, else a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if are_neighbours(parts):
        return first.as_strided((sum(part.shape[0] for part in parts), first.shape[1]), (first.shape[1], 1))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(first.dtype)


def are_neighbours(parts: Sequence[Tensor]) -> bool:
    """True if each part begins in memory where the one before ends."""
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return False
        end += part.nbytes
    # Not by chance: in one piece of memory.
    return parts[0].untyped_storage().data_ptr() == parts[-1].untyped_storage().data_ptr()


def _has_row_scales(scale: Tensor, rows: int) -> bool:
    return scale.dim() > 0 and tuple(scale.shape) == (rows, 1)


@cache
def _ones(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, 1, dtype=torch.float32, device=device)
