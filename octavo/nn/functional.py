"""Products in FP8 as plain functions, with gradients: `fp8_linear` and `fp8_matmul`.

They compute the products of `FP8Linear` without its state: forward in E4M3, the gradient in E5M2, one scale per tensor,
by kernels on a GPU and by the specification elsewhere. A scale may be given for each operand, as a factor or as
returned by `FP8ScalingManager.get_scale` (see `numerics/multiplier.py`); without one, and for the gradient, the scale
is computed from the tensor.

`fp8_linear` also takes operands that are in FP8 already, and scales of rows or blocks. FP8 data gets no gradient. The
gradients of the others contract along another dimension than forward, so an operand with more than one scale is
quantised again for them, with one scale per channel.
"""

from dataclasses import replace

import torch
from torch import Tensor

from octavo.nn.autocast import is_weight
from octavo.nn.linear_function import linear
from octavo.nn.product import fp8_product
from octavo.nn.shapes import with_leading
from octavo.numerics.config import FP8_FORMATS, OperandRecipe
from octavo.numerics.formats import FORMATS, Format, format_of, get_format
from octavo.numerics.multiplier import as_factor, checked_factor
from octavo.numerics.scaling import SCALE, new_states
from octavo.ops import ProductSpec
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
    product = ProductSpec(
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
    product = ProductSpec(
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
    scale_x, scale_w = factors
    states = _state(x.device, [None if factor is None or factor.dim() else factor for factor in factors])
    scales = (None if scale_x is None else _flatten_rows(scale_x, x.shape), scale_w)
    y = fp8_product(x.reshape(-1, x.shape[-1]), w, bias, replace(product, a_is_weight=True), states, scales)
    return with_leading(y, x.shape[:-1]).to(dtype)


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


def _flatten_rows(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return the scales of x `[..., K]` as those of x `[M, K]`."""
    return scale if scale.dim() < 2 else scale.float().expand(*shape[:-1], scale.shape[-1]).reshape(-1, scale.shape[-1])


def _not_double(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def _at_most_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype
