"""Products in FP8 as plain functions, with gradients: `fp8_linear` and `fp8_matmul`.

They compute the products of `FP8Linear` without its state: forward in E4M3, the gradient in E5M2, one scale per tensor,
by kernels on a GPU and by the specification elsewhere. A scale may be given for each operand, as a factor or as
returned by `FP8ScalingManager.get_scale` (see `numerics/multiplier.py`); without one, and for the gradient, the scale
is computed from the tensor.

`fp8_linear` also takes operands that are in FP8 already, and scales of rows or blocks. FP8 data gets no gradient. The
gradients of the others contract along another dimension than forward, so an operand with more than one scale is
quantised again for them, with one scale per channel.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import ops
from octavo.nn.autocast import is_weight
from octavo.nn.linear_function import linear
from octavo.nn.product import fp8_product
from octavo.numerics.config import FP8_FORMATS, OperandRecipe
from octavo.numerics.formats import FORMATS, Format, format_of, get_format
from octavo.numerics.multiplier import as_factor, checked_factor
from octavo.numerics.quantize import Quantized, dequantize, quantize_by
from octavo.numerics.scaling import SCALE, new_states
from octavo.ops import Product
from octavo.ops.linear import LinearSpec
from octavo.ops.weight import Weight

Scale = Tensor | float | None


def fp8_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Scale = None,
    scale_b: Scale = None,
    *,
    format: Format | str = "HYBRID",
    granularity: str = "tensor",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `a[..., M, K] @ b[..., K, N]` in FP8, forward and backward. The result has the dtype of `a` by default.

    `format`: `HYBRID` (E4M3, gradients in E5M2), or one for all three. Given scales apply to whole tensors.
    """
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"fp8_matmul takes [..., M, K] and [..., K, N]; got {tuple(a.shape)} and {tuple(b.shape)}")
    if granularity != "tensor" and (scale_a is not None or scale_b is not None):
        raise ValueError(f"granularity={granularity!r} with a scale: scales that are given are of whole tensors")
    dtype = out_dtype or a.dtype
    if a.numel() == 0 or b.numel() == 0:
        return (a @ b.to(a.dtype)).to(dtype)  # nothing to quantise; keeps the graph
    forward, backward = _formats(format)
    product = Product(
        a=OperandRecipe(forward, granularity, delayed=scale_a is not None),
        b=OperandRecipe(forward, granularity, delayed=scale_b is not None),
        g=OperandRecipe(backward, granularity),
        out_dtype=_at_most_fp32(dtype),
        a_is_weight=is_weight(a),
        b_is_weight=is_weight(b),
        record=False,
    )
    factors = [_one(scale_a, a, forward, "scale_a"), _one(scale_b, b, forward, "scale_b")]
    y = fp8_product(_not_double(a), _not_double(b), None, product, _state(a.device, factors))
    return _nan_if_mistaken(y, factors).to(dtype)


