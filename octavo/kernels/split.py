"""FP32 numbers in two halves of 16 bits, each way in one pass: `numerics/split.py`."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.tiles import INFINITY_BITS, INTERPRETED, magnitude_bits
from octavo.kernels.tuning import tuning_for
from octavo.numerics import split as spec

_HALF = tl.constexpr(spec.HALF)


@triton.jit
def join_bits(high, low):
    """The FP32 number of two halves."""
    upper, lower = high.to(tl.int32) << 16, low.to(tl.int32) & 0xFFFF
    size = upper & 0x7FFFFFFF
    beyond = ((size == 0) & (lower < _HALF)) | ((size == INFINITY_BITS) & (lower > _HALF))
    return tl.where(beyond, upper, (upper | lower) - _HALF).to(tl.float32, bitcast=True)


@triton.jit
def split_bits(x):
    """Both halves of an FP32 number, the upper one rounded."""
    # NaN of all ones would carry into the sign, and become zero.
    return tl.where(magnitude_bits(x) > INFINITY_BITS, 0x7FC00000, x.to(tl.int32, bitcast=True)) + _HALF


@triton.jit
def join_kernel(high_ptr, low_ptr, x_ptr, n, SIZE: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = where < n
    high, low = tl.load(high_ptr + where, mask=inside, other=0), tl.load(low_ptr + where, mask=inside, other=0)
    tl.store(x_ptr + where, join_bits(high, low), mask=inside)


@triton.jit
def split_kernel(x_ptr, high_ptr, low_ptr, n, SIZE: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = where < n
    x = tl.load(x_ptr + where, mask=inside, other=0.0)
    bits = split_bits(x)
    tl.store(high_ptr + where, (bits >> 16).to(tl.int16), mask=inside)
    tl.store(low_ptr + where, bits.to(tl.int16), mask=inside)


def can_split(high: Tensor, low: Tensor) -> bool:
    """Whether there is a kernel for these halves."""
    return (INTERPRETED or high.is_cuda) and high.is_contiguous() and low.is_contiguous() and high.numel() > 0


def join(high: Tensor, low: Tensor) -> Tensor:
    x = torch.empty_like(high, dtype=torch.float32)
    grid, size = _arrange(x)
    with _on(high):
        join_kernel[grid](high.view(torch.int16), low.view(torch.int16), x, x.numel(), **size)
    return x


def split(x: Tensor, high: Tensor, low: Tensor) -> None:
    grid, size = _arrange(x)
    with _on(high):
        split_kernel[grid](x, high.view(torch.int16), low.view(torch.int16), x.numel(), **size)


def _arrange(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    elements, warps = tuning_for(x.device).split
    return (-(-x.numel() // elements),), {"SIZE": elements, "num_warps": warps}


def _on(x: Tensor) -> "torch.cuda.device | nullcontext[None]":
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
