"""Weights as the right operand of a product, for the implementations of operators: quantised here, or in FP8 already.

A weight that is in FP8 already is one copy of one byte an element, `[N, K]`. Forward takes it as it is. Backward
contracts over N, so it wants it transposed: into a scratch buffer that lives no longer than the operator.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
from octavo.ops import multiply, quantize_group
from octavo.support import has_fp8_tensor_cores


def weight_gemm(
    a: Quantized, weights: Sequence[Tensor], row: Tensor, recipe: OperandRecipe, *, bias: Tensor | None = None,
    record: bool = False, transpose: bool = False, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`a[M, K] · w[N, K]ᵀ + bias`, or with `transpose` `a[M, N] · w[N, K]`, for `w` the weights side by side.

    `row`: their scaling state; of weights that are in FP8 already, their scale: one for all, or one per block. Returned
    beside the product is what backward takes as the row of a delayed scale: the scale that forward used. (The row may
    have changed by then.) Empty where there is no such thing.
    """
    scale = row.new_empty(0)
    if is_fp8(weights[0]):
        w = Quantized(joined(weights), row)
        w = Quantized(transpose_bytes(w.data), row.t().contiguous()) if transpose else w
    else:
        layout, known = ("columns", row if recipe.delayed else None) if transpose else ("rows", None)
        w = quantize_group(weights, row, recipe, record, layout, scale=known)[0]
        if recipe.delayed and not transpose:
            scale = w.scale
    return multiply(a, w, bias, dtype, [], fast, emulate), scale


def is_fp8(weight: Tensor) -> bool:
    return weight.dtype.itemsize == 1


def gradient_dtype(weight: Tensor, g: Tensor) -> torch.dtype:
    """That of the weight's gradient: the weight's own, or what gradients are in where the weight is in FP8."""
    return g.dtype if is_fp8(weight) else weight.dtype


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Matrices side by side, `[ΣN, K]`: a view where they lie so in memory, else a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if are_neighbours(parts):
        return first.as_strided((sum(part.shape[0] for part in parts), first.shape[1]), (first.shape[1], 1))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(first.dtype)


def are_neighbours(parts: Sequence[Tensor]) -> bool:
    """Whether each begins in memory where the one before ends."""
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return False
        end += part.nbytes
    # Not by chance: in one piece of memory.
    return parts[0].untyped_storage().data_ptr() == parts[-1].untyped_storage().data_ptr()


def transpose_bytes(data: Tensor) -> Tensor:
    """An FP8 matrix transposed, contiguous."""
    if has_fp8_tensor_cores(data.device):
        from octavo.kernels.quantize import transpose as kernel

        if kernel.can_transpose(data):
            return kernel.transpose(data)
    return data.view(torch.uint8).t().contiguous().view(data.dtype)
