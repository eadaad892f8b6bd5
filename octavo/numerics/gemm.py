"""The FP8 matrix product.

Everything is an "NT" product: both operands are contiguous along the contracted dimension K, because that is what the
tensor cores take.

    y_MN = Σ_k a_MK · b_NK        accumulated in FP32, scaled, then rounded once to `out_dtype`

`gemm_nt` obeys the GPU's rules, so that emulated code also runs on the device: K and N are multiples of 16 and the
operands are contiguous. `padded_gemm_nt` takes any size, adds the zeros and takes them off again.

Leading dimensions are batches and broadcast. `batch` names the batch shape of the result: where it has fewer or
smaller dimensions than the broadcast one, the product is summed over them in FP32, as the gradient of a broadcast
operand is. Kernels fold such a dimension into K instead of summing at the end; so does this.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from octavo.numerics.formats import to_float32
from octavo.numerics.quantize import Quantized, expand_scale

ALIGNMENT = 16


def gemm_nt(
    a: Quantized,
    b: Quantized,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    batch: Sequence[int] | None = None,
) -> Tensor:
    """Compute `a[..., M, K] · b[..., N, K]ᵀ + bias`; raise where a GPU's GEMM would."""
    check_gemm_rules(a.data, b.data)
    full = torch.broadcast_shapes(a.data.shape[:-2], b.data.shape[:-2])
    batch = full if batch is None else torch.Size(batch)
    aligned = (1,) * (len(full) - len(batch)) + tuple(batch)
    if len(aligned) != len(full) or any(t not in (1, f) for f, t in zip(full, aligned, strict=True)):
        raise ValueError(f"batch={tuple(batch)}: does not fit the batch {tuple(full)} of the operands")
    a, b, full = fold_quantized(a, b, full, batch)
    a_hp, b_hp = to_float32(a.data), to_float32(b.data)
    # Scales that are constant along K multiply the result, as the GPU does it; others multiply the operands.
    outer = constant_along_k(a) and constant_along_k(b) and full.numel() == batch.numel()
    if not outer:
        a_hp = a_hp * expand_scale(a.scale.float(), a_hp.shape)
        b_hp = b_hp * expand_scale(b.scale.float(), b_hp.shape)
    if full.numel() != batch.numel():
        a_hp, b_hp = fold_into_k(a_hp, b_hp, full, batch)
    with _in_fp32(a_hp.device):
        y = a_hp @ b_hp.mT
    if outer:
        y = y.mul_(a.scale.float()).mul_(b.scale.float().mT if b.scale.dim() else b.scale)
    if bias is not None:
        y = y + bias.float()
    return y.reshape(*batch, *y.shape[-2:]).to(out_dtype)


@contextmanager
def _in_fp32(device: torch.device) -> Iterator[None]:
    """Region without TF32 and torch's autocast: FP8 values times a block's scale are multiplied in FP32."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        setting = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = setting


def padded_gemm_nt(
    a: Quantized,
    b: Quantized,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    batch: Sequence[int] | None = None,
) -> Tensor:
    """Compute `gemm_nt` for any size: zeros are added along K and N, and removed from the result."""
    check_same_k(a.data, b.data)
    n = b.data.shape[-2]
    pad_n = -n % ALIGNMENT
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; the product has {n} columns")
    if bias is not None and pad_n:
        bias = torch.nn.functional.pad(bias, (0, pad_n))
    y = gemm_nt(pad_operand(a, 0), pad_operand(b, pad_n), bias=bias, out_dtype=out_dtype, batch=batch)
    return y[..., :n].contiguous() if pad_n else y


def check_same_k(a: Tensor, b: Tensor) -> None:
    """Check that K agrees before padding, which may round two different K up to the same one."""
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"gemm_nt takes [..., M, K] and [..., N, K]; got {tuple(a.shape)} and {tuple(b.shape)}")


def check_gemm_rules(a: Tensor, b: Tensor) -> None:
    """Raise where a GPU's FP8 GEMM would: alignment, layout, inner dimensions."""
    check_same_k(a, b)
    k, n = b.shape[-1], b.shape[-2]
    if k % ALIGNMENT or n % ALIGNMENT:
        raise ValueError(f"gemm_nt needs K and N in multiples of {ALIGNMENT}; got K={k}, N={n} (padded_gemm_nt pads)")
    if not a.is_contiguous() or not b.is_contiguous():
        raise ValueError("gemm_nt needs operands contiguous along K; call .contiguous() on the transposed one")


def constant_along_k(q: Quantized) -> bool:
    """Return True for one scale per tensor or per row. (128 rows to a scale with one block along K is neither.)"""
    scale = q.scale
    return scale.dim() == 0 or (scale.dim() >= 2 and scale.shape[-1] == 1 and scale.shape[-2] == q.data.shape[-2])


def fold_into_k(a: Tensor, b: Tensor, full: torch.Size, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """Move the batch dimensions to be summed over next to K and merge them with it.

    `full` is the broadcast batch shape, `batch` the result's (aligned at the right, as in broadcasting).
    """
    target = (1,) * (len(full) - len(batch)) + tuple(batch)
    summed = [i for i, (f, t) in enumerate(zip(full, target, strict=True)) if f != t]
    kept = [i for i in range(len(full)) if i not in summed]
    count = math.prod(full[i] for i in summed)

    def fold(x: Tensor) -> Tensor:
        x = x.reshape((1,) * (len(full) + 2 - x.dim()) + tuple(x.shape))
        x = x.expand(*(full[i] if i in summed else x.shape[i] for i in range(len(full))), *x.shape[-2:])
        x = x.permute(*kept, len(full), *summed, len(full) + 1)
        return x.reshape(*x.shape[: len(kept) + 1], count * x.shape[-1])

    return fold(a), fold(b)


def fold_quantized(
    a: Quantized, b: Quantized, full: torch.Size, batch: torch.Size
) -> tuple[Quantized, Quantized, torch.Size]:
    """Apply `fold_into_k` to FP8 bytes, a quarter of FP32, where there is one scale. Also returns the batch left."""
    if batch == full or a.scale.dim() or b.scale.dim():
        return a, b, full
    a_data, b_data = fold_into_k(a.data.view(torch.uint8), b.data.view(torch.uint8), full, batch)
    folded = Quantized(a_data.view(a.data.dtype), a.scale), Quantized(b_data.view(b.data.dtype), b.scale)
    return *folded, torch.broadcast_shapes(a_data.shape[:-2], b_data.shape[:-2])


def pad_operand(q: Quantized, pad_rows: int) -> Quantized:
    """Add zeros along K up to the alignment, and `pad_rows` rows of them."""
    pad_k = -q.data.shape[-1] % ALIGNMENT
    if not pad_rows and not pad_k:
        return q
    scale = q.scale
    if pad_rows and scale.dim() >= 2 and scale.shape[-2] == q.data.shape[-2]:
        ones = torch.ones(*scale.shape[:-2], pad_rows, scale.shape[-1], dtype=torch.float32, device=scale.device)
        scale = torch.cat([scale.float(), ones], dim=-2)
    # Zero has the same bits in every FP8 format; padding float8 directly is not implemented on all devices.
    data = torch.nn.functional.pad(q.data.view(torch.uint8), (0, pad_k, 0, pad_rows)).view(q.data.dtype)
    return Quantized(data, scale)
