"""Quantising operands: by the kernel where there is one, else by the specification.

Scales of granularity `mx` leave an operator as bytes (`pack_scale`): Inductor in torch 2.11 does not know their dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics import operand as spec
from octavo.numerics.amax import block_amax, finite_amax
from octavo.numerics.formats import E8M0_DTYPE
from octavo.numerics.quantize import packed_scale_dtype, scale_shape
from octavo.numerics.quantize import quantize_by_groups as spec_by_groups
from octavo.ops.register import operator
from octavo.support import has_fp8_tensor_cores


def quantize(
    x: Tensor, state: Tensor, recipe: OperandRecipe, *, record: bool, layout: str, scale: Tensor | None = None
) -> list[Quantized]:
    """Quantise an operand by its recipe; see `numerics.operand.quantize_operand`."""
    data, scale, data_t, scale_t = _quantize(x, state, recipe.encode(), record, layout, scale)
    return [Quantized(data, scale), Quantized(data_t, scale_t)] if layout == "both" else [Quantized(data, scale)]


def quantize_group(
    xs: Sequence[Tensor], state: Tensor, recipe: OperandRecipe, record: bool, layout: str, scale: Tensor | None = None
) -> list[Quantized]:
    """Quantise matrices side by side as one operand; for the implementations of operators.

    `scale`: one for all of them, known before.
    """
    if has_fp8_tensor_cores(xs[0].device):
        from octavo.kernels import quantize as kernel  # brings Triton
        from octavo.kernels import trust

        trust.require_right_kernels(xs[0].device)
        if kernel.can_quantize(xs, recipe):
            return kernel.quantize_group(xs, state, recipe, record=record, layout=layout, scale=scale)
    return spec.quantize_group(xs, state, recipe, record=record, layout=layout, scale=scale)


def quantize_by_groups(
    x: Tensor, scale: Tensor, recipe: OperandRecipe, *, first: int, height: int | None, width: int | None
) -> Tensor:
    """Quantise rows of a larger matrix by its scales; see `numerics.quantize.quantize_by_groups`."""
    if has_fp8_tensor_cores(x.device):
        from octavo.kernels.quantize import by_scales as kernel

        if kernel.can_quantize(x, recipe.format, recipe.rounding):
            return kernel.quantize_by_groups(x, scale, recipe.format, first=first, height=height, width=width)
    return spec_by_groups(x, scale, recipe.format, recipe.rounding, first=first, height=height, width=width)


def matrix_amax(x: Tensor, *, by_column: bool) -> Tensor:
    """Return the largest finite magnitude of a matrix `[R, C]`, `[1]`, or of each of its columns, `[C]`; FP32."""
    if has_fp8_tensor_cores(x.device):
        from octavo.kernels import quantize as kernel

        if kernel.can_measure(x):
            return kernel.matrix_amax(x, by_column=by_column)
    return block_amax(x, (x.shape[0], 1)).view(-1) if by_column else finite_amax(x)[0].view(1)


def quantize_folded(g: Tensor, factor: Tensor, state: Tensor, recipe: OperandRecipe) -> Quantized:
    """Quantise `g[M, N] · factor[N]` as rows."""
    if has_fp8_tensor_cores(g.device):
        from octavo.kernels import quantize as kernel

        if kernel.can_fold(g, recipe):
            return kernel.quantize_folded(g, factor, state, recipe)
    return quantize_group([(g.float() * factor).to(g.dtype)], state, recipe, True, "rows")[0]


def dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    """Compute `x.dequantize(dtype)`, in one pass where there is a kernel."""
    if has_fp8_tensor_cores(x.data.device):
        from octavo.kernels.quantize import dequantize as kernel

        if kernel.can_dequantize(x, dtype):
            return kernel.dequantize(x, dtype)
    return x.dequantize(dtype)


def transpose_bytes(data: Tensor) -> Tensor:
    """Transpose an FP8 matrix; the result is contiguous."""
    if has_fp8_tensor_cores(data.device):
        from octavo.kernels.quantize import transpose as kernel

        if kernel.can_transpose(data):
            return kernel.transpose(data)
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def is_high_precision(x: Quantized) -> bool:
    """True if the data is not in FP8 after all; its scale is then empty."""
    return x.data.element_size() > 1


def pack_scale(scale: Tensor) -> Tensor:
    """View E8M0 scales as bytes."""
    return scale.view(torch.uint8) if scale.dtype == E8M0_DTYPE else scale


def unpack_scale(scale: Tensor) -> Tensor:
    """View the bytes of E8M0 scales as what they are."""
    return scale.view(E8M0_DTYPE) if scale.dtype == torch.uint8 else scale


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `x.to(dtype)`, without a call into torch where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def fake_quantize(x: Tensor, operand: OperandRecipe, transpose: bool) -> tuple[Tensor, Tensor]:
    """Return empty tensors shaped as a quantised operand and its packed scale."""
    shape = x.mT.shape if transpose else x.shape
    granularity = operand.columns if transpose and operand.columns else operand.granularity
    scale = x.new_empty(scale_shape(shape, granularity, operand.block), dtype=packed_scale_dtype(granularity))
    return x.new_empty(shape, dtype=operand.format.dtype), scale


def _quantize_fake(x: Tensor, recipe: str, layout: str) -> tuple[Tensor, ...]:
    operand = OperandRecipe.decode(recipe)
    second = fake_quantize(x, operand, True) if layout == "both" else (x.new_empty(0), x.new_empty(0))
    return *fake_quantize(x, operand, layout == "columns"), *second


@operator(mutates=("state",), fake=_quantize_fake)
def _quantize(
    x: Tensor, state: Tensor, recipe: str, record: bool, layout: str, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FP8 data and scale of one layout, then of the other; empty where there is none."""
    first, *rest = quantize_group([x], state, OperandRecipe.decode(recipe), record, layout, scale)
    first_scale = first.scale.clone() if first.scale is scale else pack_scale(first.scale)
    if not rest:
        return first.data, first_scale, x.new_empty(0), x.new_empty(0)
    # Per tensor, both layouts share one scale.
    second_scale = rest[0].scale.clone() if rest[0].scale is first.scale else pack_scale(rest[0].scale)
    return first.data, first_scale, rest[0].data, second_scale
