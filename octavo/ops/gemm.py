"""Products of quantised operands: by cuBLAS or a kernel where there is one, else by the specification."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels import gemm as kernels
from octavo.numerics import OperandRecipe, Quantized, padded_gemm_nt
from octavo.ops.quantize import as_dtype, is_high_precision, unpack_scale
from octavo.ops.register import operator
from octavo.support import has_fp8_tensor_cores


@dataclass(frozen=True)
class ProductSpec:
    """How a product is computed: everything about it but its tensors."""

    a: OperandRecipe
    b: OperandRecipe
    g: OperandRecipe
    out_dtype: torch.dtype
    b_is_nk: bool = False
    a_is_weight: bool = False
    b_is_weight: bool = True
    record: bool = True  # learn scales and statistics from this use
    emulate: bool = False  # by the specification even where there are kernels
    fast_forward: bool = True  # tensor cores may keep about 14 bits of a running sum
    fast_backward: bool = False


def multiply(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: Sequence[int],
    fast: bool,
    emulate: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `gemm_nt`, into `out` if there is one, for the implementations of operators. Scales may be packed.

    Operands in high precision (`is_high_precision`) are multiplied as they are: two matrices, without a batch.
    """
    if is_high_precision(b):
        return _multiply_hp(a.data, b.data, bias, out_dtype, out)
    on_tensor_cores = not emulate and has_fp8_tensor_cores(a.data.device)
    if on_tensor_cores and not batch and kernels.is_one_call(a, b, bias, out_dtype):
        return kernels.one_call(a, b, out_dtype, fast, out)
    a, b = (Quantized(q.data, unpack_scale(q.scale)) for q in (a, b))
    if not on_tensor_cores or not kernels.can_multiply(a, b):
        y = padded_gemm_nt(a, b, bias=bias, out_dtype=out_dtype, batch=batch)
    elif out is not None and kernels.can_multiply_into(a, b, bias, out):
        return kernels.gemm_nt_into(a, b, bias, out, fast=fast)
    else:
        y = kernels.gemm_nt(a, b, bias=bias, out_dtype=out_dtype, batch=torch.Size(batch), fast=fast)
    return y if out is None else out.copy_(y)


def _multiply_hp(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    into = out if out is not None and out.dtype == a.dtype else None
    y = torch.mm(a, b.t(), out=into) if bias is None else torch.addmm(as_dtype(bias, a.dtype), a, b.t(), out=into)
    y = as_dtype(y, out_dtype)
    return y if out is None or into is not None else out.copy_(y)


def _gemm_nt_fake(a: Tensor, b: Tensor, out_dtype: torch.dtype, batch: list[int]) -> Tensor:
    return a.new_empty([*batch, a.shape[-2], b.shape[-2]], dtype=out_dtype)


@operator(fake=_gemm_nt_fake)
def gemm_nt(
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
    """Compute `a[..., M, K] · b[..., N, K]ᵀ + bias`, any size, summed down to the batch shape; see `numerics.gemm`.

    `fast` allows tensor cores their fast accumulation; `emulate` keeps to the specification on any device.
    """
    return multiply(Quantized(a, a_scale), Quantized(b, b_scale), bias, out_dtype, batch, fast, emulate)
