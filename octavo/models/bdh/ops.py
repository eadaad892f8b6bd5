"""The element-wise work between the products of a fused BDH layer, with its results in FP8, as operators.

Each runs the specification (`spec.py`), or a kernel on a GPU with FP8 tensor cores. Shapes: B batch, T positions, H
heads, N neurons per head, M = B · T. Every tensor has one scale; `..._state` is its scaling state, which each use
updates. `saved` holds s and t, each with its scale, as forward saved them in FP8; `recipe` is an encoded
`OperandRecipe`.
"""

import torch
from torch import Tensor

from octavo.models.bdh import spec
from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics.quantize import dequantize
from octavo.ops import quantize_group
from octavo.ops.register import operator
from octavo.support import has_fp8_tensor_cores


def _has_kernels(x: Tensor, *recipes: OperandRecipe) -> bool:
    if not has_fp8_tensor_cores(x.device):
        return False
    from octavo.models.bdh.kernels.tiles import can_fuse  # brings Triton

    return can_fuse(x, *recipes)


def _quantize(x: Tensor, state: Tensor, recipe: OperandRecipe) -> Quantized:
    return quantize_group([x], state, recipe, True, "rows")[0]


def _quantize_columns(x: Tensor, scale: Tensor, recipe: OperandRecipe) -> Tensor:
    """Quantise the transpose with a scale that is known."""
    return quantize_group([x], scale, recipe, False, "columns", scale=scale)[0].data


def _by_head(x_BTHN: Tensor) -> Tensor:
    """View as `[H, M, N]`."""
    return x_BTHN.flatten(0, 1).transpose(0, 1)


def _operands(saved: list[Tensor]) -> tuple[Quantized, Quantized]:
    s, s_scale, t, t_scale = saved
    return Quantized(s, s_scale), Quantized(t, t_scale)


def _empty(x: Tensor, recipe: str, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=OperandRecipe.decode(recipe).format.dtype)


def _empty_operand(x: Tensor, recipe: str, *shape: int) -> tuple[Tensor, Tensor]:
    """Return an empty tensor and its scale."""
    return _empty(x, recipe, *shape), x.new_empty((), dtype=torch.float32)


def _relu_rope_fake(s_pre: Tensor, recipe: str) -> tuple[Tensor, ...]:
    B, T, H, N = s_pre.shape
    return *_empty_operand(s_pre, recipe, B, H, T, N), *_empty_operand(s_pre, recipe, B, T, H, N)


