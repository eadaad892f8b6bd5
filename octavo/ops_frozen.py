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
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.ranges import ranged
from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics.gemm import constant_along_k
from octavo.ops import Product, multiply, quantize_directly
from octavo.ops_linear import padded
from octavo.ops_weights import joined, transpose_bytes
from octavo.support import has_fp8_tensor_cores

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
_LIBRARY.define(
    "frozen_linear(Tensor x, Tensor(a!) row_x, Tensor[] weights, Tensor[] scales, Tensor? bias, str recipe_x, "
    "bool record, ScalarType dtype, bool fast, bool emulate) -> Tensor"
)
_LIBRARY.define(
    "frozen_linear_backward(Tensor g, Tensor(a!) row_g, Tensor[] weights, Tensor[] scales, str recipe_g, "
    "ScalarType dtype, bool fast, bool emulate) -> Tensor"
)
_LIBRARY.define("dequantized_linear(Tensor x, Tensor data, Tensor scale, Tensor? bias) -> Tensor")
_LIBRARY.define("dequantized_linear_backward(Tensor g, Tensor data, Tensor scale) -> Tensor")


def dequantized_linear(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """`x[M, K] · w[N, K]ᵀ + bias` in the dtype of x, by the dequantised weight.

    Each an operator of its own: `torch.compile` would keep a weight that both compute for the other.
    """
    return torch.ops.octavo.dequantized_linear(x, *weight, bias)


def dequantized_linear_backward(g: Tensor, weight: Quantized) -> Tensor:
    """`g[M, N] · w[N, K]`."""
    return torch.ops.octavo.dequantized_linear_backward(g, *weight)


def frozen_linear(x: Tensor, weights: Sequence[Quantized], bias: Tensor | None, row_x: Tensor, how: Product) -> Tensor:
    """`x[M, K] · w[N, K]ᵀ + bias` for `w` the weights side by side."""
    return torch.ops.octavo.frozen_linear(
        x, row_x, *lists(weights), bias, how.a.encode(), how.record, how.out_dtype, how.fast_forward, how.emulate
    )


def frozen_linear_backward(
    g: Tensor, weights: Sequence[Quantized], row_g: Tensor, how: Product, dtype: torch.dtype
) -> Tensor:
    """`g[M, N] · w[N, K]` in `dtype`."""
    return torch.ops.octavo.frozen_linear_backward(
        g, row_g, *lists(weights), how.g.encode(), dtype, how.fast_backward, how.emulate
    )


def lists(weights: Sequence[Quantized]) -> tuple[list[Tensor], list[Tensor]]:
    return [w.data for w in weights], [w.scale for w in weights]


def first_rows(y: Tensor, rows: int) -> Tensor:
    """Without rows of padding. Not a view where there are none: a function's output that is one allows no in-place."""
    return y if y.shape[0] == rows else y[:rows]


def dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    """`x.dequantize(dtype)`, in one pass where there is a kernel."""
    if has_fp8_tensor_cores(x.data.device):
        from octavo.kernels import dequantize as kernel

        if kernel.can_dequantize(x, dtype):
            return kernel.dequantize(x, dtype)
    return x.dequantize(dtype)


@dataclass(frozen=True)
class Turned:
    """A weight transposed for dgrad, and what g has to be multiplied by in turn, if anything: scales per row."""

    weight: Quantized
    factor: Tensor | None

    def dgrad(
        self, g: Tensor, row_g: Tensor, recipe: OperandRecipe, dtype: torch.dtype, fast: bool, emulate: bool,
        *, folded: bool = False, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`g[M, N] · w[N, K]`, not as an operator; into `out` if there is one, of whole tiles.

        `folded`: g has been multiplied by the factor before.
        """
        wide = padded(g, emulate)
        if self.factor is None or folded:
            g_q = quantize_directly(wide, row_g, recipe, True, "rows")[0]
        else:
            g_q = _quantize_folded(wide, self.factor, row_g, recipe)
        # dx = g · w
        return multiply(g_q, self.weight, None, dtype, [], fast, emulate, out=out)[: g.shape[0]]


def turn(weight: Quantized) -> Turned:
    data, scale = transpose_bytes(weight.data), weight.scale
    if scale.dim() and constant_along_k(weight):
        return Turned(Quantized(data, _ones(data.shape[0], scale.device)), scale.view(-1))
    return Turned(Quantized(data, scale.t().contiguous()), None)


@cache
def _ones(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, 1, dtype=torch.float32, device=device)


def dgrad(
    g: Tensor, row_g: Tensor, weight: Quantized, recipe: OperandRecipe, dtype: torch.dtype, fast: bool, emulate: bool
) -> Tensor:
    """`g[M, N] · w[N, K]`, not as an operator."""
    return turn(weight).dgrad(g, row_g, recipe, dtype, fast, emulate)


def _quantize_folded(g: Tensor, factor: Tensor, row: Tensor, recipe: OperandRecipe) -> Quantized:
    """`g[M, N] · factor[N]`, quantised as rows."""
    if has_fp8_tensor_cores(g.device):
        from octavo.kernels import quantize as kernel

        if kernel.can_fold(g, recipe):
            return kernel.quantize_folded(g, factor, row, recipe)
    return quantize_directly((g.float() * factor).to(g.dtype), row, recipe, True, "rows")[0]


def _frozen_linear(
    x: Tensor, row_x: Tensor, weights: list[Tensor], scales: list[Tensor], bias: Tensor | None, recipe_x: str,
    record: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> Tensor:  # fmt: skip
    x_q = quantize_directly(padded(x, emulate), row_x, OperandRecipe.decode(recipe_x), record, "rows")[0]
    # y = x · wᵀ
    w = Quantized(joined(weights), joined(scales))
    return first_rows(multiply(x_q, w, bias, dtype, [], fast, emulate), x.shape[0])


def _frozen_linear_backward(
    g: Tensor, row_g: Tensor, weights: list[Tensor], scales: list[Tensor], recipe_g: str, dtype: torch.dtype,
    fast: bool, emulate: bool,
) -> Tensor:  # fmt: skip
    weight = Quantized(joined(weights), joined(scales))
    return dgrad(g, row_g, weight, OperandRecipe.decode(recipe_g), dtype, fast, emulate)


def _frozen_linear_fake(
    x: Tensor, row_x: Tensor, weights: list[Tensor], scales: list[Tensor], bias: Tensor | None, recipe_x: str,
    record: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty([x.shape[0], sum(w.shape[0] for w in weights)], dtype=dtype)


def _frozen_linear_backward_fake(
    g: Tensor, row_g: Tensor, weights: list[Tensor], scales: list[Tensor], recipe_g: str, dtype: torch.dtype,
    fast: bool, emulate: bool,
) -> Tensor:  # fmt: skip
    return g.new_empty([g.shape[0], weights[0].shape[1]], dtype=dtype)


def _dequantized_linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, dequantize(Quantized(data, scale), x.dtype), bias)


def _dequantized_linear_backward(g: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    return g @ dequantize(Quantized(data, scale), g.dtype)


def _dequantized_linear_fake(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty([x.shape[0], data.shape[0]])


def _dequantized_linear_backward_fake(g: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    return g.new_empty([g.shape[0], data.shape[1]])


for _name, _implementation, _fake in (
    ("dequantized_linear", _dequantized_linear, _dequantized_linear_fake),
    ("dequantized_linear_backward", _dequantized_linear_backward, _dequantized_linear_backward_fake),
    ("frozen_linear", _frozen_linear, _frozen_linear_fake),
    ("frozen_linear_backward", _frozen_linear_backward, _frozen_linear_backward_fake),
):
    _LIBRARY.impl(_name, ranged(f"octavo.{_name}", _implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_LIBRARY)
