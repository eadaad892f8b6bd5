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

An operand may come with scales of its own (`scales`): it is in FP8 already, or it has several of them. It is saved as a
weight is. Scales along K are of no use along M or N: for those products an operand with several scales is quantised
again, with one per channel.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import ops
from octavo.nn.shapes import with_leading
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import format_of
from octavo.numerics.quantize import Quantized, dequantize, quantize_by
from octavo.ops import ProductSpec


def fp8_product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    product: ProductSpec,
    state: tuple[Tensor, Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Compute `a @ b + bias` (`a @ bᵀ` if `b_is_nk`) in FP8, forward and backward.

    `state`: the scaling state of a, b and g. `scales`: those that a and b come with, as `[M, K]` and `[N, K]`; both
    are then called weights.
    """
    if b.dim() == 2 and a.dim() > 2:
        # With one right operand for all of them, the leading dimensions are just more rows.
        y = _FP8Product.apply(a.reshape(-1, a.shape[-1]), b, bias, product, *state, *scales)
        return with_leading(y, a.shape[:-1])
    if _saves_a_copy(a, product) and bias is None and not product.b_is_nk and _is_own_transpose(a, b):
        y = _FP8Product.apply(a, None, None, product, *state, *scales)
    elif not product.b_is_nk and b.stride(-1) != 1 and b.stride(-2) == 1:
        y = _FP8Product.apply(a, b.mT, bias, replace(product, b_is_nk=True), *state, *scales)
    else:
        y = _FP8Product.apply(a, b, bias, product, *state, *scales)
    return with_leading(y, y.shape[:-1])


def _saves_a_copy(a: Tensor, product: ProductSpec) -> bool:
    """Return True where one quantised operand may replace two: for speed and memory, with sums in another order."""
    return a.device.type == "cuda" and not product.emulate and not product.a_is_weight


def _is_own_transpose(a: Tensor, b: Tensor) -> bool:
    """Return True if b is `a.mT`, a view of the same tensor, so that both gradients go to that tensor."""
    if a.dim() < 2 or b.shape != a.mT.shape or b.stride() != a.mT.stride() or a.requires_grad != b.requires_grad:
        return False
    # Both have as many elements as the tensor they are views of, so they start at the same one. (`torch.compile` has no
    # storage offsets.)
    return b._base is a or (a._base is not None and b._base is a._base and a.numel() == a._base.numel())


def _as_weight(
    w: Tensor, quantized: Quantized, recipe: OperandRecipe, given: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return what is saved of a weight: itself and, if its scale was given or is delayed, the one that forward used."""
    return w, given if given is not None else quantized.scale if recipe.delayed else None


def _quantize_weight(
    w: Tensor, state: Tensor, recipe: OperandRecipe, layout: str, scale: Tensor | None, is_given: bool
) -> Quantized:
    """Quantise a weight again for backward. `scale`: what `_as_weight` saved."""
    if scale is not None and is_given:
        return _given_columns(w, state, recipe, scale)
    return ops.quantize(w, state, recipe, record=False, layout=layout, scale=scale)[0]


def _given_rows(x: Tensor, recipe: OperandRecipe, scale: Tensor) -> Quantized:
    """Return an operand that comes with its scale, or with several."""
    x_q = Quantized(x.contiguous(), scale) if x.element_size() == 1 else quantize_by(x, scale, recipe.format)
    return Quantized(x_q.data, ops.pack_scale(x_q.scale))


def _given_columns(x: Tensor, state: Tensor, recipe: OperandRecipe, scale: Tensor) -> Quantized:
    """Return the transpose of an operand that comes with its scale, which `state` has, or with several."""
    single, is_fp8 = not scale.dim(), x.element_size() == 1
    format = format_of(x.dtype) if is_fp8 else recipe.format
    transposed = OperandRecipe(format, "tensor" if single else "channel", delayed=single)
    value = dequantize(x, scale) if is_fp8 else x
    return ops.quantize(value, state, transposed, record=False, layout="columns")[0]


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor | None,
        bias: Tensor | None,
        product: ProductSpec,
        a_state: Tensor,
        b_state: Tensor,
        g_state: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
    ) -> Tensor:
        ctx.product, ctx.is_given = product, (a_scale is not None, b_scale is not None)
        # Not saved as tensors: every use changes the scaling state, which autograd's version check would report as an
        # error.
        ctx.state = (a_state, b_state, g_state)
        how: dict[str, Any] = {"out_dtype": product.out_dtype, "fast": product.fast_forward, "emulate": product.emulate}
        a_needs_grad, b_needs_grad = ctx.needs_input_grad[:2]
        save_a = (a_needs_grad if b is None else b_needs_grad) and not product.a_is_weight
        if a_scale is None:
            a_q = ops.quantize(a, a_state, product.a, record=product.record, layout="both" if save_a else "rows")
        else:
            a_q = [_given_rows(a, product.a, a_scale)]
        if b is None:
            if product.record:
                b_state.copy_(a_state)
            ctx.save_for_backward(*(a_q[1] if save_a else (None, None)))
            ctx.like = (a.shape, a.dtype)
            # y = a · aᵀ
            return ops.gemm_nt(*a_q[0], *a_q[0], bias=None, batch=list(a.shape[:-2]), **how)

        save_b = a_needs_grad and not product.b_is_weight
        b_forward, ctx.b_backward = ("rows", "columns") if product.b_is_nk else ("columns", "rows")
        if b_scale is None:
            b_q = ops.quantize(b, b_state, product.b, record=product.record, layout="both" if save_b else b_forward)
        else:
            b_q = [_given_rows(b, product.b, b_scale)]
        b_nk, b_kn = (b_q[0], b_q[-1]) if product.b_is_nk else (b_q[-1], b_q[0])
        weight_a, weight_b = _as_weight(a, a_q[0], product.a, a_scale), _as_weight(b, b_q[0], product.b, b_scale)
        saved_a = tuple(a_q[1]) if save_a else weight_a if b_needs_grad else (None, None)
        saved_b = tuple(b_kn) if save_b else weight_b if a_needs_grad else (None, None)
        ctx.save_for_backward(*saved_a, *saved_b)
        ctx.like = (a.shape, a.dtype, b.shape, b.dtype, bias.dtype if bias is not None else None)
        # y = a · b
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return ops.gemm_nt(*a_q[0], *b_nk, bias=bias, batch=list(batch), **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        product, (a_state, b_state, g_state) = ctx.product, ctx.state
        a_needs_grad, b_needs_grad, bias_needs_grad = ctx.needs_input_grad[:3]
        da = db = dbias = None
        how: dict[str, Any] = {"bias": None, "fast": product.fast_backward, "emulate": product.emulate}
        a_data, a_scale, *saved_b = ctx.saved_tensors
        if not saved_b:
            a_shape, a_dtype = ctx.like
            g_q = ops.quantize(g + g.mT, g_state, product.g, record=True, layout="rows")
            # da = (g + gᵀ) · a
            da = ops.gemm_nt(*g_q[0], a_data, a_scale, out_dtype=a_dtype, batch=list(a_shape[:-2]), **how)
            return da, *[None] * 8

        b_data, b_scale = saved_b
        a_shape, a_dtype, b_shape, b_dtype, bias_dtype = ctx.like
        if a_needs_grad or b_needs_grad:
            layout = "both" if a_needs_grad and b_needs_grad else "rows" if a_needs_grad else "columns"
            g_q = ops.quantize(g, g_state, product.g, record=True, layout=layout)
        if a_needs_grad:
            b_kn = Quantized(b_data, b_scale)
            if product.b_is_weight:
                b_kn = _quantize_weight(b_data, b_state, product.b, ctx.b_backward, b_scale, ctx.is_given[1])
            # da = g · bᵀ
            da = ops.gemm_nt(*g_q[0], *b_kn, out_dtype=a_dtype, batch=list(a_shape[:-2]), **how)
        if b_needs_grad:
            a_km = Quantized(a_data, a_scale)
            if product.a_is_weight:
                a_km = _quantize_weight(a_data, a_state, product.a, "columns", a_scale, ctx.is_given[0])
            # db = aᵀ · g, in the layout b came in
            left, right = (g_q[-1], a_km) if product.b_is_nk else (a_km, g_q[-1])
            db = ops.gemm_nt(*left, *right, out_dtype=b_dtype, batch=list(b_shape[:-2]), **how)
        if bias_needs_grad:
            dbias = g.float().flatten(0, -2).sum(dim=0).to(bias_dtype)
        return da, db, dbias, *[None] * 6
