"""The operations of linears whose weight is frozen in FP8: forward and dgrad from one copy of one byte an element.

Backward contracts over N, the weight's rows, so it wants the weight transposed: into a scratch buffer that lives no
longer than the operator. What becomes of the weight's scales depends on what they belong to:

    tensor     nothing: there is one
    block      they are transposed, too
    channel    a scale per row n would differ along the contracted dimension: it is multiplied into g before g is
               quantised, and the weight goes without

    y_MN  = xq_MK · wq_NKᵀ                  dx_MK = (g · s)q_MN · wq_KNᵀ
"""

import torch
from torch import Tensor

from octavo.kernels.ranges import ranged
from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics.gemm import constant_along_k
from octavo.ops import Product, multiply, quantize_directly
from octavo.ops_linear import _padded
from octavo.support import has_fp8_tensor_cores

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
_LIBRARY.define(
    "frozen_linear(Tensor x, Tensor(a!) row_x, Tensor weight, Tensor scale, Tensor? bias, str recipe_x, bool record, "
    "ScalarType dtype, bool fast, bool emulate) -> Tensor"
)
_LIBRARY.define(
    "frozen_linear_backward(Tensor g, Tensor(a!) row_g, Tensor weight, Tensor scale, str recipe_g, ScalarType dtype, "
    "bool fast, bool emulate) -> Tensor"
)


def frozen_linear(x: Tensor, weight: Quantized, bias: Tensor | None, row_x: Tensor, how: Product) -> Tensor:
    """`x[M, K] · w[N, K]ᵀ + bias`."""
    return torch.ops.octavo.frozen_linear(
        x, row_x, *weight, bias, how.a.encode(), how.record, how.out_dtype, how.fast_forward, how.emulate
    )


def frozen_linear_backward(g: Tensor, weight: Quantized, row_g: Tensor, how: Product, dtype: torch.dtype) -> Tensor:
    """`g[M, N] · w[N, K]` in `dtype`."""
    return torch.ops.octavo.frozen_linear_backward(
        g, row_g, *weight, how.g.encode(), dtype, how.fast_backward, how.emulate
    )


def transpose_bytes(data: Tensor) -> Tensor:
    """An FP8 matrix transposed, contiguous."""
    if has_fp8_tensor_cores(data.device):
        from octavo.kernels import transpose as kernel

        if kernel.can_transpose(data):
            return kernel.transpose(data)
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def turned_for_dgrad(g: Tensor, weight: Quantized) -> tuple[Tensor, Quantized]:
    """g with the weight's scales multiplied into it where they have to go there, and the weight transposed."""
    data = transpose_bytes(weight.data)
    scale = weight.scale
    if scale.dim() == 0:
        return g, Quantized(data, scale)
    if constant_along_k(weight):
        return (g.float() * scale.t()).to(g.dtype), Quantized(data, scale.new_ones(()))
    return g, Quantized(data, scale.t().contiguous())


def _frozen_linear(
    x: Tensor, row_x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, recipe_x: str, record: bool,
    dtype: torch.dtype, fast: bool, emulate: bool,
) -> Tensor:  # fmt: skip
    x_q = quantize_directly(_padded(x, emulate), row_x, OperandRecipe.decode(recipe_x), record, "rows")[0]
    # y = x · wᵀ
    return multiply(x_q, Quantized(weight, scale), bias, dtype, [], fast, emulate)[: x.shape[0]]


def _frozen_linear_backward(
    g: Tensor, row_g: Tensor, weight: Tensor, scale: Tensor, recipe_g: str, dtype: torch.dtype, fast: bool,
    emulate: bool,
) -> Tensor:  # fmt: skip
    scaled, w = turned_for_dgrad(g, Quantized(weight, scale))
    g_q = quantize_directly(_padded(scaled, emulate), row_g, OperandRecipe.decode(recipe_g), True, "rows")[0]
    # dx = g · w
    return multiply(g_q, w, None, dtype, [], fast, emulate)[: g.shape[0]]


def _frozen_linear_fake(
    x: Tensor, row_x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, recipe_x: str, record: bool,
    dtype: torch.dtype, fast: bool, emulate: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty([x.shape[0], weight.shape[0]], dtype=dtype)


def _frozen_linear_backward_fake(
    g: Tensor, row_g: Tensor, weight: Tensor, scale: Tensor, recipe_g: str, dtype: torch.dtype, fast: bool,
    emulate: bool,
) -> Tensor:  # fmt: skip
    return g.new_empty([g.shape[0], weight.shape[1]], dtype=dtype)


for _name, _implementation, _fake in (
    ("frozen_linear", _frozen_linear, _frozen_linear_fake),
    ("frozen_linear_backward", _frozen_linear_backward, _frozen_linear_backward_fake),
):
    _LIBRARY.impl(_name, ranged(f"octavo.{_name}", _implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_LIBRARY)
