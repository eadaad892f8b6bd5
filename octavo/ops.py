"""The operations that layers call, and the one place that chooses how they run.

The operators in `torch.ops.octavo` are opaque to `torch.compile` and to autograd: a layer's backward is written out in
`octavo/nn`. Each runs the specification in `octavo/numerics` on every device; on a GPU with FP8 tensor cores the
kernels in `octavo/kernels` take its place where they can.

`weight_gemm` quantises weights and multiplies in one operator: the FP8 weight lives no longer than that, and a compiler
cannot move the quantising of backward into forward, where its result would be kept.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels import gemm as kernels
from octavo.kernels.ranges import ranged
from octavo.numerics import OperandRecipe, Quantized, padded_gemm_nt
from octavo.numerics import activation as spec
from octavo.numerics.formats import E8M0_DTYPE
from octavo.numerics.operand import quantize_group
from octavo.numerics.quantize import MX_BLOCK
from octavo.numerics.scaling import SCALE
from octavo.support import has_fp8_tensor_cores

_LIBRARY = torch.library.Library("octavo", "DEF")
_LIBRARY.define("quantize(Tensor x, Tensor(a!) row, str recipe, bool record, bool transpose) -> (Tensor, Tensor)")
_LIBRARY.define("quantize_both(Tensor x, Tensor(a!) row, str recipe, bool record) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "gemm_nt(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, ScalarType out_dtype, SymInt[] batch, "
    "bool fast, bool emulate) -> Tensor"
)
_LIBRARY.define(
    "weight_gemm(Tensor a, Tensor a_scale, Tensor[] weights, Tensor(a!) row, Tensor? bias, str recipe, bool record, "
    "bool transpose, ScalarType out_dtype, bool fast, bool emulate) -> Tensor"
)
_LIBRARY.define(
    "gated_quantize(Tensor gate_up, Tensor(a!) row, str recipe, bool record, str activation) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "gated_quantize_backward(Tensor dh, Tensor gate_up, Tensor h_scale, Tensor(a!) row, str recipe, str recipe_h, "
    "str activation) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def quantize(x: Tensor, row: Tensor, recipe: OperandRecipe, *, record: bool, layout: str) -> list[Quantized]:
    """Quantise an operand by its recipe; see `numerics.operand.quantize_operand`."""
    if layout == "both":
        data, scale, data_t, scale_t = torch.ops.octavo.quantize_both(x, row, recipe.encode(), record)
        return [Quantized(data, scale), Quantized(data_t, scale_t)]
    return [Quantized(*torch.ops.octavo.quantize(x, row, recipe.encode(), record, layout == "columns"))]


def gemm_nt(
    a: Quantized,
    b: Quantized,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    batch: Sequence[int],
    fast: bool = False,
    emulate: bool = False,
) -> Tensor:
    """`a[..., M, K] · b[..., N, K]ᵀ + bias`, any size, summed down to the batch shape; see `numerics.gemm`.

    `fast` allows tensor cores their fast accumulation; `emulate` keeps to the specification on any device.
    """
    return torch.ops.octavo.gemm_nt(a.data, a.scale, b.data, b.scale, bias, out_dtype, batch, fast, emulate)


def weight_gemm(
    a: Quantized,
    weights: Sequence[Tensor],
    row: Tensor,
    recipe: OperandRecipe,
    *,
    bias: Tensor | None = None,
    record: bool = False,
    transpose: bool = False,
    out_dtype: torch.dtype,
    fast: bool = False,
    emulate: bool = False,
) -> Tensor:
    """`a[M, K] · w[N, K]ᵀ + bias`, or with `transpose` `a[M, N] · w[N, K]`, for `w` the weights side by side."""
    return torch.ops.octavo.weight_gemm(
        a.data, a.scale, list(weights), row, bias, recipe.encode(), record, transpose, out_dtype, fast, emulate
    )


def gated_quantize(gate_up: Tensor, row: Tensor, recipe: OperandRecipe, activation: str, *, record: bool) -> Quantized:
    """`numerics.activation.gated(gate_up)`, quantised as rows."""
    return Quantized(*torch.ops.octavo.gated_quantize(gate_up, row, recipe.encode(), record, activation))


def gated_quantize_backward(
    dh: Tensor,
    gate_up: Tensor,
    h_scale: Tensor,
    row: Tensor,
    recipe: OperandRecipe,
    recipe_h: OperandRecipe,
    activation: str,
) -> tuple[Quantized, Quantized, Quantized]:
    """The gradient of `gate_up` as rows and as columns, and `gated(gate_up)` as columns.

    `h_scale` is what forward quantised h with; a granularity other than `tensor` finds its own for the columns.
    """
    found = torch.ops.octavo.gated_quantize_backward(
        dh, gate_up, h_scale, row, recipe.encode(), recipe_h.encode(), activation
    )
    return Quantized(*found[0:2]), Quantized(*found[2:4]), Quantized(*found[4:6])


def quantize_directly(x: Tensor, row: Tensor, recipe: OperandRecipe, record: bool, layout: str) -> list[Quantized]:
    """Not as an operator, for the implementations of others: by the kernel where there is one, else by the spec."""
    return _quantize_group([x], row, recipe, record, layout)


def _quantize_group(
    xs: Sequence[Tensor], row: Tensor, recipe: OperandRecipe, record: bool, layout: str, known: bool = False
) -> list[Quantized]:
    if has_fp8_tensor_cores(xs[0].device):
        from octavo.kernels import quantize as kernel  # brings Triton

        if kernel.can_quantize(xs, recipe):
            return kernel.quantize_group(xs, row, recipe, record=record, layout=layout, known=known)
    return quantize_group(xs, row, recipe, record=record, layout=layout)


def _quantize_op(x: Tensor, row: Tensor, recipe: str, record: bool, transpose: bool) -> tuple[Tensor, Tensor]:
    data, scale = quantize_directly(x, row, OperandRecipe.decode(recipe), record, "columns" if transpose else "rows")[0]
    return data, _pack(scale)


def _quantize_both_op(x: Tensor, row: Tensor, recipe: str, record: bool) -> tuple[Tensor, ...]:
    rows, columns = quantize_directly(x, row, OperandRecipe.decode(recipe), record, "both")
    # Per tensor, both layouts share one scale; an operator may not return the same tensor twice.
    scale_t = columns.scale.clone() if columns.scale is rows.scale else columns.scale
    return rows.data, _pack(rows.scale), columns.data, _pack(scale_t)


def _quantize_fake(x: Tensor, row: Tensor, recipe: str, record: bool, transpose: bool) -> tuple[Tensor, Tensor]:
    operand = OperandRecipe.decode(recipe)
    *batch, r, c = x.mT.shape if transpose else x.shape
    granularity = operand.columns if transpose and operand.columns else operand.granularity
    scale_shape = {
        "tensor": [],
        "channel": [*batch, r, 1],
        "block": [*batch, -(-r // operand.block[0]), -(-c // operand.block[1])],
        "mx": [*batch, r, -(-c // MX_BLOCK)],
    }[granularity]
    scale_dtype = torch.uint8 if granularity == "mx" else torch.float32
    return x.new_empty([*batch, r, c], dtype=operand.format.dtype), x.new_empty(scale_shape, dtype=scale_dtype)


def _quantize_both_fake(x: Tensor, row: Tensor, recipe: str, record: bool) -> tuple[Tensor, ...]:
    return *_quantize_fake(x, row, recipe, record, False), *_quantize_fake(x, row, recipe, record, True)


def _gemm_nt_op(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: list[int],
    fast: bool,
    emulate: bool,
) -> Tensor:
    on_tensor_cores = not emulate and has_fp8_tensor_cores(a.device)
    if on_tensor_cores and not batch and kernels.is_one_call(a, a_scale, b, b_scale, bias, out_dtype):
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast)
    a_q, b_q = Quantized(a, _unpack(a_scale)), Quantized(b, _unpack(b_scale))
    if not on_tensor_cores or not kernels.can_multiply(a_q, b_q):
        return padded_gemm_nt(a_q, b_q, bias=bias, out_dtype=out_dtype, batch=batch)
    return kernels.gemm_nt(a_q, b_q, bias=bias, out_dtype=out_dtype, batch=torch.Size(batch), fast=fast)


def _gemm_nt_fake(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: list[int],
    fast: bool,
    emulate: bool,
) -> Tensor:
    return a.new_empty([*batch, a.shape[-2], b.shape[-2]], dtype=out_dtype)


def _weight_gemm_op(
    a: Tensor,
    a_scale: Tensor,
    weights: list[Tensor],
    row: Tensor,
    bias: Tensor | None,
    recipe: str,
    record: bool,
    transpose: bool,
    out_dtype: torch.dtype,
    fast: bool,
    emulate: bool,
) -> Tensor:
    layout = "columns" if transpose else "rows"
    # In backward the weights have the scale that forward found.
    w = _quantize_group(weights, row, OperandRecipe.decode(recipe), record, layout, known=transpose)[0]
    return _gemm_nt_op(a, a_scale, w.data, w.scale, bias, out_dtype, [], fast, emulate)


def _weight_gemm_fake(
    a: Tensor,
    a_scale: Tensor,
    weights: list[Tensor],
    row: Tensor,
    bias: Tensor | None,
    recipe: str,
    record: bool,
    transpose: bool,
    out_dtype: torch.dtype,
    fast: bool,
    emulate: bool,
) -> Tensor:
    n = weights[0].shape[1] if transpose else sum(w.shape[0] for w in weights)
    return a.new_empty([a.shape[0], n], dtype=out_dtype)


def _gated_quantize_op(
    gate_up: Tensor, row: Tensor, recipe: str, record: bool, activation: str
) -> tuple[Tensor, Tensor]:
    operand = OperandRecipe.decode(recipe)
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels import gated, gated_scaled

        for kernel in (gated, gated_scaled):
            if kernel.can_quantize(gate_up, operand):
                h = kernel.gated_quantize(gate_up, row, operand, activation, record=record)
                return h.data, h.scale
    data, scale = quantize_directly(_gated(gate_up, activation), row, operand, record, "rows")[0]
    return data, _pack(scale)


def _gated_quantize_fake(
    gate_up: Tensor, row: Tensor, recipe: str, record: bool, activation: str
) -> tuple[Tensor, Tensor]:
    return _quantize_fake(gate_up[:, : gate_up.shape[1] // 2], row, recipe, record, False)


def _gated_quantize_backward_op(
    dh: Tensor, gate_up: Tensor, h_scale: Tensor, row: Tensor, recipe: str, recipe_h: str, activation: str
) -> tuple[Tensor, ...]:
    operand, operand_h = OperandRecipe.decode(recipe), OperandRecipe.decode(recipe_h)
    if has_fp8_tensor_cores(dh.device):
        from octavo.kernels import gated, gated_scaled

        if gated.can_quantize(gate_up, operand, operand_h):
            turned = gated.gated_quantize_backward(dh, gate_up, h_scale, row, operand, operand_h, activation)
            return tuple(part for q in turned for part in q)
        if gated_scaled.can_quantize_backward(gate_up, operand, operand_h):
            turned = gated_scaled.gated_quantize_backward(dh, gate_up, row, operand, operand_h, activation)
            return tuple(part for q in turned for part in q)
    gradient, h = _gated_backward(dh, gate_up, activation)
    found = _quantize_both_op(gradient, row, recipe, True)
    known = row.new_zeros(row.shape)
    if operand_h.granularity == "tensor":
        operand_h = replace(operand_h, delayed=True)
        known[SCALE] = h_scale
    h_q = quantize_directly(h, known, operand_h, False, "columns")[0]
    return *found, h_q.data, _pack(h_q.scale)


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels import gated as kernel

        if kernel.can_gate(gate_up):
            return kernel.gated(gate_up, activation)
    return spec.gated(gate_up, activation)


def _gated_backward(dh: Tensor, gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels import gated as kernel

        if kernel.can_gate(gate_up):
            return kernel.gated_backward(dh, gate_up, activation)
    return spec.gated_backward(dh, gate_up, activation), spec.gated(gate_up, activation)


def _gated_quantize_backward_fake(
    dh: Tensor, gate_up: Tensor, h_scale: Tensor, row: Tensor, recipe: str, recipe_h: str, activation: str
) -> tuple[Tensor, ...]:
    return *_quantize_both_fake(gate_up, row, recipe, True), *_quantize_fake(dh, row, recipe_h, False, True)


def _pack(scale: Tensor) -> Tensor:
    """E8M0 scales leave an operator as bytes: Inductor in torch 2.11 does not know that dtype."""
    return scale.view(torch.uint8) if scale.dtype == E8M0_DTYPE else scale


def _unpack(scale: Tensor) -> Tensor:
    return scale.view(E8M0_DTYPE) if scale.dtype == torch.uint8 else scale


for _name, _implementation, _fake in (
    ("quantize", _quantize_op, _quantize_fake),
    ("quantize_both", _quantize_both_op, _quantize_both_fake),
    ("gemm_nt", _gemm_nt_op, _gemm_nt_fake),
    ("weight_gemm", _weight_gemm_op, _weight_gemm_fake),
    ("gated_quantize", _gated_quantize_op, _gated_quantize_fake),
    ("gated_quantize_backward", _gated_quantize_backward_op, _gated_quantize_backward_fake),
):
    _LIBRARY.impl(_name, ranged(f"octavo.{_name}", _implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_LIBRARY)
