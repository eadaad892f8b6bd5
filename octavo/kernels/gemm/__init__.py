"""`gemm_nt` on FP8 tensor cores: which library computes which product.

| product                                                       | by       |
| ------------------------------------------------------------- | -------- |
| one matrix by one matrix, tensor or row scales                | cuBLASLt |
| the same, 1x128 and 128x128 blocks on Hopper, aligned         | cuBLASLt |
| a batch of large matrices, tensor or row scales               | cuBLASLt, one after the other into one result |
| a batch of small ones, which would leave the GPU half empty   | Triton   |
| summed over batches: no copy that folds them into K           | Triton   |
| E5M2 by E5M2, N not a multiple of 16, a bias of another dtype | Triton   |
| mx blocks, blocks by anything cuBLASLt has no pair for        | Triton   |
| anything empty                                                | the spec |

Batches that share one right operand are just more rows of the left one: they become one matrix first. With fast
accumulation the tensor cores keep about 14 bits of the running sum, else it is added up in FP32 every 128 products.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.tuning import tuning_for
from octavo.numerics.gemm import ALIGNMENT, check_same_k, constant_along_k, pad_operand, padded_gemm_nt
from octavo.numerics.quantize import BLOCK, GROUP_HEIGHTS, GROUPS, Quantized

OCP_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def can_multiply(a: Quantized, b: Quantized) -> bool:
    """Whether there is a kernel for these operands, in any batch."""
    return all(q.data.dtype in OCP_DTYPES and _has_known_scale(q) for q in (a, b))


def is_one_call(a: Quantized, b: Quantized, bias: Tensor | None, out: torch.dtype) -> bool:
    """Whether `one_call` takes it as it is: what nearly every product of a decoder is, found out quickly."""
    return (
        bias is None
        and _is_one_call(
            a.data.shape, a.data.dtype, a.scale.shape, a.scale.dtype, b.data.shape, b.data.dtype, b.scale.shape,
            b.scale.dtype, out,
        )
        and a.data.is_contiguous()
        and b.data.is_contiguous()
        and a.scale.is_contiguous()
        and b.scale.is_contiguous()
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _is_one_call(
    a: torch.Size, a_dtype: torch.dtype, a_scale: torch.Size, a_scale_dtype: torch.dtype, b: torch.Size,
    b_dtype: torch.dtype, b_scale: torch.Size, b_scale_dtype: torch.dtype, out: torch.dtype,
) -> bool:  # fmt: skip
    """Matrices in whole tiles with one scale each, or, for a result in BF16, with one for each row."""
    of_rows = len(a) == len(b) == 2 and a_scale == (a[0], 1) and b_scale == (b[0], 1) and out == torch.bfloat16
    return (
        len(a) == len(b) == 2
        and (of_rows or len(a_scale) == len(b_scale) == 0)
        and a_scale_dtype == b_scale_dtype == torch.float32
        and a[1] == b[1]
        and a.numel() * b.numel() > 0
        and a[1] % ALIGNMENT == 0
        and b[0] % ALIGNMENT == 0
        and a_dtype in OCP_DTYPES
        and b_dtype in OCP_DTYPES
        and not a_dtype == b_dtype == torch.float8_e5m2
        and out in (torch.bfloat16, torch.float32, torch.float16)
    )


def one_call(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool, out: Tensor | None) -> Tensor:
    b_scale = b.scale.t() if b.scale.dim() else b.scale
    return torch._scaled_mm(a.data, b.data.t(), a.scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast, out=out)


def gemm_nt(
    a: Quantized, b: Quantized, *, bias: Tensor | None, out_dtype: torch.dtype, batch: Sequence[int], fast: bool
) -> Tensor:
    """`a · bᵀ + bias` on tensor cores; see `numerics.gemm.padded_gemm_nt`."""
    check_same_k(a.data, b.data)
    if not a.data.is_contiguous() or not b.data.is_contiguous():
        raise ValueError("gemm_nt needs operands contiguous along K; call .contiguous() on the transposed one")
    n = b.data.shape[-2]
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; the product has {n} columns")
    if not a.data.numel() or not b.data.numel():
        return padded_gemm_nt(a, b, bias=bias, out_dtype=out_dtype, batch=batch)
    a, b = pad_operand(a, 0), pad_operand(b, 0)
    bias = None if bias is None else bias.contiguous()
    shape = (*batch, a.data.shape[-2], n)
    if a.data.dim() == b.data.dim() == 2:
        return _one(a, b, bias, out_dtype, fast)
    a, b, batch = merge_rows(a, b, batch)
    full = torch.broadcast_shapes(a.data.shape[:-2], b.data.shape[:-2])
    check_batch(full, batch)
    if full.numel() == 1:
        y = _one(_as_matrix(a), _as_matrix(b), bias, out_dtype, fast)
    elif full.numel() == math.prod(batch) and _fills_gpu(a, b) and _in_cublas(a, b, bias, out_dtype):
        y = _one_after_the_other(a, b, bias, out_dtype, full, fast)
    else:
        y = _by_triton(a, b, bias, out_dtype, batch, fast)
    return y.view(shape)


def can_multiply_into(a: Quantized, b: Quantized, bias: Tensor | None, out: Tensor) -> bool:
    """Whether one matrix by one matrix can be written in place, without anything in between."""
    whole = all(q.data.dim() == 2 and q.data.numel() and q.data.shape[1] % ALIGNMENT == 0 for q in (a, b))
    return whole and out.is_contiguous() and out.dtype == torch.bfloat16 and _in_cublas(a, b, bias, out.dtype)


def gemm_nt_into(a: Quantized, b: Quantized, bias: Tensor | None, out: Tensor, *, fast: bool) -> Tensor:
    return _scaled_mm(a, b, bias, out.dtype, fast, out)


def merge_rows(a: Quantized, b: Quantized, batch: Sequence[int]) -> tuple[Quantized, Quantized, Sequence[int]]:
    """Batches next to the rows of `a` over which `b` is the same, as rows. Views only."""
    while (
        batch
        and a.data.dim() > 2
        and a.data.shape[-3] == batch[-1]
        and (b.data.dim() == 2 or b.data.shape[-3] == 1)
        and (a.scale.dim() == 0 or a.scale.shape[:-1] == a.data.shape[:-1])
        and b.scale.dim() in (0, b.data.dim())
    ):
        a = Quantized(_flatten_rows(a.data), _flatten_rows(a.scale) if a.scale.dim() else a.scale)
        if b.data.dim() > 2:
            b = Quantized(b.data.squeeze(-3), b.scale.squeeze(-3) if b.scale.dim() else b.scale)
        batch = batch[:-1]
    return a, b, batch


def check_batch(full: Sequence[int], batch: Sequence[int]) -> None:
    aligned = (1,) * (len(full) - len(batch)) + tuple(batch)
    if len(aligned) != len(full) or any(t not in (1, f) for f, t in zip(full, aligned, strict=True)):
        raise ValueError(f"batch={tuple(batch)}: does not fit the batch {tuple(full)} of the operands")


def batch_strides(shape: Sequence[int], dims: int) -> list[int]:
    """Strides, in matrices, along each of `dims` batch dimensions; 0 where the operand broadcasts."""
    shape = (1,) * (dims - len(shape)) + tuple(shape)
    return [0 if size == 1 else math.prod(shape[i + 1 :]) for i, size in enumerate(shape)]


def _one(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """One matrix by one matrix."""
    if _in_cublas(a, b, bias, out_dtype):
        return _scaled_mm(a, b, bias, out_dtype, fast)
    if bias is None and out_dtype in (torch.bfloat16, torch.float32) and _in_cublas_blocks(a, b):
        return _scaled_mm_blocks(a, b, out_dtype)
    return _by_triton(a, b, bias, out_dtype, (), fast)


def _in_cublas(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether `torch._scaled_mm` takes this: tensor and row scales, formats and shapes it does not refuse."""
    return (
        constant_along_k(a)
        and constant_along_k(b)
        and not a.data.dtype == b.data.dtype == torch.float8_e5m2
        and b.data.shape[-2] % ALIGNMENT == 0
        and (bias is None or (bias.dtype == out_dtype == torch.bfloat16))
    )


