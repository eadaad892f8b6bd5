"""Backward of adapters: everything that needs the gradient g of the outputs in one reading of it, and the gradient of A
from x as it was saved, in FP8.

    uᵢ = sᵢ · gᵢ · Bᵢ          of M × R, the gradient of `x · Aᵀ`
    dBᵢ = sᵢ · gᵢᵀ · tᵢ        of N × R
    dA = uᵀ · xq               of ΣR × K, for all adapters at once

Shapes: M tokens, K inputs, N outputs, R the rank, equal for all adapters i, each of which has some of the outputs.

A program stays with its outputs (or inputs) and walks over tokens: it holds their part of B and sums their gradient.
What it finds of u, or finds for its part of the tokens only, it adds to what others find, in FP32.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.adapters.tiles import (
    MOST,
    Span,
    are_even,
    choose,
    in_dtype,
    numbers_of,
    padded,
    product,
    select,
    tiles_of,
)
from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.quantize.dequantize import can_dequantize
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import check_tile, tuning_for
from octavo.numerics.quantize import BLOCK, Quantized

LARGEST_RANK = 64
LARGEST_RANKS = 256  # of all adapters together, where x is in FP8
_LAUNCHES = LaunchCache()


@triton.jit
def gradients_kernel(
    g_ptr,
    t_ptr,
    factor_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    u_ptr,
    d_ptr,
    M,
    stride_g,
    stride_t,
    stride_u,
    first0,
    first1,
    first2,
    size0,
    size1,
    size2,
    scaling0,
    scaling1,
    scaling2,
    RANK: tl.constexpr,
    FOLD: tl.constexpr,
    OF_B: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Programs: tiles of outputs of one adapter after the other, by parts of the tokens."""
    i, j, first, size, scaling, above = select(
        tl.program_id(0), first0, first1, first2, size0, size1, size2, scaling0, scaling1, scaling2, TILE_N
    )
    b_ptr = choose(i, b0_ptr, b1_ptr, b2_ptr)
    PADDED: tl.constexpr = padded(RANK)
    n, k = j * TILE_N + tl.arange(0, TILE_N), tl.arange(0, PADDED)
    inside = (n[:, None] < size) & (k[None, :] < RANK)
    b = tl.load(b_ptr + n[:, None] * RANK + k[None, :], mask=inside, other=0.0)
    if FOLD:
        factor = tl.load(factor_ptr + first + n, mask=n < size, other=1.0)[:, None]
        b = tiles.round_to(tl.div_rn(b.to(tl.float32), tl.broadcast_to(factor, b.shape)), b.dtype)
    d = tl.zeros([TILE_N, PADDED], tl.float32)
    down, splits = tl.cdiv(M, TILE_M), tl.num_programs(1)
    for tile in range(tl.program_id(1), down, splits):
        # Neighbours begin with other tokens, so that they do not add to the same part of u.
        rotated = tile + tl.program_id(0) * splits
        m = (rotated % down) * TILE_M + tl.arange(0, TILE_M)
        where = g_ptr + m[:, None].to(tl.int64) * stride_g + (first + n)[None, :]
        where_t = t_ptr + m[:, None] * stride_t + (i * RANK + k)[None, :]
        if EVEN:
            g = tl.load(where)
        else:
            g = tl.load(where, mask=(m[:, None] < M) & (n[None, :] < size), other=0.0)
        u = product(g, b) * scaling
        if OF_B:
            t = tl.load(where_t, mask=(m[:, None] < M) & (k[None, :] < RANK), other=0.0)
            d = product(tl.trans(g), t, d)
        here = u_ptr + m[:, None] * stride_u + (i * RANK + k)[None, :]
        tl.atomic_add(here, u, mask=(m[:, None] < M) & (k[None, :] < RANK), sem="relaxed")
    if OF_B:
        d *= scaling
        if FOLD:
            d = tl.div_rn(d, tl.broadcast_to(factor, d.shape))
        tl.atomic_add(d_ptr + (above + n)[:, None] * RANK + k[None, :], d, mask=inside, sem="relaxed")


