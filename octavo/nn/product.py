"""One matrix product in FP8, forward and backward.

Shapes: M rows of the left operand, K contracted, N columns of the right one; leading dimensions broadcast.

    forward    y_MN = a_MK · b_KN       a quantised along K, b along K
    backward   da_MK = g_MN · b_KNᵀ     g quantised along N, b along N
               db_KN = a_MKᵀ · g_MN     a quantised along M, g along M

All three are NT products (both operands contiguous along the contracted dimension), so each operand is needed in two
layouts. Saved for backward: the FP8 copy of an activation, never its high-precision value; a weight itself, which is in
memory anyway and is quantised again. `b_is_nk`: b arrives as `[N, K]`, like the weight of a linear. The configuration
says where the tensor cores' fast accumulation may be used.

A transposed view as b, `a @ k.mT`, is used as the `[N, K]` it is a view of, without a copy. Where it is a view of a
itself, `q @ q.mT`, b is None below: one quantised q serves as both operands, and both gradients are one product:

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
    a: Tensor, b: Tensor, bias: Tensor | None, product: Product, state: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Compute `a @ b + bias` (`a @ bᵀ` if `b_is_nk`) in FP8, forward and backward.

    `state`: the scaling state of a, b and g.
    """
    if b.dim() == 2 and a.dim() > 2:
        # With one right operand for all of them, the leading dimensions are just more rows.
        y = _FP8Product.apply(a.reshape(-1, a.shape[-1]), b, bias, product, *state)
        return y.reshape(*a.shape[:-1], y.shape[-1])
    if _saves_a_copy(a, product) and bias is None and not product.b_is_nk and _is_own_transpose(a, b):
        return _FP8Product.apply(a, None, None, product, *state)
    if not product.b_is_nk and b.stride(-1) != 1 and b.stride(-2) == 1:
        return _FP8Product.apply(a, b.mT, bias, replace(product, b_is_nk=True), *state)
    return _FP8Product.apply(a, b, bias, product, *state)


def _saves_a_copy(a: Tensor, product: Product) -> bool:
    """Return True where one quantised operand may replace two: for speed and memory, with sums in another order."""
    return a.device.type == "cuda" and not product.emulate and not product.a_is_weight


def _is_own_transpose(a: Tensor, b: Tensor) -> bool:
    """Return True if b is `a.mT`, a view of the same tensor, so that both gradients go to that tensor."""
    if a.dim() < 2 or b.shape != a.mT.shape or b.stride() != a.mT.stride() or a.requires_grad != b.requires_grad:
        return False
    # Both have as many elements as the tensor they are views of, so they start at the same one. (`torch.compile` has no
    # storage offsets.)
    return b._base is a or (a._base is not None and b._base is a._base and a.numel() == a._base.numel())


def _save_weight(w: Tensor, quantized: Quantized, recipe: OperandRecipe) -> tuple[Tensor, Tensor | None]:
    """Return what is saved of a weight: itself and, if its scale is delayed, the scale that forward used."""
    return w, quantized.scale if recipe.delayed else None


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor | None,
        bias: Tensor | None,
        product: Product,
        a_state: Tensor,
        b_state: Tensor,
        g_state: Tensor,
    ) -> Tensor:
        ctx.product = product
        # Not saved as tensors: every use changes the scaling state, which autograd's version check would report as an
        # error.
        ctx.state = (a_state, b_state, g_state)
        how: dict[str, Any] = {"out_dtype": product.out_dtype, "fast": product.fast_forward, "emulate": product.emulate}
        a_needs_grad, b_needs_grad = ctx.needs_input_grad[:2]
        save_a = (a_needs_grad if b is None else b_needs_grad) and not product.a_is_weight
        a_q = ops.quantize(a, a_state, product.a, record=product.record, layout="both" if save_a else "rows")
        if b is None:
            if product.record:
                b_state.copy_(a_state)
            ctx.save_for_backward(*(a_q[1] if save_a else (None, None)))
            ctx.like = (a.shape, a.dtype)
            # y = a · aᵀ
            return ops.gemm_nt(a_q[0], a_q[0], batch=a.shape[:-2], **how)

        save_b = a_needs_grad and not product.b_is_weight
        b_forward, ctx.b_backward = ("rows", "columns") if product.b_is_nk else ("columns", "rows")
        b_q = ops.quantize(b, b_state, product.b, record=product.record, layout="both" if save_b else b_forward)
        b_nk, b_kn = (b_q[0], b_q[-1]) if product.b_is_nk else (b_q[-1], b_q[0])
        saved_a = tuple(a_q[1]) if save_a else _save_weight(a, a_q[0], product.a) if b_needs_grad else (None, None)
        saved_b = tuple(b_kn) if save_b else _save_weight(b, b_q[0], product.b) if a_needs_grad else (None, None)
        ctx.save_for_backward(*saved_a, *saved_b)
        ctx.like = (a.shape, a.dtype, b.shape, b.dtype, bias.dtype if bias is not None else None)
        # y = a · b
        return ops.gemm_nt(a_q[0], b_nk, bias=bias, batch=torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        product, (a_state, b_state, g_state) = ctx.product, ctx.state
        a_needs_grad, b_needs_grad, bias_needs_grad = ctx.needs_input_grad[:3]
        da = db = dbias = None
        how = {"fast": product.fast_backward, "emulate": product.emulate}
        a_data, a_scale, *saved_b = ctx.saved_tensors
        if not saved_b:
            a_shape, a_dtype = ctx.like
            g_q = ops.quantize(g + g.mT, g_state, product.g, record=True, layout="rows")
            # da = (g + gᵀ) · a
            da = ops.gemm_nt(g_q[0], Quantized(a_data, a_scale), out_dtype=a_dtype, batch=a_shape[:-2], **how)
            return da, None, None, None, None, None, None

        b_data, b_scale = saved_b
        a_shape, a_dtype, b_shape, b_dtype, bias_dtype = ctx.like
        if a_needs_grad or b_needs_grad:
            layout = "both" if a_needs_grad and b_needs_grad else "rows" if a_needs_grad else "columns"
            g_q = ops.quantize(g, g_state, product.g, record=True, layout=layout)
        if a_needs_grad:
            b_kn = Quantized(b_data, b_scale)
            if product.b_is_weight:
                how_b: dict[str, Any] = {"record": False, "layout": ctx.b_backward, "scale": b_scale}
                b_kn = ops.quantize(b_data, b_state, product.b, **how_b)[0]
            # da = g · bᵀ
            da = ops.gemm_nt(g_q[0], b_kn, out_dtype=a_dtype, batch=a_shape[:-2], **how)
        if b_needs_grad:
            a_km = Quantized(a_data, a_scale)
            if product.a_is_weight:
                how_a: dict[str, Any] = {"record": False, "layout": "columns", "scale": a_scale}
                a_km = ops.quantize(a_data, a_state, product.a, **how_a)[0]
            # db = aᵀ · g, in the layout b came in
            left, right = (g_q[-1], a_km) if product.b_is_nk else (a_km, g_q[-1])
            db = ops.gemm_nt(left, right, out_dtype=b_dtype, batch=b_shape[:-2], **how)
        if bias_needs_grad:
            dbias = g.float().flatten(0, -2).sum(dim=0).to(bias_dtype)
        return da, db, dbias, None, None, None, None