def _in_cublas_blocks(a: Quantized, b: Quantized) -> bool:
    """1x128 by 1x128 or by 128x128, either way round, E4M3, whole blocks: others would be refused or need padding."""
    m, n, k = a.data.shape[0], b.data.shape[0], a.data.shape[1]
    rows = _rows_per_block(a), _rows_per_block(b)
    return (
        rows in ((1, 1), (1, BLOCK), (BLOCK, 1))
        and a.data.dtype == b.data.dtype == torch.float8_e4m3fn
        and k % BLOCK == 0
        and k > BLOCK
        and m % max(rows[0], ALIGNMENT) == 0
        and n % max(rows[1], ALIGNMENT) == 0
        and tuning_for(a.data.device).gemm.cublas_blocks
    )


def _scaled_mm(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, fast: bool, out: Tensor | None = None
) -> Tensor:
    """Through cuBLASLt, scales constant along K; into `out` if given."""
    a_scale, b_scale = a.scale.float(), b.scale.float()  # E8M0 scales are constant along a K of one block
    rows = a_scale.dim() > 0 or b_scale.dim() > 0
    if rows:
        a_scale = a_scale.expand(a.data.shape[0], 1).contiguous()
        b_scale = b_scale.expand(b.data.shape[0], 1).contiguous()
    if not rows or out_dtype == torch.bfloat16:
        return torch._scaled_mm(
            a.data,
            b.data.t(),
            a_scale,
            b_scale.t() if rows else b_scale,
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=fast,
            out=out,
        )
    # Row scales come with BF16 results only; the sum itself can be had in FP32, and scaled after.
    one = torch.ones((), dtype=torch.float32, device=a.data.device)
    into = out if out_dtype == torch.float32 else None
    y = torch._scaled_mm(a.data, b.data.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast, out=into)
    y.mul_(a_scale).mul_(b_scale.t())
    if out_dtype == torch.float32:
        return y
    return y.to(out_dtype) if out is None else out.copy_(y)


