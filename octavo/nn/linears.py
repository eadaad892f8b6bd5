"""Linears that share one input, in FP8, as one product: y = x · [w₁; w₂; …]ᵀ + b.

Shapes: M tokens, K inputs, N outputs of all the weights together.

    forward    x_MK → xq_MK, xqT_KM        y_MN  = xq · wqᵀ
    backward   g_MN → gq_MN, gqT_NM        dx_MK = gq · wq
                                           dw_NK = gqT · xqTᵀ
    kept       xqT_KM in FP8, and the weights themselves, which are in memory anyway and quantised anew; unless they are
               held in FP8 only (`held.py`): then wq_NK is all there is

With a norm before it, x = norm(h), and h need not be kept: xq_MK serves the norm's backward, too (`numerics/norm.py`),
and is transposed when its turn comes. That takes one scale for all of x.

A linear alone is a group of one; q, k and v are a group of three with one quantised input and one GEMM. Each weight
stays a Parameter of its own: quantising writes a new buffer anyway, so it writes them side by side. Per tensor the
group has one scale, from the amax of all, because dx contracts over all of N.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.nn.norm import back_through, normed, parts_of
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized
from octavo.ops import Product
from octavo.ops import linear as ops_linear

Rows = tuple[Tensor, Tensor, Tensor]


def fp8_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    product: Product,
    rows: Rows,
    *,
    norm: Norm | None = None,
    given: Sequence[Tensor] = (),
) -> Tensor:
    """`x[..., K]` times the weights `[Nᵢ, K]` side by side, `[..., N]`. `rows`: scaling state of x, w and g.

    `norm`: comes before all that. `given`: the weights in FP8, where that is what they are held in; the second of
    `rows` is then their scale, and `weights` are there for their gradients alone.
    """
    keep = how_to_keep(x, weights, norm)
    y = _FP8Linears.apply(
        x.reshape(-1, x.shape[-1]), bias, *parts_of(norm), product, keep, *rows, len(weights), *weights, *given
    )
    return y.reshape(*x.shape[:-1], y.shape[-1])


def given_weights(linears: Sequence[Any]) -> list[Tensor]:
    """The `given` of several `FP8Linear`, of which not all need be held in FP8; nothing if none is."""
    if not any(linear.given for linear in linears):
        return []
    return [linear.given[0] if linear.given else linear.weight for linear in linears]


def how_to_keep(x: Tensor, weights: Sequence[Tensor], norm: Norm | None) -> str:
    """See `ops_linear.linear`. Not asked inside an autograd function: there, gradients are never enabled."""
    if not torch.is_grad_enabled():
        return ""
    if norm is not None and (x.requires_grad or norm.weight.requires_grad):
        return "rows"
    return "columns" if any(w.requires_grad for w in weights) else ""


class _FP8Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_eps: float | None,
        product: Product,
        keep: str,
        row_x: Tensor,
        row_w: Tensor,
        row_g: Tensor,
        count: int,
        *weights: Tensor,
    ) -> Tensor:
        weights = weights[count:] or weights
        x, inverse = normed(x, norm_weight, norm_eps)
        y, kept, w_scale = ops_linear.linear(x, weights, bias, (row_x, row_w), product, keep=keep)
        ctx.save_for_backward(*kept, w_scale, inverse, norm_weight, *weights)
        # Not saved as tensors: rows change with every use, which autograd's version check would take for a mistake.
        ctx.rows = (row_w, row_g)
        ctx.product, ctx.keep, ctx.eps = product, keep, norm_eps
        ctx.like = (x.dtype, bias.dtype if bias is not None else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, w_scale, inverse, norm_weight, *weights = ctx.saved_tensors
        product, (row_w, row_g) = ctx.product, ctx.rows
        row_w = w_scale if w_scale.numel() else row_w
        x_dtype, bias_dtype = ctx.like
        needs_x, needs_bias, needs_norm = ctx.needs_input_grad[:3]
        needs_w = ctx.needs_input_grad[10 : 10 + len(weights)]
        x = Quantized(x_data, x_scale)
        dx = dnorm = dbias = None
        dws: list[Tensor | None] = [None] * len(weights)
        if needs_x or needs_norm or any(needs_w):
            dx, dw = ops_linear.linear_backward(
                g, x, weights, (row_g, row_w), product, x_is_rows=ctx.keep == "rows", needs_x=needs_x or needs_norm,
                needs_w=any(needs_w), dtype=x_dtype,
            )  # fmt: skip
            if any(needs_w):
                parts = dw.split([w.shape[0] for w in weights])
                dws = [part if needed else None for part, needed in zip(parts, needs_w, strict=True)]
            dx, dnorm = back_through(dx, x, norm_weight, ctx.eps, inverse, needs=(needs_x, needs_norm))
        if needs_bias:
            dbias = g.float().sum(dim=0).to(bias_dtype)
        unused = len(ctx.needs_input_grad) - 10 - len(dws)
        return dx, dbias, dnorm, *[None] * 7, *dws, *[None] * unused
