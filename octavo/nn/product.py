"""One matrix product, there and back, in FP8.

Shapes: M rows of the left operand, K contracted, N columns of the right one; leading dimensions broadcast.

    forward    y_MN = a_MK · b_KN       a quantised along K, b along K
    backward   da_MK = g_MN · b_KNᵀ     g quantised along N, b along N
               db_KN = a_MKᵀ · g_MN     a quantised along M, g along M

All three are NT products (both operands contiguous along the contracted dimension), so each operand is wanted in two
layouts. Kept for backward: the FP8 copy of an activation, never its high-precision value; a weight itself, quantised
anew, because it is in memory anyway. `b_is_nk` says that b arrives as `[N, K]`, as the weight of a linear does.
The configuration says where the tensor cores' fast accumulation may be used.

A transposed view as b, `a @ k.mT`, is taken as the `[N, K]` it is a view of: no copy that lays it out anew. And where
it is a view of a itself, `q @ q.mT`, one quantised q serves as both, and both gradients are one product:

    forward    y_MM = a_MK · a_MKᵀ
    backward   da_MK = (g_MM + g_MMᵀ) · a_MK

The scaling state of b is then a copy of that of a.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import ops
from octavo.numerics.config import OperandRecipe
from octavo.numerics.quantize import Quantized
from octavo.ops import Product


def fp8_product(
    a: Tensor, b: Tensor, bias: Tensor | None, product: Product, rows: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """`a @ b + bias` (`a @ bᵀ` if `b_is_nk`) with FP8 forward and backward. `rows`: scaling state of a, b and g."""
    if b.dim() == 2 and a.dim() > 2:
        # With one right operand for all of them, the leading dimensions are just more rows.
        y = _FP8Product.apply(a.reshape(-1, a.shape[-1]), b, bias, product, *rows)
        return y.reshape(*a.shape[:-1], y.shape[-1])
    if _saves_a_copy(a, product) and bias is None and not product.b_is_nk and _is_own_transpose(a, b):
        return _FP8SelfProduct.apply(a, product, *rows)
    if not product.b_is_nk and b.stride(-1) != 1 and b.stride(-2) == 1:
        return _FP8Product.apply(a, b.mT, bias, replace(product, b_is_nk=True), *rows)
    return _FP8Product.apply(a, b, bias, product, *rows)


def _saves_a_copy(a: Tensor, product: Product) -> bool:
    """One quantised operand in place of two is for speed and memory: the values are the same, sums in another order."""
    return a.device.type == "cuda" and not product.emulate and not product.a_is_weight


def _is_own_transpose(a: Tensor, b: Tensor) -> bool:
    """Whether b is `a.mT`: a view of the same tensor, so that what reaches either as a gradient reaches that one."""
    if a.dim() < 2 or b.shape != a.mT.shape or b.stride() != a.mT.stride() or a.requires_grad != b.requires_grad:
        return False
    # As many elements as the tensor both are views of: then they start at the same one. (`torch.compile` knows no
    # storage offsets.)
    return b._base is a or (a._base is not None and b._base is a._base and a.numel() == a._base.numel())


def _weight(w: Tensor, quantized: Quantized, recipe: OperandRecipe) -> tuple[Tensor, Tensor | None]:
    """A weight as it is kept: itself, and if that came from its row the scale that forward used."""
    return w, quantized.scale if recipe.delayed else None


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        product: Product,
        row_a: Tensor,
        row_b: Tensor,
        row_g: Tensor,
    ) -> Tensor:
        a_needs_grad, b_needs_grad = ctx.needs_input_grad[:2]
        keep_a = b_needs_grad and not product.a_is_weight
        keep_b = a_needs_grad and not product.b_is_weight
        b_forward, b_backward = ("rows", "columns") if product.b_is_nk else ("columns", "rows")

        a_q = ops.quantize(a, row_a, product.a, record=product.record, layout="both" if keep_a else "rows")
        b_q = ops.quantize(b, row_b, product.b, record=product.record, layout="both" if keep_b else b_forward)
        b_nk, b_kn = (b_q[0], b_q[-1]) if product.b_is_nk else (b_q[-1], b_q[0])
        # y = a · b
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        y = ops.gemm_nt(
            a_q[0],
            b_nk,
            bias=bias,
            out_dtype=product.out_dtype,
            batch=batch,
            fast=product.fast_forward,
            emulate=product.emulate,
        )

        saved_a = tuple(a_q[1]) if keep_a else _weight(a, a_q[0], product.a) if b_needs_grad else (None, None)
        saved_b = tuple(b_kn) if keep_b else _weight(b, b_q[0], product.b) if a_needs_grad else (None, None)
        ctx.save_for_backward(*saved_a, *saved_b)
        # Not saved as tensors: rows change with every use, which autograd's version check would take for a mistake.
        ctx.rows = (row_a, row_b, row_g)
        ctx.product = product
        ctx.b_backward = b_backward
        ctx.like = (a.shape, a.dtype, b.shape, b.dtype, bias.dtype if bias is not None else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a_data, a_scale, b_data, b_scale = ctx.saved_tensors
        product, (row_a, row_b, row_g) = ctx.product, ctx.rows
        a_shape, a_dtype, b_shape, b_dtype, bias_dtype = ctx.like
        a_needs_grad, b_needs_grad, bias_needs_grad = ctx.needs_input_grad[:3]
        da = db = dbias = None
        how = {"fast": product.fast_backward, "emulate": product.emulate}

        if a_needs_grad or b_needs_grad:
            layout = "both" if a_needs_grad and b_needs_grad else "rows" if a_needs_grad else "columns"
            g_q = ops.quantize(g, row_g, product.g, record=True, layout=layout)
        if a_needs_grad:
            b_kn = Quantized(b_data, b_scale)
            if product.b_is_weight:
                how_b: dict[str, Any] = {"record": False, "layout": ctx.b_backward, "scale": b_scale}
                b_kn = ops.quantize(b_data, row_b, product.b, **how_b)[0]
            # da = g · bᵀ
            da = ops.gemm_nt(g_q[0], b_kn, out_dtype=a_dtype, batch=a_shape[:-2], **how)
        if b_needs_grad:
            a_km = Quantized(a_data, a_scale)
            if product.a_is_weight:
                how_a: dict[str, Any] = {"record": False, "layout": "columns", "scale": a_scale}
                a_km = ops.quantize(a_data, row_a, product.a, **how_a)[0]
            # db = aᵀ · g, in the layout b came in
            left, right = (g_q[-1], a_km) if product.b_is_nk else (a_km, g_q[-1])
            db = ops.gemm_nt(left, right, out_dtype=b_dtype, batch=b_shape[:-2], **how)
        if bias_needs_grad:
            dbias = g.float().flatten(0, -2).sum(dim=0).to(bias_dtype)
        return da, db, dbias, None, None, None, None


class _FP8SelfProduct(torch.autograd.Function):
    """a @ a.mT."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, product: Product, row_a: Tensor, row_b: Tensor, row_g: Tensor) -> Tensor:
        keep = ctx.needs_input_grad[0]
        a_q = ops.quantize(a, row_a, product.a, record=product.record, layout="both" if keep else "rows")
        if product.record:
            row_b.copy_(row_a)
        # y = a · aᵀ
        y = ops.gemm_nt(
            a_q[0],
            a_q[0],
            out_dtype=product.out_dtype,
            batch=a.shape[:-2],
            fast=product.fast_forward,
            emulate=product.emulate,
        )
        ctx.save_for_backward(*(a_q[1] if keep else (None, None)))
        ctx.row_g = row_g
        ctx.product = product
        ctx.like = (a.shape, a.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a_km = Quantized(*ctx.saved_tensors)
        product, (a_shape, a_dtype) = ctx.product, ctx.like
        g_q = ops.quantize(g + g.mT, ctx.row_g, product.g, record=True, layout="rows")[0]
        # da = (g + gᵀ) · a
        how = {"fast": product.fast_backward, "emulate": product.emulate}
        da = ops.gemm_nt(g_q, a_km, out_dtype=a_dtype, batch=a_shape[:-2], **how)
        return da, None, None, None, None