def _scaled_mm_blocks(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """Through cuBLASLt, scales for blocks. It adds up 128 products at a time; there is no fast accumulation."""
    recipes = {1: F.ScalingType.BlockWise1x128, BLOCK: F.ScalingType.BlockWise128x128}
    a_recipe, b_recipe = (recipes[_rows_per_block(q)] for q in (a, b))
    return F.scaled_mm(
        a.data, b.data.t(), _lay_out_blocks(a), a_recipe, _lay_out_blocks(b), b_recipe, output_dtype=out_dtype
    )


def _lay_out_blocks(q: Quantized) -> Tensor:
    """1x128: `[rows, K/128]`, row by row in memory. 128x128: `[K/128 rounded up to 4, rows/128]`, K by K in memory."""
    if _rows_per_block(q) == 1:
        return q.scale.t().contiguous().t()
    return F.pad(q.scale, (0, -q.scale.shape[1] % 4)).t() if q.scale.shape[1] % 4 else q.scale.contiguous().t()


def _one_after_the_other(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, full: torch.Size, fast: bool
) -> Tensor:
    """A batch through cuBLASLt, each product written into its place."""
    m, n = a.data.shape[-2], b.data.shape[-2]
    out = torch.empty(full.numel(), m, n, dtype=out_dtype, device=a.data.device)
    for a_i, b_i, out_i in zip(_matrices(a, full), _matrices(b, full), out.unbind(), strict=True):
        _scaled_mm(a_i, b_i, bias, out_dtype, fast, out_i)
    return out


def _by_triton(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, batch: Sequence[int], fast: bool
) -> Tensor:
    from octavo.kernels.gemm import triton  # on first use: `import octavo` works without Triton

    return triton.gemm_nt(a, b, bias=bias, out_dtype=out_dtype, batch=batch, fast=fast)


def _matrices(q: Quantized, full: torch.Size) -> list[Quantized]:
    """The matrices of an operand, in the order of the batch shape `full` it is broadcast to. Views only."""
    shape, scale = q.data.shape, q.scale
    data = q.data.view(-1, *shape[-2:]).unbind()
    if scale.dim():
        scale = scale.expand(*shape[:-2], *scale.shape[-2:]).reshape(-1, *scale.shape[-2:])
    scales = scale.unbind() if scale.dim() else (scale,) * len(data)
    strides = batch_strides(shape[:-2], len(full))
    order = (sum(map(int.__mul__, index, strides)) for index in itertools.product(*map(range, full)))
    return [Quantized(data[i], scales[i]) for i in order]


def _fills_gpu(a: Quantized, b: Quantized) -> bool:
    tiles = -(-a.data.shape[-2] // 128) * -(-b.data.shape[-2] // 256)
    return tiles >= tuning_for(a.data.device).gemm.full_gpu


def _has_known_scale(q: Quantized) -> bool:
    """Whether there is one scale for the tensor, for a row, or for a block of one of the granularities."""
    if q.scale.dim() == 0:
        return True
    if q.scale.dim() < 2:
        return False
    (rows, k), (scale_rows, groups) = q.data.shape[-2:], q.scale.shape[-2:]
    heights = (rows, *[-(-rows // height) for height in GROUP_HEIGHTS])
    return scale_rows in heights and groups in (1, *[-(-k // group) for group in GROUPS])


def _rows_per_block(q: Quantized) -> int:
    """1 or 128 where scales are for blocks of 128 along K, else 0."""
    if q.scale.dim() != 2 or q.scale.shape[1] != -(-q.data.shape[1] // BLOCK):
        return 0
    return 1 if q.scale.shape[0] == q.data.shape[0] else BLOCK


def _as_matrix(q: Quantized) -> Quantized:
    return Quantized(q.data.view(q.data.shape[-2:]), q.scale.reshape(q.scale.shape[-2:]) if q.scale.dim() else q.scale)


def _flatten_rows(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-3], -1, x.shape[-1])
