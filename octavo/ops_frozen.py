"""The operations of linears whose weight is frozen in FP8: forward and dgrad from one copy of one byte an element.

Backward contracts over N, the weight's rows, so it wants the weight transposed: into a scratch buffer that lives no
longer than the operator. What becomes of the weight's scales depends on what they belong to:

    tensor     nothing: there is one
    block      they are transposed, too
    channel    a scale per row n would differ along the contracted dimension: it is multiplied into g before g is
               quantised, and the weight goes without

    y_MN  = xq_MK · wq_NKᵀ                  dx_MK = (g · s)q_MN · wq_KNᵀ
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.ranges import ranged
from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics.gemm import constant_along_k
from octavo.ops import Product, fake_quantize, multiply, pack_scale, quantize_directly, unpack_scale
from octavo.ops_linear import fake_padded, padded
from octavo.support import has_fp8_tensor_cores

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
_LIBRARY.define(
    "frozen_linear(Tensor x, Tensor(a!) row_x, Tensor[] weights, Tensor[] scales, Tensor? bias, str recipe_x, "
    "bool record, bool keep, ScalarType dtype, bool fast, bool emulate) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "frozen_linear_backward(Tensor g, Tensor(a!) row_g, Tensor[] weights, Tensor[] scales, str recipe_g, "
    "ScalarType dtype, bool fast, bool emulate) -> Tensor"
)
_LIBRARY.define("adapter_gradient(Tensor u, Tensor x, Tensor x_scale) -> Tensor")


def frozen_linear(
    x: Tensor, weights: Sequence[Quantized], bias: Tensor | None, row_x: Tensor, how: Product, *, keep: bool = False
) -> tuple[Tensor, Quantized]:
    """`x[M, K] · w[N, K]ᵀ + bias` for `w` the weights side by side, and x as rows in FP8: empty unless kept."""
    y, data, scale = torch.ops.octavo.frozen_linear(
        x, row_x, *_lists(weights), bias, how.a.encode(), how.record, keep, how.out_dtype, how.fast_forward,
        how.emulate,
    )  # fmt: skip
    return y, Quantized(data, scale)


def frozen_linear_backward(
    g: Tensor, weights: Sequence[Quantized], row_g: Tensor, how: Product, dtype: torch.dtype
) -> Tensor:
    """`g[M, N] · w[N, K]` in `dtype`."""
    return torch.ops.octavo.frozen_linear_backward(
        g, row_g, *_lists(weights), how.g.encode(), dtype, how.fast_backward, how.emulate
    )


def _lists(weights: Sequence[Quantized]) -> tuple[list[Tensor], list[Tensor]]:
    return [w.data for w in weights], [w.scale for w in weights]


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
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or not part.is_contiguous():
            return False
        end += part.numel()
    return True


def adapter_gradient(u: Tensor, x: Quantized) -> Tensor:
    """`u[M, R]ᵀ · x[M, K]`, in the dtype of u, for x kept in FP8 as rows. It may have more rows, of zeros."""
    return torch.ops.octavo.adapter_gradient(u, *x)


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
    x: Tensor, row_x: Tensor, weights: list[Tensor], scales: list[Tensor], bias: Tensor | None, recipe_x: str,
    record: bool, keep: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x_q = quantize_directly(padded(x, emulate), row_x, OperandRecipe.decode(recipe_x), record, "rows")[0]
    # y = x · wᵀ
    w = Quantized(joined(weights), joined(scales))
    y = multiply(x_q, w, bias, dtype, [], fast, emulate)[: x.shape[0]]
    if not keep:
        return y, x.new_empty(0), x.new_empty(0)
    return y, x_q.data, pack_scale(x_q.scale)


def _frozen_linear_backward(
    g: Tensor, row_g: Tensor, weights: list[Tensor], scales: list[Tensor], recipe_g: str, dtype: torch.dtype,
    fast: bool, emulate: bool,
) -> Tensor:  # fmt: skip
    scaled, w = turned_for_dgrad(g, Quantized(joined(weights), joined(scales)))
    g_q = quantize_directly(padded(scaled, emulate), row_g, OperandRecipe.decode(recipe_g), True, "rows")[0]
    # dx = g · w
    return multiply(g_q, w, None, dtype, [], fast, emulate)[: g.shape[0]]


def _adapter_gradient(u: Tensor, x: Tensor, x_scale: Tensor) -> Tensor:
    x_hp = Quantized(x, unpack_scale(x_scale)).dequantize(u.dtype)[: u.shape[0]]
    # dA = uᵀ · x
    return u.t() @ x_hp


def _frozen_linear_fake(
    x: Tensor, row_x: Tensor, weights: list[Tensor], scales: list[Tensor], bias: Tensor | None, recipe_x: str,
    record: bool, keep: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    y = x.new_empty([x.shape[0], sum(w.shape[0] for w in weights)], dtype=dtype)
    if not keep:
        return y, x.new_empty(0), x.new_empty(0)
    return y, *fake_quantize(fake_padded(x, emulate), OperandRecipe.decode(recipe_x), transpose=False)


def _adapter_gradient_fake(u: Tensor, x: Tensor, x_scale: Tensor) -> Tensor:
    return u.new_empty([u.shape[1], x.shape[1]])


def _frozen_linear_backward_fake(
    g: Tensor, row_g: Tensor, weights: list[Tensor], scales: list[Tensor], recipe_g: str, dtype: torch.dtype,
    fast: bool, emulate: bool,
) -> Tensor:  # fmt: skip
    return g.new_empty([g.shape[0], weights[0].shape[1]], dtype=dtype)


for _name, _implementation, _fake in (
    ("frozen_linear", _frozen_linear, _frozen_linear_fake),
    ("frozen_linear_backward", _frozen_linear_backward, _frozen_linear_backward_fake),
    ("adapter_gradient", _adapter_gradient, _adapter_gradient_fake),
):
    _LIBRARY.impl(_name, ranged(f"octavo.{_name}", _implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_LIBRARY)
