"""`gemm_nt` on FP8 tensor cores, through cuBLASLt as torch exposes it.

cuBLASLt takes one scale per tensor, or one per row of each operand; not E5M2 by E5M2. With fast accumulation the tensor
cores keep about 14 bits of the running sum, else it is added up in FP32 every few instructions. Batches run one matrix
after the other.
"""

import torch
from torch import Tensor

from octavo.numerics.gemm import ALIGNMENT, check_same_k, constant_along_k, fold_quantized, pad_operand
from octavo.numerics.quantize import Quantized


def can_multiply(a: Quantized, b: Quantized) -> bool:
    """Whether cuBLASLt takes these operands."""
    both_e5m2 = a.data.dtype == b.data.dtype == torch.float8_e5m2
    return constant_along_k(a) and constant_along_k(b) and not both_e5m2


def gemm_nt(
    a: Quantized, b: Quantized, *, bias: Tensor | None, out_dtype: torch.dtype, batch: torch.Size, fast: bool
) -> Tensor:
    """As `numerics.gemm.padded_gemm_nt`, on tensor cores."""
    check_same_k(a.data, b.data)
    n = b.data.shape[-2]
    a, b = pad_operand(a, 0), pad_operand(b, -n % ALIGNMENT)
    full = torch.broadcast_shapes(a.data.shape[:-2], b.data.shape[:-2])
    a, b, full = fold_quantized(a, b, full, batch)
    if not full:
        y = _multiply(a, b, out_dtype if bias is None else torch.float32, fast)
    else:
        wide = out_dtype if bias is None and full.numel() == batch.numel() else torch.float32
        pairs = zip(_matrices(a, full), _matrices(b, full), strict=True)
        y = torch.stack([_multiply(a_i, b_i, wide, fast) for a_i, b_i in pairs])
        y = y.reshape(*full, *y.shape[-2:])
        if full.numel() != batch.numel():
            y = y.sum_to_size(*batch, *y.shape[-2:])
    y = y.reshape(*batch, *y.shape[-2:])[..., :n]
    return (y if bias is None else y + bias.float()).to(out_dtype).contiguous()


def _multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """One matrix by one matrix."""
    a_scale, b_scale = a.scale.float(), b.scale.float()  # E8M0 scales are constant along a K of one block
    if a_scale.dim() == b_scale.dim() == 0:
        return torch._scaled_mm(a.data, b.data.t(), a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast)
    a_scale = a_scale.expand(a.data.shape[0], 1).contiguous()
    b_scale = b_scale.expand(b.data.shape[0], 1).contiguous()
    if out_dtype == torch.bfloat16:
        return torch._scaled_mm(a.data, b.data.t(), a_scale, b_scale.t(), out_dtype=out_dtype, use_fast_accum=fast)
    # Row scales come with BF16 results only; the sum itself can be had in FP32, and scaled after.
    one = torch.ones((), device=a.data.device)
    y = torch._scaled_mm(a.data, b.data.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
    return (y * a_scale * b_scale.t()).to(out_dtype)


def _matrices(q: Quantized, full: torch.Size) -> list[Quantized]:
    """The matrices of an operand, broadcast to the batch shape `full`."""
    # float8 has no `expand` on every version; bytes do.
    data = q.data.view(torch.uint8).expand(*full, *q.data.shape[-2:]).flatten(0, -3).unbind()
    if q.scale.dim() == 0:
        scales: tuple[Tensor, ...] = (q.scale,) * len(data)
    else:
        scales = q.scale.expand(*full, *q.scale.shape[-2:]).flatten(0, -3).unbind()
    return [Quantized(d.view(q.data.dtype), s) for d, s in zip(data, scales, strict=True)]
