"""The operations that layers call, and the one place that chooses how they run.

`torch.ops.octavo.quantize`, `quantize_both` and `gemm_nt` are opaque to `torch.compile` and to autograd: a layer's
backward is written out in `octavo/nn`. Each runs the specification in `octavo/numerics` on every device; on a GPU with
FP8 tensor cores the kernels in `octavo/kernels` take its place where they can.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels import gemm as kernels
from octavo.numerics import OperandRecipe, Quantized, padded_gemm_nt
from octavo.numerics.formats import E8M0_DTYPE
from octavo.numerics.operand import quantize_operand
from octavo.numerics.quantize import MX_BLOCK
from octavo.support import has_fp8_tensor_cores

_LIBRARY = torch.library.Library("octavo", "DEF")
_LIBRARY.define("quantize(Tensor x, Tensor(a!) row, str recipe, bool record, bool transpose) -> (Tensor, Tensor)")
_LIBRARY.define("quantize_both(Tensor x, Tensor(a!) row, str recipe, bool record) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "gemm_nt(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, ScalarType out_dtype, SymInt[] batch, "
    "bool fast, bool emulate) -> Tensor"
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


def _quantize_spec(x: Tensor, row: Tensor, recipe: str, record: bool, transpose: bool) -> tuple[Tensor, Tensor]:
    layout = "columns" if transpose else "rows"
    data, scale = quantize_operand(x, row, OperandRecipe.decode(recipe), record=record, layout=layout)[0]
    return data, _pack(scale)


def _quantize_both_spec(x: Tensor, row: Tensor, recipe: str, record: bool) -> tuple[Tensor, ...]:
    rows, columns = quantize_operand(x, row, OperandRecipe.decode(recipe), record=record, layout="both")
    # Per tensor, both layouts share one scale; an operator may not return the same tensor twice.
    scale_t = columns.scale.clone() if columns.scale is rows.scale else columns.scale
    return rows.data, _pack(rows.scale), columns.data, _pack(scale_t)


def _quantize_fake(x: Tensor, row: Tensor, recipe: str, record: bool, transpose: bool) -> tuple[Tensor, Tensor]:
    operand = OperandRecipe.decode(recipe)
    *batch, r, c = x.mT.shape if transpose else x.shape
    scale_shape = {
        "tensor": [],
        "channel": [*batch, r, 1],
        "block": [*batch, -(-r // operand.block[0]), -(-c // operand.block[1])],
        "mx": [*batch, r, -(-c // MX_BLOCK)],
    }[operand.granularity]
    scale_dtype = torch.uint8 if operand.granularity == "mx" else torch.float32
    return x.new_empty([*batch, r, c], dtype=operand.format.dtype), x.new_empty(scale_shape, dtype=scale_dtype)


def _quantize_both_fake(x: Tensor, row: Tensor, recipe: str, record: bool) -> tuple[Tensor, ...]:
    return *_quantize_fake(x, row, recipe, record, False), *_quantize_fake(x, row, recipe, record, True)


def _gemm_nt_spec(
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
    a_q, b_q = Quantized(a, _unpack(a_scale)), Quantized(b, _unpack(b_scale))
    return padded_gemm_nt(a_q, b_q, bias=bias, out_dtype=out_dtype, batch=batch)


def _gemm_nt_cuda(
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
    a_q, b_q = Quantized(a, _unpack(a_scale)), Quantized(b, _unpack(b_scale))
    if emulate or not has_fp8_tensor_cores(a.device) or not kernels.can_multiply(a_q, b_q):
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


def _pack(scale: Tensor) -> Tensor:
    """E8M0 scales leave an operator as bytes: Inductor in torch 2.11 does not know that dtype."""
    return scale.view(torch.uint8) if scale.dtype == E8M0_DTYPE else scale


def _unpack(scale: Tensor) -> Tensor:
    return scale.view(E8M0_DTYPE) if scale.dtype == torch.uint8 else scale


for _name, _spec, _fake in (
    ("quantize", _quantize_spec, _quantize_fake),
    ("quantize_both", _quantize_both_spec, _quantize_both_fake),
    ("gemm_nt", _gemm_nt_spec, _gemm_nt_fake),
):
    _LIBRARY.impl(_name, _spec, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_LIBRARY)
_LIBRARY.impl("gemm_nt", _gemm_nt_cuda, "CUDA")