@operator(mutates=("q_state", "s_state"), fake=_relu_rope_fake)
def bdh_relu_rope(
    s_pre: Tensor, cos: Tensor, sin: Tensor, q_state: Tensor, s_state: Tensor, recipe: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q `[B, H, T, N]` and its scale, and s `[B, T, H, N]` and its scale, from `s_pre[B, T, H, N]`."""
    operand = OperandRecipe.decode(recipe)
    if _has_kernels(s_pre, operand):
        from octavo.models.bdh.kernels import forward

        q, s = forward.relu_rope(s_pre, cos, sin, q_state, s_state, operand)
    else:
        q = _quantize(spec.relu_rope(s_pre, cos, sin).transpose(1, 2), q_state, operand)
        s = _quantize(spec.relu(s_pre), s_state, operand)
    return *q, *s


def _rope_columns_fake(s: Tensor, recipe: str) -> Tensor:
    B, T, H, N = s.shape
    return _empty(s, recipe, B, H, N, T)


@operator(fake=_rope_columns_fake)
def bdh_rope_columns(
    s: Tensor, s_scale: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    """Return q `[B, H, N, T]`, recomputed from s, with the scale of forward.

    It is rounded to `dtype` before FP8, as in forward.
    """
    operand = OperandRecipe.decode(recipe)
    if _has_kernels(q_scale.new_empty(1, dtype=dtype), operand):
        from octavo.models.bdh.kernels import forward

        return forward.rope_columns(Quantized(s, s_scale), cos, sin, q_scale, operand, dtype)
    q = spec.relu_rope(dequantize(s, s_scale), cos, sin).to(dtype)
    return _quantize_columns(q.transpose(1, 2), q_scale, operand)


def _gate_fake(s_pre: Tensor, recipe: str) -> tuple[Tensor, ...]:
    return *_empty_operand(s_pre, recipe, *s_pre.shape), *_empty_operand(s_pre, recipe, *s_pre.shape)


@operator(mutates=("z_state", "t_state"), fake=_gate_fake)
def bdh_gate(
    s_pre: Tensor, t_pre: Tensor, z_state: Tensor, t_state: Tensor, recipe: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return z `[B, T, H, N]` and its scale, and t, likewise, from `s_pre[B, T, H, N]` and `t_pre[H, B, T, N]`."""
    operand = OperandRecipe.decode(recipe)
    if _has_kernels(s_pre, operand):
        from octavo.models.bdh.kernels import forward

        z, t = forward.gate(s_pre, t_pre, z_state, t_state, operand)
    else:
        t_pre = t_pre.permute(1, 2, 0, 3)
        z = _quantize(spec.gate(s_pre, t_pre), z_state, operand)
        t = _quantize(spec.relu(t_pre), t_state, operand)
    return *z, *t


def _gate_backward_fake(dz: Tensor, recipe: str, z_recipe: str) -> tuple[Tensor, ...]:
    B, T, H, N = dz.shape
    columns, z = _empty(dz, recipe, H, N, B * T), _empty(dz, z_recipe, H, N, B * T)
    return *_empty_operand(dz, recipe, H, B * T, N), columns, z


@operator(mutates=("state",), fake=_gate_backward_fake)
def bdh_gate_backward(
    dz: Tensor, saved: list[Tensor], z_scale: Tensor, state: Tensor, recipe: str, z_recipe: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dt_pre `[H, M, N]`, its scale, dt_pre `[H, N, M]`, and z `[H, N, M]` with the scale of forward."""
    operand, z_operand = OperandRecipe.decode(recipe), OperandRecipe.decode(z_recipe)
    if _has_kernels(dz, operand, z_operand):
        from octavo.models.bdh.kernels import backward

        return backward.gate_backward(dz, *_operands(saved), z_scale, state, operand, z_operand)
    s_hp, t_hp = (dequantize(q) for q in _operands(saved))
    dt = _by_head(spec.gate_backward(dz, s_hp, t_hp))
    rows, columns = quantize_group([dt], state, operand, True, "both")
    z = _quantize_columns(_by_head(spec.gate(s_hp, t_hp).to(dz.dtype)), z_scale, z_operand)
    return rows.data, rows.scale, columns.data, z


def _relu_rope_backward_fake(dz: Tensor, recipe: str) -> tuple[Tensor, ...]:
    B, T, H, N = dz.shape
    return *_empty_operand(dz, recipe, B, T, H, N), _empty(dz, recipe, H, N, B * T)


@operator(mutates=("state",), fake=_relu_rope_backward_fake)
def bdh_relu_rope_backward(
    dq: Tensor, dz: Tensor, saved: list[Tensor], cos: Tensor, sin: Tensor, state: Tensor, recipe: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ds_pre `[B, T, H, N]`, its scale, and ds_pre `[H, N, M]`. Only the sign of s counts: it needs no scale."""
    operand, (s, t) = OperandRecipe.decode(recipe), _operands(saved)
    if _has_kernels(dz, operand):
        from octavo.models.bdh.kernels import backward

        return backward.relu_rope_backward(dq, dz, s.data, t, cos, sin, state, operand)
    B, T, H, N = dz.shape
    ds = spec.relu_rope_backward(dq.transpose(1, 2), dz, s.data.float(), dequantize(t), cos, sin)
    rows, columns = quantize_group([ds.view(B * T, H * N)], state, operand, True, "both")
    return rows.data.view(B, T, H, N), rows.scale, columns.data.view(H, N, B * T)


def _mask_fake(scores: Tensor, recipe: str, symmetric: bool) -> tuple[Tensor, ...]:
    B, H, T, S = scores.shape
    transposed = [0] if symmetric else [B, S, H, T]
    return *_empty_operand(scores, recipe, B, H, T, S), _empty(scores, recipe, *transposed)


@operator(mutates=("state",), fake=_mask_fake)
def bdh_mask(scores: Tensor, state: Tensor, recipe: str, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return tril(scores, -1) `[B, H, T, S]`, its scale, and its transpose `[B, S, H, T]`, the heads side by side.

    `symmetric`: return tril(scores, -1) plus its transpose instead, and nothing in the third place.
    """
    operand = OperandRecipe.decode(recipe)
    if _has_kernels(scores, operand):
        from octavo.models.bdh.kernels import scores as kernels

        return kernels.mask(scores, state, operand, symmetric=symmetric)
    rows = _quantize(spec.symmetric(scores) if symmetric else spec.causal(scores), state, operand)
    if symmetric:
        return *rows, rows.data.new_empty(0)
    columns = rows.data.view(torch.uint8).permute(0, 3, 1, 2).contiguous().view(rows.data.dtype)
    # Where T is 1 the permuted view is contiguous, and an operator may not return one tensor twice.
    return *rows, columns.clone() if columns.data_ptr() == rows.data.data_ptr() else columns