@triton.jit
def down_kernel(
    u_ptr,
    x_ptr,
    scale_ptr,
    d_ptr,
    M,
    K,
    stride_scale,
    RANKS: tl.constexpr,
    FP16: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Programs: tiles of inputs, by parts of the tokens. `BLOCKS`: a scale per 128 inputs; see `dequantize_kernel`."""
    PADDED: tl.constexpr = max(64, padded(RANKS))
    DTYPE: tl.constexpr = tl.float16 if FP16 else tl.bfloat16
    j = tl.program_id(0)
    k, r = j * TILE_K + tl.arange(0, TILE_K), tl.arange(0, PADDED)
    d = tl.zeros([PADDED, TILE_K], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(M, TILE_M), tl.num_programs(1)):
        m = tile * TILE_M + tl.arange(0, TILE_M)
        where = x_ptr + m[:, None].to(tl.int64) * K + k[None, :]
        if EVEN:
            x = tl.load(where)
        else:
            x = tl.load(where, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        scale = tl.load(scale_ptr + m * stride_scale + (j * TILE_K // 128 if BLOCKS else 0), mask=m < M, other=0.0)
        u = tl.load(u_ptr + m[:, None] * RANKS + r[None, :], mask=(m[:, None] < M) & (r[None, :] < RANKS), other=0.0)
        # The scale of a token goes with u, which is the smaller one.
        scaled = tiles.round_to(u.to(tl.float32) * scale[:, None], DTYPE)
        d = product(tl.trans(scaled), x.to(DTYPE), d)
    inside = (r[:, None] < RANKS) & (k[None, :] < K)
    tl.atomic_add(d_ptr + r[:, None] * K + k[None, :], d, mask=inside, sem="relaxed")


def can_multiply(g: Tensor, ups: Sequence[Tensor]) -> bool:
    """Whether `add_gradients` covers this: 16 bits, at most three adapters, all of one rank."""
    return (
        g.dtype in (torch.bfloat16, torch.float16)
        and 0 < len(ups) <= MOST
        and g.numel() > 0
        and g.stride(1) == 1
        and ups[0].shape[1] <= LARGEST_RANK
        and all(up.shape[1] == ups[0].shape[1] for up in ups)
    )


def add_gradients(
    g: Tensor, t: Tensor, ups: Sequence[Tensor], spans: Sequence[Span], factor: Tensor | None, u: Tensor,
    d: Tensor | None,
) -> None:  # fmt: skip
    """Add to `u[M, ΣR]` and, if it is wanted, to `d`, all dB one after the other; both in FP32.

    `factor[N]`: g comes multiplied by it.
    """
    ups = in_dtype(ups, g.dtype)
    others = [x for x in (factor, d) if x is not None]
    key = (tuple(spans), d is None, factor is None, kind(g, t, *ups, u, *others))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(
        key, _build_gradients(g, t, ups[0], u, spans, fold=factor is not None, of_b=d is not None)
    )
    launches.run(g, t, g if factor is None else factor, *ups, *(ups[0],) * (MOST - len(ups)), u, u if d is None else d)


def _build_gradients(
    g: Tensor, t: Tensor, up: Tensor, u: Tensor, spans: Sequence[Span], *, fold: bool, of_b: bool
) -> Launches:
    tuning, m = tuning_for(g.device).adapters, g.shape[0]
    tile_m, tile_n, warps, stages, programs, _ = tuning.gradients
    across = tiles_of(spans, tile_n)
    splits = _splits(across, -(-m // tile_m), programs * multiprocessors(g.device), tuning.start)
    numbers = (m, g.stride(0), t.stride(0), u.stride(0), *numbers_of(spans))
    constants = {
        "RANK": up.shape[1],
        "FOLD": fold,
        "OF_B": of_b,
        "EVEN": m % tile_m == 0 and are_even(spans, tile_n),
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "num_warps": warps,
        "num_stages": stages,
    }
    launches = Launches(given=8)
    launches.launch(gradients_kernel, (across, splits), range(8), numbers, constants)
    return launches


@cache
def _splits(across: int, down: int, slots: int, start: int) -> int:
    """How many parts to split the tokens into; starting a program costs as much as `start` tiles."""

    def time(splits: int) -> int:
        return -(-across * splits // slots) * (-(-down // splits) + start)

    return min(range(1, down + 1), key=time)


def can_multiply_saved(x: Quantized, u: Tensor, dtype: torch.dtype) -> bool:
    """Whether `add_down` covers this: FP8 rows that `can_dequantize` accepts, multiplied in 16 bits."""
    return u.shape[1] <= LARGEST_RANKS and u.is_contiguous() and can_dequantize(x, dtype) and dtype != torch.float32


def add_down(u: Tensor, x: Quantized, d: Tensor, dtype: torch.dtype) -> None:
    """Add `u[M, ΣR]ᵀ · x[M, K]` to `d[ΣR, K]`, in FP32, from products in `dtype`."""
    scale = x.scale.contiguous()
    given = (u, x.data, scale, d)
    key = ("down", dtype, kind(*given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_down(*given, dtype))
    launches.run(*given)


def _build_down(u: Tensor, x: Tensor, scale: Tensor, d: Tensor, dtype: torch.dtype) -> Launches:
    (m, k), ranks = x.shape, d.shape[0]
    tuning = tuning_for(u.device).adapters
    tile_m, tile_k, warps, stages, programs, _ = tuning.down
    by_block = scale.dim() > 0 and scale.shape[1] > 1
    if by_block:
        check_tile("adapters.down", tuning.down, BLOCK % tile_k == 0, f"x was saved in blocks of 1×{BLOCK}")
    across = -(-k // tile_k)
    splits = _splits(across, -(-m // tile_m), programs * multiprocessors(u.device), tuning.start)
    constants = {
        "RANKS": ranks,
        "FP16": dtype == torch.float16,
        "BLOCKS": by_block,
        "EVEN": m % tile_m == 0 and k % tile_k == 0,
        "TILE_M": tile_m,
        "TILE_K": tile_k,
        "num_warps": warps,
        "num_stages": stages,
    }
    stride = scale.shape[1] if scale.dim() else 0
    launches = Launches(given=4)
    launches.launch(down_kernel, (across, splits), range(4), (m, k, stride), constants)
    return launches