def fp8_linear(
    x: Tensor,
    w: Tensor,
    scale_x: Scale = None,
    scale_w: Scale = None,
    bias: Tensor | None = None,
    *,
    format: Format | str = "HYBRID",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `x[..., K] · w[N, K]ᵀ + bias` in FP8, forward and backward.

    The result has the dtype of `x` by default, FP32 for FP8 data. FP8 tensors are used as they are, with their scales;
    others are quantised with the given scale, or with their own. `format`: `HYBRID` (E4M3, gradients in E5M2), or one
    for all three.
    """
    forward, backward = _formats(format)
    if x.dim() < 1 or w.dim() != 2 or x.shape[-1] != w.shape[-1]:
        raise ValueError(f"fp8_linear takes x[..., K] and w[N, K]; got {tuple(x.shape)} and {tuple(w.shape)}")
    dtype = out_dtype or (torch.float32 if x.element_size() == 1 else x.dtype)
    product = Product(
        a=OperandRecipe(forward, delayed=scale_x is not None),
        b=OperandRecipe(forward, delayed=scale_w is not None),
        g=OperandRecipe(backward),
        out_dtype=_at_most_fp32(dtype),
        b_is_nk=True,
        record=False,
    )
    factors = [_factor(scale_x, x, forward, "scale_x"), _factor(scale_w, w, forward, "scale_w")]
    if x.numel() == 0 and x.element_size() > 1 and w.element_size() > 1:
        return torch.nn.functional.linear(x, w.to(x.dtype), bias).to(dtype)  # nothing to quantise; keeps the graph
    x, w = _not_double(x), _not_double(w)
    bias = bias if bias is None else _not_double(bias)
    if all(t.element_size() > 1 and (f is None or not f.dim()) for t, f in zip((x, w), factors, strict=True)):
        state_x, state_w, state_g = _state(x.device, factors)
        spec = LinearSpec(product.a, product.b, product.g, product.out_dtype, record=False)
        y = linear(x, Weight([w], state=state_w), spec, (state_x, state_g), bias=bias)
        return _nan_if_mistaken(y, factors).to(dtype)
    return _GivenLinear.apply(x, w, bias, *factors, product).to(dtype)


class _GivenLinear(torch.autograd.Function):
    """A linear with operands that are in FP8 already, or that have several scales."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        scale_x: Tensor | None,
        scale_w: Tensor | None,
        product: Product,
    ) -> Tensor:
        x_q, w_q = _rows_of(x, scale_x, product.a), _rows_of(w, scale_w, product.b)
        flat = Quantized(x_q.data.reshape(-1, x.shape[-1]), _flatten_rows(x_q.scale, x.shape))
        # y = x · wᵀ
        y = _gemm(flat, w_q, product.out_dtype, product.fast_forward, bias)
        ctx.save_for_backward(x, w, scale_x, scale_w)
        ctx.product, ctx.bias_dtype = product, None if bias is None else bias.dtype
        return y.reshape(*x.shape[:-1], w.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, scale_x, scale_w = ctx.saved_tensors
        product = ctx.product
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx = dw = None
        g_MN = g.reshape(-1, g.shape[-1])
        if needs_x or needs_w:
            g_q = ops.quantize(g_MN, new_states(device=g.device), product.g, record=False, layout="both")
        if needs_x:
            # dx = g · w
            dx = _gemm(g_q[0], _columns_of(w, scale_w, product.b), x.dtype, product.fast_backward).reshape(x.shape)
        if needs_w:
            # dw = gᵀ · x
            dw = _gemm(g_q[1], _columns_of(x, scale_x, product.a), w.dtype, product.fast_backward)
        dbias = g_MN.float().sum(dim=0).to(ctx.bias_dtype) if needs_bias else None
        return dx, dw, dbias, None, None, None


def _formats(format: Format | str) -> tuple[Format, Format]:
    """Return the format of both operands, and that of the gradient."""
    if isinstance(format, Format):
        return format, format
    name = str(format).upper()
    if name == "HYBRID":
        forward, _, backward = FP8_FORMATS[name]
        return get_format(forward), get_format(backward)
    if name not in FORMATS:
        raise ValueError(f"format={format!r}: choose one of HYBRID, {', '.join(FORMATS)}")
    return FORMATS[name], FORMATS[name]


def _factor(scale: Scale, x: Tensor, format: Format, name: str) -> Tensor | None:
    if x.element_size() == 1:
        format_of(x.dtype)
        if scale is None:
            raise ValueError(f"{name} is not given: {x.dtype} data has no value without its scale")
        return as_factor(scale, x.device)
    return None if scale is None else checked_factor(scale, x, format, name)


def _one(scale: Scale, x: Tensor, format: Format, name: str) -> Tensor | None:
    if x.element_size() == 1:
        raise TypeError(f"{x.dtype} data in fp8_matmul: that is for fp8_linear, which takes it with its scale")
    factor = _factor(scale, x, format, name)
    if factor is not None and factor.dim():
        raise ValueError(f"{name} has shape {tuple(factor.shape)}: fp8_matmul takes one number for a whole tensor")
    return factor


def _nan_if_mistaken(y: Tensor, factors: list[Tensor | None]) -> Tensor:
    """Make y NaN where a factor is NaN, which the scaling state would take for no scale. (A CPU has raised by now.)"""
    if y.device.type == "cpu" and not torch.compiler.is_compiling():
        return y
    for factor in factors:
        y = y if factor is None else y + (factor.float() * 0.0).to(y.dtype)
    return y


def _state(device: torch.device, factors: list[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Return new scaling state for one product, with the given scales."""
    states = new_states(3, device=device)
    for state, factor in zip(states, factors, strict=False):
        if factor is not None:
            state[SCALE] = factor.float()
    return states[0], states[1], states[2]


def _rows_of(x: Tensor, scale: Tensor | None, recipe: OperandRecipe) -> Quantized:
    if x.element_size() == 1:
        assert scale is not None
        return Quantized(x.contiguous(), scale)
    if scale is not None:
        return quantize_by(x, scale, recipe.format)
    return ops.quantize(x.reshape(-1, x.shape[-1]), new_states(device=x.device), recipe, record=False, layout="rows")[0]


def _columns_of(x: Tensor, scale: Tensor | None, recipe: OperandRecipe) -> Quantized:
    """Return x transposed, with scales along the other dimension."""
    single = scale is None or not scale.dim()
    format = format_of(x.dtype) if x.element_size() == 1 else recipe.format
    transposed = OperandRecipe(format, "tensor" if single else "channel", delayed=single and scale is not None)
    value = dequantize(x, scale) if x.element_size() == 1 else x
    state = _state(x.device, [scale if single else None])[0]
    return ops.quantize(value.reshape(-1, x.shape[-1]), state, transposed, record=False, layout="columns")[0]


def _gemm(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Tensor:
    a, b = (Quantized(q.data, ops.pack_scale(q.scale)) for q in (a, b))
    return ops.gemm_nt(a, b, bias=bias, out_dtype=dtype, batch=(), fast=fast)


def _flatten_rows(scale: Tensor, shape: torch.Size) -> Tensor:
    return scale if scale.dim() < 2 else scale.float().expand(*shape[:-1], scale.shape[-1]).reshape(-1, scale.shape[-1])


def _not_double(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def _at_most_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype
