"""The kernels of the few-token products: x laid out, products in parts, and the sum of the parts with what is added.

    lay_out     x[M, K] → x'[TILE_M, K padded to 128]      after an RMS norm, if there is one; rows and columns of zeros
    products    parts[s, M, N] = x' · wᵀ over part s of K, times the weight's scales;    t[s, M, ΣR] = x' · [A₁; A₂; …]ᵀ
    finish      y = Σₛ parts + Σᵢ sᵢ · tᵢ · Bᵢᵀ + bias + residual, or h = act(gate) · up of that

A weight's tile is the left operand, so that few tokens are few columns: `yᵀ = w · xᵀ`. It goes through shared memory as
it is, one byte an element, and is converted in registers, from which Hopper's tensor cores take it.
"""

import triton
import triton.language as tl

from octavo.kernels import tiles
from octavo.kernels.adapters.tiles import choose, padded, product
from octavo.kernels.few_tokens.tiles import adapted, from_words, in_dtype, sum_of_parts
from octavo.kernels.norm import inverse_rms, weighted
from octavo.numerics.quantize import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_HALF = tl.constexpr(BLOCK // 2)
# How the weight is scaled.
TENSOR = tl.constexpr(0)
CHANNEL = tl.constexpr(1)
BLOCKS = tl.constexpr(2)


@triton.jit
def store_laid_out(ptrs, x, first, across, COLUMNS: tl.constexpr):
    """Store x `[rows, COLUMNS]`, columns `first` and on of `across`: of every 128, the even ones, then the odd ones."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], COLUMNS // 2, 2]))
    c = first + 2 * tl.arange(0, COLUMNS // 2)
    ptrs += (c // _BLOCK * _BLOCK + c % _BLOCK // 2)[None, :]
    inside = c[None, :] < across
    tl.store(ptrs, even, mask=inside)
    tl.store(ptrs + _HALF, odd, mask=inside)


@triton.jit
def lay_out_kernel(
    h_ptr, weight_ptr, x_ptr, M, across, eps,
    NORM: tl.constexpr, SHIFTED: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs: rows by parts of `WIDTH` columns; with a norm, one part. `across`: columns of x, laid out."""
    tiles.follow(OVERLAPS)
    row, first = tl.program_id(0) + tl.arange(0, 1), tl.program_id(1) * WIDTH
    c = first + tl.arange(0, WIDTH)
    x = tl.load(h_ptr + row[:, None] * K + c[None, :], mask=(row[:, None] < M) & (c[None, :] < K), other=0.0)
    if NORM:
        h = x.to(tl.float32)
        inverse = inverse_rms(tl.sum(h * h, axis=1), eps, K)
        weight = tl.load(weight_ptr + c, mask=c < K, other=0.0).to(tl.float32)
        x = weighted(h, inverse[:, None], weight[None, :], SHIFTED, h_ptr.dtype.element_ty)
    store_laid_out(x_ptr + row[:, None] * across, x, first, across, WIDTH)


@triton.jit
def products_kernel(
    x_ptr, w_ptr, scale_ptr, a0_ptr, a1_ptr, a2_ptr, parts_ptr, t_ptr, M, N, K, steps, stride_scale, parts,
    t_parts, FORMAT: tl.constexpr, MODE: tl.constexpr, RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr,
    EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs: parts of K of one adapter after the other, then tiles of outputs by parts of K.

    `w_ptr`: to words of two bytes. `steps`: of 128 columns. `EVEN`: whole tiles of N and K.
    """
    tiles.follow(OVERLAPS)
    ADAPTERS: tl.constexpr = (RANK0 > 0) + (RANK1 > 0) + (RANK2 > 0)
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    pid = tl.program_id(0)
    if pid < ADAPTERS * t_parts:
        i, part = pid // t_parts, pid % t_parts
        rank = tl.where(i == 2, RANK2, tl.where(i == 1, RANK1, RANK0))
        column = tl.where(i == 2, RANK0 + RANK1, tl.where(i == 1, RANK0, 0))
        a_ptr = choose(i, a0_ptr, a1_ptr, a2_ptr)
        PADDED: tl.constexpr = padded(max(RANK0, RANK1, RANK2))
        t_ptr += part * M * RANKS + column
        _project(x_ptr, a_ptr, t_ptr, part, t_parts, rank, M, K, steps, RANKS, PADDED, TILE_M)
    else:
        pid -= ADAPTERS * t_parts
        _multiply(
            x_ptr, w_ptr, scale_ptr, parts_ptr, pid // parts, pid % parts, parts, M, N, K, steps, stride_scale, FORMAT,
            MODE, EVEN, TILE_M, TILE_N,
        )  # fmt: skip


@triton.jit
def _multiply(
    x_ptr, w_ptr, scale_ptr, parts_ptr, tile, part, parts, M, N, K, steps, stride_scale,
    FORMAT: tl.constexpr, MODE: tl.constexpr, EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    n0 = tile * TILE_N
    n, m, c = n0 + tl.arange(0, TILE_N), tl.arange(0, TILE_M), tl.arange(0, _HALF)
    each = tl.cdiv(steps, parts)
    first = part * each
    last = tl.minimum(first + each, steps)
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * (K // 2) + c[None, :]
    x_ptrs = x_ptr + m[:, None] * (steps * _BLOCK) + c[None, :]
    # Tiles lie in one row of blocks, or are several rows of them.
    COUNT: tl.constexpr = 1 if TILE_N <= _BLOCK else TILE_N
    rows = tl.minimum(n0 + tl.arange(0, COUNT), N - 1) // _BLOCK
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    for i in range(first, last):
        step = tl.cast(i, tl.int32)
        if EVEN:
            words = tl.load(w_ptrs + step * _HALF, eviction_policy="evict_first")
        else:
            inside = (n[:, None] < N) & ((step * _HALF + c)[None, :] < K // 2)
            words = tl.load(w_ptrs + step * _HALF, mask=inside, other=0, eviction_policy="evict_first")
        x_even = tl.load(x_ptrs + step * _BLOCK, eviction_policy="evict_last")
        x_odd = tl.load(x_ptrs + (step * _BLOCK + _HALF), eviction_policy="evict_last")
        even, odd = from_words(words, FORMAT, dtype)
        if MODE == BLOCKS:
            scale = tl.load(scale_ptr + rows * stride_scale + step)
            acc += product(odd, tl.trans(x_odd), product(even, tl.trans(x_even))) * scale[:, None]
        else:
            acc = product(even, tl.trans(x_even), acc)
            acc = product(odd, tl.trans(x_odd), acc)
    if MODE == CHANNEL:
        acc *= tl.load(scale_ptr + tl.minimum(n, N - 1))[:, None]
    if MODE == TENSOR:
        acc *= tl.load(scale_ptr)
    where = (part * M + m[None, :]) * N + n[:, None]
    inside = (m[None, :] < M) & (n[:, None] < N)
    tl.store(parts_ptr + where, tiles.round_to(acc, parts_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _project(
    x_ptr, a_ptr, t_ptr, part, parts, rank, M, K, steps, RANKS: tl.constexpr, PADDED: tl.constexpr,
    TILE_M: tl.constexpr,
):  # fmt: skip
    """x' · Aᵀ over one part of K, to the columns of t that belong to this adapter."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    r, m, c = tl.arange(0, PADDED), tl.arange(0, TILE_M), tl.arange(0, _HALF)
    k = tl.arange(0, _BLOCK)
    each = tl.cdiv(steps, parts)
    first = part * each
    last = tl.minimum(first + each, steps)
    x_ptrs = x_ptr + m[:, None] * (steps * _BLOCK) + c[None, :]
    acc = tl.zeros([PADDED, TILE_M], tl.float32)
    for i in tl.range(first, last, num_stages=2):  # more would take shared memory from the other programs
        step = tl.cast(i, tl.int32)
        column = step * _BLOCK + k
        inside = (r[:, None] < rank) & (column[None, :] < K)
        a = in_dtype(tl.load(a_ptr + r[:, None] * K + column[None, :], mask=inside, other=0.0), dtype)
        even, odd = tl.split(tl.reshape(a, [PADDED, _HALF, 2]))
        acc = product(even, tl.trans(tl.load(x_ptrs + step * _BLOCK)), acc)
        acc = product(odd, tl.trans(tl.load(x_ptrs + (step * _BLOCK + _HALF))), acc)
    where = m[None, :] * RANKS + r[:, None]
    tl.store(t_ptr + where, acc, mask=(m[None, :] < M) & (r[:, None] < rank))


@triton.jit
def finish_kernel(
    parts_ptr, t_ptr, b0_ptr, b1_ptr, b2_ptr, bias_ptr, residual_ptr, y_ptr, M, N,
    first0, first1, first2, size0, size1, size2, scaling0, scaling1, scaling2,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr, T_PARTS: tl.constexpr,
    RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of outputs by tiles of tokens. With an `ACTIVATION`: h, laid out, with rows of zeros after M."""
    tiles.follow(OVERLAPS)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    m, n = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M), tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    features = N // HALVES
    inside = (m[:, None] < M) & (n[None, :] < features)
    where = m[:, None] * N + n[None, :]
    gate = tl.zeros([TILE_M, TILE_N], tl.float32)
    total = gate
    for half in tl.static_range(HALVES):
        gate = total
        total = sum_of_parts(parts_ptr + where + half * features, M * N, inside, PARTS)
        column = n + half * features
        if RANK0 > 0:
            total = adapted(
                total, t_ptr, b0_ptr, m, column, first0, size0, scaling0, 0, M, RANKS, dtype, RANK0, T_PARTS
            )
        if RANK1 > 0:
            total = adapted(
                total, t_ptr, b1_ptr, m, column, first1, size1, scaling1, RANK0, M, RANKS, dtype, RANK1, T_PARTS
            )
        if RANK2 > 0:
            total = adapted(
                total, t_ptr, b2_ptr, m, column, first2, size2, scaling2, RANK0 + RANK1, M, RANKS, dtype, RANK2, T_PARTS
            )
    if ACTIVATION is None:
        if BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            total += tl.load(residual_ptr + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + where, tiles.round_to(total, dtype), mask=inside)
    else:
        value, _ = ACTIVATION(gate)
        h = tiles.round_to(tl.where(inside, value * total, 0.0), dtype)
        across = tl.cdiv(features, _BLOCK) * _BLOCK
        store_laid_out(y_ptr + m[:, None] * across, h, tl.program_id(0) * TILE_N, across, TILE_N)
