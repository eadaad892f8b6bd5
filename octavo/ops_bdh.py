"""The operations of a fused BDH layer, beside those of `ops.py`: what lies between its products, straight to FP8.

Shapes: B batch, T positions, H heads, N neurons per head, M = B · T. One scale per tensor throughout. `s` and `t` are
what forward kept, in FP8; see `numerics.bdh` for the equations.
"""

import torch
from torch import Tensor

from octavo import ops
from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics import bdh as spec
from octavo.numerics.quantize import dequantize
from octavo.ops.register import install
from octavo.support import has_fp8_tensor_cores

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
_LIBRARY.define(
    "relu_rope_quantize(Tensor s_pre, Tensor cos, Tensor sin, Tensor(a!) q_row, Tensor(b!) s_row, str recipe, "
    "bool record) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "rope_columns(Tensor s, Tensor s_scale, Tensor cos, Tensor sin, Tensor q_scale, str recipe, ScalarType dtype) "
    "-> Tensor"
)
_LIBRARY.define(
    "gate_quantize(Tensor s_pre, Tensor t_pre, Tensor(a!) z_row, Tensor(b!) t_row, str recipe, bool record) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "gate_backward(Tensor dz, Tensor s, Tensor s_scale, Tensor t, Tensor t_scale, Tensor z_scale, Tensor(a!) row, "
    "str recipe, str recipe_z) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "relu_rope_backward(Tensor dq, Tensor dz, Tensor s, Tensor s_scale, Tensor t, Tensor t_scale, Tensor cos, "
    "Tensor sin, Tensor(a!) row, str recipe) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("causal_quantize(Tensor scores, Tensor(a!) row, str recipe, bool record) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("symmetric_quantize(Tensor scores, Tensor(a!) row, str recipe) -> (Tensor, Tensor)")


def relu_rope_quantize(
    s_pre_BTHN: Tensor, cos: Tensor, sin: Tensor, q_row: Tensor, s_row: Tensor, recipe: OperandRecipe, *, record: bool
) -> tuple[Quantized, Quantized]:
    """q as `[B, H, T, N]`, and s as `[B, T, H, N]`."""
    found = torch.ops.octavo.relu_rope_quantize(s_pre_BTHN, cos, sin, q_row, s_row, recipe.encode(), record)
    return Quantized(*found[:2]), Quantized(*found[2:])


def rope_columns(
    s: Quantized, cos: Tensor, sin: Tensor, q_scale: Tensor, recipe: OperandRecipe, dtype: torch.dtype
) -> Quantized:
    """q as `[B, H, N, T]`, from s, with the scale forward found; rounded to `dtype` before FP8, as forward did."""
    return Quantized(torch.ops.octavo.rope_columns(*s, cos, sin, q_scale, recipe.encode(), dtype), q_scale)


def gate_quantize(
    s_pre_BTHN: Tensor, t_pre_HBTN: Tensor, z_row: Tensor, t_row: Tensor, recipe: OperandRecipe, *, record: bool
) -> tuple[Quantized, Quantized]:
    """z and t, both as `[B, T, H, N]`."""
    found = torch.ops.octavo.gate_quantize(s_pre_BTHN, t_pre_HBTN, z_row, t_row, recipe.encode(), record)
    return Quantized(*found[:2]), Quantized(*found[2:])


def gate_backward(
    dz_BTHN: Tensor,
    s: Quantized,
    t: Quantized,
    z_scale: Tensor,
    row: Tensor,
    recipe: OperandRecipe,
    recipe_z: OperandRecipe,
) -> tuple[Quantized, Quantized, Quantized]:
    """The gradient of t_pre as `[H, M, N]` and as `[H, N, M]`, and z as `[H, N, M]` with the scale forward found."""
    rows, scale, columns, z = torch.ops.octavo.gate_backward(
        dz_BTHN, *s, *t, z_scale, row, recipe.encode(), recipe_z.encode()
    )
    return Quantized(rows, scale), Quantized(columns, scale), Quantized(z, z_scale)


def relu_rope_backward(
    dq_BHTN: Tensor,
    dz_BTHN: Tensor,
    s: Quantized,
    t: Quantized,
    cos: Tensor,
    sin: Tensor,
    row: Tensor,
    recipe: OperandRecipe,
) -> tuple[Quantized, Quantized]:
    """The gradient of s_pre as `[B, T, H, N]` and as `[H, N, M]`."""
    rows, scale, columns = torch.ops.octavo.relu_rope_backward(dq_BHTN, dz_BTHN, *s, *t, cos, sin, row, recipe.encode())
    return Quantized(rows, scale), Quantized(columns, scale)


def causal_quantize(
    scores_BHTT: Tensor, row: Tensor, recipe: OperandRecipe, *, record: bool
) -> tuple[Quantized, Quantized]:
    """tril(scores, -1) as `[B, H, T, S]`, and turned as `[B, S, H, T]`: the heads side by side."""
    rows, scale, columns = torch.ops.octavo.causal_quantize(scores_BHTT, row, recipe.encode(), record)
    return Quantized(rows, scale), Quantized(columns, scale)


def symmetric_quantize(scores_BHTT: Tensor, row: Tensor, recipe: OperandRecipe) -> Quantized:
    """tril(scores, -1) plus its transpose."""
    return Quantized(*torch.ops.octavo.symmetric_quantize(scores_BHTT, row, recipe.encode()))


def _with_scale(x: Tensor, scale: Tensor, recipe: OperandRecipe, layout: str) -> Tensor:
    """Quantise with a scale that is known."""
    return ops.quantize_group([x], scale, recipe, False, layout, scale=scale)[0].data


def _relu_rope_quantize(
    s_pre: Tensor, cos: Tensor, sin: Tensor, q_row: Tensor, s_row: Tensor, recipe: str, record: bool
) -> tuple[Tensor, ...]:
    operand = OperandRecipe.decode(recipe)
    if _kernels_for(s_pre, operand):
        from octavo.kernels import bdh as kernels  # brings Triton

        q, s = kernels.relu_rope_quantize(s_pre, cos, sin, q_row, s_row, operand, record=record)
    else:
        turned = spec.relu_rope(s_pre, cos, sin).transpose(1, 2)
        q = ops.quantize_group([turned], q_row, operand, record, "rows")[0]
        s = ops.quantize_group([spec.relu(s_pre)], s_row, operand, record, "rows")[0]
    return *q, *s


def _rope_columns(
    s: Tensor, s_scale: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    operand = OperandRecipe.decode(recipe)
    if _kernels_for(q_scale.new_empty(1, dtype=dtype), operand):
        from octavo.kernels import bdh as kernels

        return kernels.rope_columns(Quantized(s, s_scale), cos, sin, q_scale, operand, dtype).data
    q = spec.relu_rope(dequantize(s, s_scale), cos, sin).to(dtype)
    return _with_scale(q.transpose(1, 2), q_scale, operand, "columns")


def _gate_quantize(
    s_pre: Tensor, t_pre: Tensor, z_row: Tensor, t_row: Tensor, recipe: str, record: bool
) -> tuple[Tensor, ...]:
    operand = OperandRecipe.decode(recipe)
    if _kernels_for(s_pre, operand):
        from octavo.kernels import bdh as kernels

        z, t = kernels.gate_quantize(s_pre, t_pre, z_row, t_row, operand, record=record)
    else:
        t_pre = t_pre.permute(1, 2, 0, 3)
        z = ops.quantize_group([spec.gate(s_pre, t_pre)], z_row, operand, record, "rows")[0]
        t = ops.quantize_group([spec.relu(t_pre)], t_row, operand, record, "rows")[0]
    return *z, *t


def _gate_backward(
    dz: Tensor,
    s: Tensor,
    s_scale: Tensor,
    t: Tensor,
    t_scale: Tensor,
    z_scale: Tensor,
    row: Tensor,
    recipe: str,
    recipe_z: str,
) -> tuple[Tensor, ...]:
    operand, operand_z = OperandRecipe.decode(recipe), OperandRecipe.decode(recipe_z)
    if _kernels_for(dz, operand, operand_z):
        from octavo.kernels import bdh_backward as kernels

        return kernels.gate_backward(dz, Quantized(s, s_scale), Quantized(t, t_scale), z_scale, row, operand, operand_z)
    s_hp, t_hp = dequantize(s, s_scale), dequantize(t, t_scale)
    rows, columns = ops.quantize_group([_by_head(spec.gate_backward(dz, s_hp, t_hp))], row, operand, True, "both")
    z = _with_scale(_by_head(spec.gate(s_hp, t_hp).to(dz.dtype)), z_scale, operand_z, "columns")
    return rows.data, rows.scale, columns.data, z


def _relu_rope_backward(
    dq: Tensor,
    dz: Tensor,
    s: Tensor,
    s_scale: Tensor,
    t: Tensor,
    t_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    row: Tensor,
    recipe: str,
) -> tuple[Tensor, ...]:
    operand = OperandRecipe.decode(recipe)
    if _kernels_for(dz, operand):
        from octavo.kernels import bdh_backward as kernels

        return kernels.relu_rope_backward(dq, dz, s, Quantized(t, t_scale), cos, sin, row, operand)
    s_hp, t_hp = dequantize(s, s_scale), dequantize(t, t_scale)
    ds = spec.relu_rope_backward(dq.transpose(1, 2), dz, s_hp, t_hp, cos, sin)
    B, T, H, N = ds.shape
    rows, columns = ops.quantize_group([ds.view(B * T, H * N)], row, operand, True, "both")
    return rows.data.view(B, T, H, N), rows.scale, columns.data.view(H, N, B * T)


def _causal_quantize(scores: Tensor, row: Tensor, recipe: str, record: bool) -> tuple[Tensor, ...]:
    operand = OperandRecipe.decode(recipe)
    if _kernels_for(scores, operand):
        from octavo.kernels import causal as kernels

        return kernels.causal_quantize(scores, row, operand, record=record)
    rows = ops.quantize_group([spec.causal(scores)], row, operand, record, "rows")[0]
    columns = rows.data.view(torch.uint8).permute(0, 3, 1, 2).contiguous().view(rows.data.dtype)
    return rows.data, rows.scale, columns.clone() if columns.data_ptr() == rows.data.data_ptr() else columns


def _symmetric_quantize(scores: Tensor, row: Tensor, recipe: str) -> tuple[Tensor, ...]:
    operand = OperandRecipe.decode(recipe)
    if _kernels_for(scores, operand):
        from octavo.kernels import causal as kernels

        return kernels.symmetric_quantize(scores, row, operand)
    return tuple(ops.quantize_group([spec.symmetric(scores)], row, operand, True, "rows")[0])


def _kernels_for(x: Tensor, *recipes: OperandRecipe) -> bool:
    if not has_fp8_tensor_cores(x.device):
        return False
    from octavo.kernels.bdh_tiles import can_fuse

    return can_fuse(x, *recipes)


def _by_head(x_BTHN: Tensor) -> Tensor:
    """`[H, M, N]`."""
    return x_BTHN.flatten(0, 1).transpose(0, 1)


def _new(x: Tensor, recipe: str, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=OperandRecipe.decode(recipe).format.dtype)


def _relu_rope_quantize_fake(
    s_pre: Tensor, cos: Tensor, sin: Tensor, q_row: Tensor, s_row: Tensor, recipe: str, record: bool
) -> tuple[Tensor, ...]:
    B, T, H, N = s_pre.shape
    q, s = _new(s_pre, recipe, B, H, T, N), _new(s_pre, recipe, B, T, H, N)
    return q, q_row.new_empty(()), s, s_row.new_empty(())


def _rope_columns_fake(
    s: Tensor, s_scale: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    B, T, H, N = s.shape
    return _new(s, recipe, B, H, N, T)


def _gate_quantize_fake(
    s_pre: Tensor, t_pre: Tensor, z_row: Tensor, t_row: Tensor, recipe: str, record: bool
) -> tuple[Tensor, ...]:
    z, t = _new(s_pre, recipe, *s_pre.shape), _new(s_pre, recipe, *s_pre.shape)
    return z, z_row.new_empty(()), t, t_row.new_empty(())


def _gate_backward_fake(
    dz: Tensor,
    s: Tensor,
    s_scale: Tensor,
    t: Tensor,
    t_scale: Tensor,
    z_scale: Tensor,
    row: Tensor,
    recipe: str,
    recipe_z: str,
) -> tuple[Tensor, ...]:
    B, T, H, N = dz.shape
    rows, columns = _new(dz, recipe, H, B * T, N), _new(dz, recipe, H, N, B * T)
    return rows, row.new_empty(()), columns, _new(dz, recipe_z, H, N, B * T)


def _relu_rope_backward_fake(
    dq: Tensor,
    dz: Tensor,
    s: Tensor,
    s_scale: Tensor,
    t: Tensor,
    t_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    row: Tensor,
    recipe: str,
) -> tuple[Tensor, ...]:
    B, T, H, N = dz.shape
    return _new(dz, recipe, B, T, H, N), row.new_empty(()), _new(dz, recipe, H, N, B * T)


def _causal_quantize_fake(scores: Tensor, row: Tensor, recipe: str, record: bool) -> tuple[Tensor, ...]:
    B, H, T, S = scores.shape
    return _new(scores, recipe, B, H, T, S), row.new_empty(()), _new(scores, recipe, B, S, H, T)


def _symmetric_quantize_fake(scores: Tensor, row: Tensor, recipe: str) -> tuple[Tensor, ...]:
    return _new(scores, recipe, *scores.shape), row.new_empty(())


for _name, _implementation, _fake in (
    ("relu_rope_quantize", _relu_rope_quantize, _relu_rope_quantize_fake),
    ("rope_columns", _rope_columns, _rope_columns_fake),
    ("gate_quantize", _gate_quantize, _gate_quantize_fake),
    ("gate_backward", _gate_backward, _gate_backward_fake),
    ("relu_rope_backward", _relu_rope_backward, _relu_rope_backward_fake),
    ("causal_quantize", _causal_quantize, _causal_quantize_fake),
    ("symmetric_quantize", _symmetric_quantize, _symmetric_quantize_fake),
):
    install(_LIBRARY, _name, _implementation, _fake)
