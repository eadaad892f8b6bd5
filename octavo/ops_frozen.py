"""The operations of linears whose weight is frozen in FP8: forward and dgrad from one copy of one byte an element.

Backward contracts over N, the weight's rows, so it wants the weight transposed: into a scratch buffer that lives no
longer than the operator. What becomes of the weight's scales depends on what they belong to:

    tensor     nothing: there is one
    block      they are transposed, too
    channel    a scale per row n would differ along the contracted dimension: it is multiplied into g before g is
               quantised, and the weight goes without

    y_MN  = xq_MK · wq_NKᵀ                  dx_MK = (g · s)q_MN · wq_KNᵀ

Without a recipe (an empty string) products are in high precision: x and g are taken as they are, and the scratch buffer
has the weight dequantised. What stands for a quantised tensor is then the tensor itself, with an empty scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics.gemm import constant_along_k
from octavo.numerics.quantize import BLOCK
from octavo.ops import Product, as_dtype, install, is_wide, multiply, quantize_directly
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


def frozen_linear(x: Tensor, weights: Sequence[Quantized], bias: Tensor | None, row_x: Tensor, how: Product) -> Tensor:
    """`x[M, K] · w[N, K]ᵀ + bias` for `w` the weights side by side."""
    return torch.ops.octavo.frozen_linear(
        x, row_x, *lists(weights), bias, how.frozen_recipes[0], how.record, how.out_dtype, how.fast_forward,
        how.emulate,
    )  # fmt: skip


def frozen_linear_backward(
    g: Tensor, weights: Sequence[Quantized], row_g: Tensor, how: Product, dtype: torch.dtype
) -> Tensor:
    """`g[M, N] · w[N, K]` in `dtype`."""
    return torch.ops.octavo.frozen_linear_backward(
        g, row_g, *lists(weights), how.frozen_recipes[1], dtype, how.fast_backward, how.emulate
    )


def lists(weights: Sequence[Quantized]) -> tuple[list[Tensor], list[Tensor]]:
    return [w.data for w in weights], [w.scale for w in weights]


def first_rows(y: Tensor, rows: int) -> Tensor:
    """Without rows of padding. Not a view where there are none: a function's output that is one allows no in-place."""
    return y if y.shape[0] == rows else y[:rows]


def dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    """`x.dequantize(dtype)`, in one pass where there is a kernel."""
    if has_fp8_tensor_cores(x.data.device):
        from octavo.kernels.quantize import dequantize as kernel

        if kernel.can_dequantize(x, dtype):
            return kernel.dequantize(x, dtype)
    return x.dequantize(dtype)


def as_operand(x: Tensor, row: Tensor, recipe: str, record: bool, dtype: torch.dtype) -> Quantized:
    """x as products by a frozen weight take it: rows in FP8, or itself in `dtype`."""
    if not recipe:
        return Quantized(as_dtype(x, dtype), x.new_empty(0))
    return quantize_directly(x, row, OperandRecipe.decode(recipe), record, "rows")[0]


def side_by_side(weights: Sequence[Tensor], scales: Sequence[Tensor], recipe: str, dtype: torch.dtype) -> Quantized:
    """Weights as one, as products take it: in FP8, or dequantised to `dtype`."""
    one = len(weights) == 1
    if recipe or one or can_join([Quantized(*part) for part in zip(weights, scales, strict=True)]):
        joint = Quantized(weights[0], scales[0]) if one else Quantized(joined(weights), joined(scales))
        return joint if recipe else Quantized(dequantize(joint, dtype), scales[0].new_empty(0))
    parts = [dequantize(Quantized(*part), dtype) for part in zip(weights, scales, strict=True)]
    return Quantized(torch.cat(parts), scales[0].new_empty(0))


def can_join(weights: Sequence[Quantized]) -> bool:
    """Whether their scales one below the other are those of the weights one below the other."""
    kinds = {(w.data.dtype, constant_along_k(w)) for w in weights}
    if len(kinds) > 1 or any(w.scale.dim() == 0 for w in weights):
        return False
    return constant_along_k(weights[0]) or all(w.data.shape[0] % BLOCK == 0 for w in weights[:-1])


def times(
    x: Quantized, w: Quantized, bias: Tensor | None, dtype: torch.dtype, fast: bool, emulate: bool,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`x[M, K] · w[N, K]ᵀ + bias`, of what the two functions above gave; into `out`, if there is one."""
    if not is_wide(w):
        return multiply(x, w, bias, dtype, [], fast, emulate, out=out)
    if bias is None:
        return torch.mm(x.data, w.data.t(), out=out)
    return torch.addmm(as_dtype(bias, dtype), x.data, w.data.t(), out=out)


@dataclass(frozen=True)
class Turned:
    """A weight as dgrad takes it, and what g has to be multiplied by in turn, if anything: scales per row.

    In FP8 it is transposed; in high precision, products take it either way.
    """

    weight: Quantized
    factor: Tensor | None

    def dgrad(
        self, g: Tensor, row_g: Tensor, recipe: str, dtype: torch.dtype, fast: bool, emulate: bool,
        *, folded: bool = False, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`g[M, N] · w[N, K]`, not as an operator; into `out` if there is one, of whole tiles.

        `folded`: g has been multiplied by the factor before.
        """
        if is_wide(self.weight):
            if out is not None and out.dtype == g.dtype:
                return torch.mm(g, self.weight.data, out=out)
            dx = as_dtype(torch.mm(g, self.weight.data), dtype)
            return dx if out is None else out.copy_(dx)
        wide = padded(g, emulate)
        if self.factor is None or folded:
            g_q = as_operand(wide, row_g, recipe, True, dtype)
        else:
            g_q = _quantize_folded(wide, self.factor, row_g, OperandRecipe.decode(recipe))
        # dx = g · w
        return multiply(g_q, self.weight, None, dtype, [], fast, emulate, out=out)[: g.shape[0]]


def turn(weight: Quantized) -> Turned:
    """What `side_by_side` gave."""
    if is_wide(weight):
        return Turned(weight, None)
    data, scale = transpose_bytes(weight.data), weight.scale
    if scale.dim() and constant_along_k(weight):
        return Turned(Quantized(data, _ones(data.shape[0], scale.device)), scale.view(-1))
    return Turned(Quantized(data, scale.t().contiguous()), None)


@cache
def _ones(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, 1, dtype=torch.float32, device=device)


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
    x_q = as_operand(padded(x, emulate or not recipe_x), row_x, recipe_x, record, dtype)
    # y = x · wᵀ
    w = side_by_side(weights, scales, recipe_x, dtype)
    return first_rows(times(x_q, w, bias, dtype, fast, emulate), x.shape[0])


def _frozen_linear_backward(
    g: Tensor, row_g: Tensor, weights: list[Tensor], scales: list[Tensor], recipe_g: str, dtype: torch.dtype,
    fast: bool, emulate: bool,
) -> Tensor:  # fmt: skip
    turned = turn(side_by_side(weights, scales, recipe_g, g.dtype))
    return turned.dgrad(g, row_g, recipe_g, dtype, fast, emulate)


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


for _name, _implementation, _fake in (
    ("frozen_linear", _frozen_linear, _frozen_linear_fake),
    ("frozen_linear_backward", _frozen_linear_backward, _frozen_linear_backward_fake),
):
    install(_LIBRARY, _name, _implementation, _fake)
