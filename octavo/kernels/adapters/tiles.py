"""Helpers of the adapter kernels: padded ranks, their products, and which of several adapters a program serves."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles

MOST = 3  # adapters of one launch
Span = tuple[int, int, float]  # an adapter's first output, how many it has, and its factor


@triton.constexpr_function
def padded(rank):
    """The rank rounded up to a size that tensor cores take."""
    return max(16, triton.next_power_of_2(rank))


@triton.jit
def product(a, b, c=None):
    if tiles.INTERPRETED:  # whose own product of BF16 is not one
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    return tl.dot(a, b, c)


@triton.jit
def select(j, first0, first1, first2, size0, size1, size2, scaling0, scaling1, scaling2, TILE_N: tl.constexpr):
    """Find the adapter that tile j belongs to, where the tiles of one follow those of another.

    Returns its index, its tile there, its first output, how many it has, its factor, and how many those before it have.
    """
    before1 = tl.cdiv(size0, TILE_N)
    before2 = before1 + tl.cdiv(size1, TILE_N)
    i, tile, first, size, scaling, above = 0, j, first0, size0, scaling0, 0
    if j >= before2:
        i, tile, first, size, scaling, above = 2, j - before2, first2, size2, scaling2, size0 + size1
    elif j >= before1:
        i, tile, first, size, scaling, above = 1, j - before1, first1, size1, scaling1, size0
    return i, tile, first, size, scaling, above


@triton.jit
def choose(i, ptr0, ptr1, ptr2):
    ptr = ptr0
    if i == 2:
        ptr = ptr2
    elif i == 1:
        ptr = ptr1
    return ptr


def in_dtype(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The matrices, contiguous and in this dtype; copies only of those that are not."""
    return [m if m.dtype == dtype and m.is_contiguous() else m.to(dtype).contiguous() for m in matrices]


def tiles_of(spans: Sequence[Span], tile_n: int) -> int:
    return sum(-(-size // tile_n) for _, size, _ in spans)


def are_even(spans: Sequence[Span], tile_n: int) -> bool:
    return all(size % tile_n == 0 for _, size, _ in spans)


def numbers_of(spans: Sequence[Span]) -> tuple[float, ...]:
    """The arguments of `select` after the tile."""
    every = [*spans, *((0, 0, 1.0),) * (MOST - len(spans))]
    firsts, sizes, scalings = zip(*every, strict=True)
    return (*firsts, *sizes, *scalings)
