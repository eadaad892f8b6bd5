"""Linears that share one input, in FP8, as one product: y = x · [w₁; w₂; …]ᵀ + b.

Shapes: M tokens, K inputs, N outputs of all the weights together.

    forward    x_MK → xq_MK, xqT_KM        y_MN  = xq · wqᵀ
    backward   g_MN → gq_MN, gqT_NM        dx_MK = gq · wq
                                           dw_NK = gqT · xqTᵀ
    kept       xqT_KM in FP8, and the weights themselves, which are in memory anyway and quantised anew

A linear alone is a group of one; q, k and v are a group of three with one quantised input and one GEMM. Each weight
stays a Parameter of its own: quantising writes a new buffer anyway, so it writes them side by side. Per tensor the
group has one scale, from the amax of all, because dx contracts over all of N.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import ops_linear
from octavo.numerics.quantize import Quantized
from octavo.ops import Product

Rows = tuple[Tensor, Tensor, Tensor]


def fp8_linears(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, product: Product, rows: Rows) -> Tensor:
    """`x[..., K]` times the weights `[Nᵢ, K]` side by side, `[..., N]`. `rows`: scaling state of x, w and g."""
    # Inside an autograd function nothing tells whether gradients are enabled.
    keep_x = torch.is_grad_enabled() and any(w.requires_grad for w in weights)
    y = _FP8Linears.apply(x.reshape(-1, x.shape[-1]), bias, product, keep_x, *rows, *weights)
    return y.reshape(*x.shape[:-1], y.shape[-1])


class _FP8Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        product: Product,
        keep_x: bool,
        row_x: Tensor,
        row_w: Tensor,
        row_g: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        y, x_columns = ops_linear.linear(x, weights, bias, (row_x, row_w), product, keep=keep_x)
        ctx.save_for_backward(*x_columns, *weights)
        # Not saved as tensors: rows change with every use, which autograd's version check would take for a mistake.
        ctx.rows = (row_w, row_g)
        ctx.product = product
        ctx.like = (x.dtype, bias.dtype if bias is not None else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, *weights = ctx.saved_tensors
        product, (row_w, row_g) = ctx.product, ctx.rows
        x_dtype, bias_dtype = ctx.like
        needs_x, needs_bias, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[7:]
        dx = dbias = None
        dws: list[Tensor | None] = [None] * len(weights)
        if needs_x or any(needs_w):
            x = Quantized(x_data, x_scale)
            needs = {"needs_x": needs_x, "needs_w": any(needs_w), "dtype": x_dtype}
            dx, dw = ops_linear.linear_backward(g, x, weights, (row_g, row_w), product, **needs)
            if any(needs_w):
                parts = dw.split([w.shape[0] for w in weights])
                dws = [part if needed else None for part, needed in zip(parts, needs_w, strict=True)]
        if needs_bias:
            dbias = g.float().sum(dim=0).to(bias_dtype)
        return dx if needs_x else None, dbias, None, None, None, None, None, *dws
