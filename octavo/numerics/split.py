"""FP32 numbers in two halves of 16 bits: BF16 values to compute with, and the bits that BF16 leaves out.

    bits of x + 0x8000  =  high · 2¹⁶ + low        high: x rounded to BF16, ties away from zero; low: 0 to 0xFFFF

Nothing is lost: `join(*split(x))` is x, bit for bit, except the payload of NaN. A `high` that has changed in between
(loaded or pruned weights) can still be joined with the old `low`: the result is within half a BF16 step of the new
`high`, and rounds to it. Below zero and above infinity there is no such half step, and `low` is ignored where it would
lead there.

Both halves are BF16 tensors, although `low` is no number: `Optimizer.load_state_dict` casts the states of a BF16
parameter to BF16, and a tensor that is BF16 already comes through as it is.

`views` splits a tensor without a copy, by truncation: for FP32 states that are written to a file.
"""

import math

import torch
from torch import Tensor

HALF = 0x8000  # half a step of BF16, in the bits of FP32
_LOWER = 0xFFFF
_INFINITY = 0x7F800000


def new_low(high: Tensor) -> Tensor:
    """Return the low half that makes the joined values equal to the BF16 ones."""
    return torch.empty_like(high).view(torch.int16).fill_(-HALF).view(torch.bfloat16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return FP32 values in the memory layout of `high`."""
    upper, lower = high.view(torch.int16).int() << 16, low.view(torch.int16).int() & _LOWER
    size = upper & 0x7FFFFFFF
    beyond = ((size == 0) & (lower < HALF)) | ((size == _INFINITY) & (lower > HALF))
    return torch.where(beyond, upper, (upper | lower) - HALF).view(torch.float32)


def split(x: Tensor, high: Tensor, low: Tensor) -> None:
    """Write FP32 `x` to both halves."""
    # A NaN of all ones would carry into the sign, and become zero.
    bits = torch.where(x.isnan(), math.nan, x).view(torch.int32) + HALF
    high.view(torch.int16).copy_(bits >> 16)
    low.view(torch.int16).copy_(bits.to(torch.int16))


def views(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and lower half of an FP32 tensor; views of its memory where it is laid out in rows."""
    if x.dim() and x.stride(-1) == 1:
        halves = x.view(torch.bfloat16)
        return halves[..., 1::2], halves[..., ::2]
    bits = x.view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16).view(torch.bfloat16)


def join_views(high: Tensor, low: Tensor) -> Tensor:
    """Join the halves that `views` returned, in new memory."""
    return _put_together(high, low).contiguous().view(torch.float32)


def _put_together(high: Tensor, low: Tensor) -> Tensor:
    return (high.view(torch.int16).int() << 16) | (low.view(torch.int16).int() & _LOWER)
