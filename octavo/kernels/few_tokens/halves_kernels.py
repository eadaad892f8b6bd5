"""The kernels of few-token products in FP8: x as two halves of it, and products with all that is added to them.

    halves      x[M, K] → x'[2 · TILE_M, K padded] in E4M3, after an RMS norm, if there is one
    products    yᵀ = w · x'ᵀ · scales, its two halves added up, and what belongs to y; or h = act(gate) · up, in halves

`numerics.few_tokens` says what halves are. For the product they are twice as many tokens, each with a factor of its
own: rows of `high`, then those of `low`. Weights and x' go from memory to the tensor cores through shared memory as
they are, and no thread touches a byte of them.

A program's rows of a weight are `TILE_N` outputs, or as many of gate and up, one half each. Programs come in the order
that `kernels.py` describes, and wait for each other as there.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import tiles
from octavo.kernels.adapters.tiles import choose, padded, product
from octavo.kernels.few_tokens.kernels import BLOCKS, CHANNEL, PARTS_OF_T, PARTS_OF_TILE, SLICE, TENSOR
from octavo.kernels.few_tokens.tiles import (
    adapted,
    arrive,
    decoded,
    in_dtype,
    power_for_halves,
    prefetch,
    sum_of_parts,
    touch,
    wait_until,
)
from octavo.kernels.norm import inverse_rms, weighted
from octavo.numerics.few_tokens import LOW
from octavo.numerics.quantize import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_LOW = tl.constexpr(LOW)
_PARTS_OF_T = tl.constexpr(PARTS_OF_T)
_PARTS_OF_TILE = tl.constexpr(PARTS_OF_TILE)
_SLICE = tl.constexpr(SLICE)
PREFETCHES = 128  # of a program that does nothing else
_PREFETCHES = tl.constexpr(PREFETCHES)


@triton.jit
def _rounded(v):
    """FP32 to the nearest E4M3, in FP32 still.

    By arithmetic: where bytes are made of FP32 and converted back, ptxas 12.9 reads a register that nothing has
    written (`F2FP.F16.E4M3.UNPACK_B R2, R1`).
    """
    bits = v.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 127 - 6)
    # Adding 1.5 × 2²³ steps leaves no room for anything below a step.
    shift = ((exponent + 20) << 23).to(tl.float32, bitcast=True) * 1.5
    magnitude = (tl.abs(v) + shift) - shift
    return (magnitude.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _bytes(v):
    """FP32 to E4M3, as integers."""
    return tiles._cast(v, tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int16)


@triton.jit
def _halves(even, odd):
    """Two neighbours in FP32, times their power: words of the high bytes of both, and of the low ones.

    In words, because single bytes must not change hands between threads on their way to memory (`tiles.cast`).
    Infinities become NaN.
    """
    even, odd = tl.fma(even, 0.0, even), tl.fma(odd, 0.0, odd)
    high_even, high_odd = _rounded(even), _rounded(odd)
    low_even, low_odd = (even - high_even) * _LOW, (odd - high_odd) * _LOW
    return _bytes(high_even) | (_bytes(high_odd) << 8), _bytes(low_even) | (_bytes(low_odd) << 8)


@triton.jit
def _from_byte(byte):
    return decoded(byte, tl.float8e4nv)


@triton.jit
def halves_kernel(
    h_ptr, weight_ptr, x_ptr, halves_ptr, factors_ptr, counters_ptr, w_ptr, M, across, eps, counters, rows, N, parts,
    part, early,
    NORM: tl.constexpr, SHIFTED: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, COUNTERS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs: rows, and such as have L2 read weights. `x_ptr`: x itself, after a norm.

    `halves_ptr`: x', two columns a word, of which are `across`. Of each row of the weight L2 reads `early` bytes of
    each of some `parts` of `part` bytes, before the launch in front of this one has ended.
    """
    row, c = tl.program_id(0), tl.arange(0, WIDTH)
    if OVERLAPS:
        gdc_launch_dependents()  # before it waits itself: what starts then reads weights only, and waits
        if row >= rows:
            i = (row - rows) * _PREFETCHES + tl.arange(0, _PREFETCHES)
            w_row, column = tl.minimum(i // parts, N - 1), i % parts * part
            prefetch(w_ptr + w_row.to(tl.int64) * K + column, tl.minimum(K - column, early))
            return
        gdc_wait()
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    x = tl.load(h_ptr + row * K + c, mask=(row < M) & (c < K), other=0.0)
    if NORM:
        h = x.to(tl.float32)
        inverse = inverse_rms(tl.sum(h * h, axis=0), eps, K)
        weight = tl.load(weight_ptr + c, mask=c < K, other=0.0).to(tl.float32)
        x = weighted(h, inverse, weight, SHIFTED, dtype)
        tl.store(x_ptr + row * K + c, x, mask=(row < M) & (c < K))
    wide = x.to(tl.float32)
    power, factor = power_for_halves(tiles.magnitude_bits(wide), 0)
    tl.store(factors_ptr + row, factor)
    tl.store(factors_ptr + rows + row, factor * (1.0 / _LOW))
    even, odd = tl.split(tl.reshape(wide * power, [WIDTH // 2, 2]))
    high, low = _halves(even, odd)
    pair = tl.arange(0, WIDTH // 2)
    words_ptr = halves_ptr.to(tl.pointer_type(tl.int16))
    tl.store(words_ptr + row * across + pair, high, mask=pair < across)
    tl.store(words_ptr + (rows + row) * across + pair, low, mask=pair < across)
    i = tl.arange(0, COUNTERS)
    tl.store(counters_ptr + i, tl.zeros([COUNTERS], tl.int32), mask=(i < counters) & (row == 0))


@triton.jit(do_not_specialize=["parts", "t_parts", "prefetched"])
def halves_products_kernel(
    x_ptr, halves_ptr, factors_ptr, w_ptr, scale_ptr, a0_ptr, a1_ptr, a2_ptr, b0_ptr, b1_ptr, b2_ptr, t_parts_ptr,
    t_ptr, parts_ptr, counters_ptr, bias_ptr, residual_ptr, y_ptr, h_ptr, y_factors_ptr,
    M, N, K, steps, stride_scale, counters_at, parts, t_parts, prefetched,
    first0, first1, first2, size0, size1, size2, scaling0, scaling1, scaling2,
    MODE: tl.constexpr, ACTIVATION: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr, RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STEP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`halves_ptr`: x', `steps` of `STEP` columns. `FACTOR`: columns that share a factor, may be half of them; 0: all.

    `y_ptr`: y, or with an `ACTIVATION` h, of which `h_ptr` and `y_factors_ptr` are its halves. `EVEN`: whole tiles
    of N and K. `SPLIT`: into several `parts` of K. `prefetched`: steps whose weights L2 reads before x' is there.
    """
    ADAPTERS: tl.constexpr = (RANK0 > 0) + (RANK1 > 0) + (RANK2 > 0)
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    GATED: tl.constexpr = ACTIVATION is not None
    OUTPUTS: tl.constexpr = TILE_N // 2 if GATED else TILE_N
    counters_ptr += counters_at
    pid = tl.program_id(0)
    product_id = pid - ADAPTERS * t_parts
    tile, part = product_id // parts, product_id % parts
    each = tl.cdiv(steps, parts)
    begin = part * each
    end = tl.minimum(begin + each, steps)
    features = N // 2 if GATED else N
    low = tile * OUTPUTS
    r, m = tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    n = low + r % OUTPUTS
    inside = n < features
    if GATED:
        n += r // OUTPUTS * features
    if not EVEN:
        n = tl.minimum(n, N - 1)
    if OVERLAPS:
        gdc_launch_dependents()
        if product_id >= 0:
            if prefetched > 0:
                size = tl.minimum(tl.minimum(begin + prefetched, end) * STEP, K) - begin * STEP
                prefetch(w_ptr + n.to(tl.int64) * K + begin * STEP, size)
            # What is wanted last, and would be waited for then.
            if RANK0 > 0:
                touch(b0_ptr + tl.minimum(tl.maximum(n - first0, 0), size0 - 1) * RANK0)
            if RANK1 > 0:
                touch(b1_ptr + tl.minimum(tl.maximum(n - first1, 0), size1 - 1) * RANK1)
            if RANK2 > 0:
                touch(b2_ptr + tl.minimum(tl.maximum(n - first2, 0), size2 - 1) * RANK2)
        gdc_wait()
    if product_id < 0:
        i, t_part = pid // t_parts, pid % t_parts
        rank = tl.where(i == 2, RANK2, tl.where(i == 1, RANK1, RANK0))
        column = tl.where(i == 2, RANK0 + RANK1, tl.where(i == 1, RANK0, 0))
        PADDED: tl.constexpr = padded(max(RANK0, RANK1, RANK2))
        _project(
            x_ptr, choose(i, a0_ptr, a1_ptr, a2_ptr), t_parts_ptr + i * t_parts * PADDED * TILE_M, t_ptr + column,
            counters_ptr, counters_ptr + _PARTS_OF_T + i, t_part, t_parts, rank, M, K, RANKS, PADDED, TILE_M,
        )  # fmt: skip
    else:
        total = _multiply(
            halves_ptr, factors_ptr, w_ptr, scale_ptr, n, inside, low, features, begin, end, N, K, steps, stride_scale,
            MODE, GATED, FACTOR, EVEN, TILE_M, TILE_N, STEP,
        )  # fmt: skip
        SLICED: tl.constexpr = _SLICE if SPLIT and not GATED else OUTPUTS
        SLICES: tl.constexpr = OUTPUTS // SLICED
        slice, by = 0, 1
        if SPLIT:
            SIZE: tl.constexpr = TILE_N * TILE_M
            parts_ptr += tile * (parts * SIZE)
            tl.store(parts_ptr + part * SIZE + r[:, None] * TILE_M + m[None, :], total)
            arrived = arrive(counters_ptr + _PARTS_OF_TILE + tile)
            slice, by = part, parts
            if tiles.INTERPRETED:
                slice, by = tl.where(arrived == parts - 1, 0, SLICES), 1
            elif part < SLICES:
                wait_until(counters_ptr + _PARTS_OF_TILE + tile, parts)
        if ADAPTERS > 0:
            if slice < SLICES:
                wait_until(counters_ptr, ADAPTERS)
        first, second = total, total
        if GATED:
            both = tl.reshape(total, [2, OUTPUTS, TILE_M])
            first, second = tl.split(tl.permute(both, (1, 2, 0)))
        for s in tl.range(slice, SLICES, by, num_stages=1):
            above = tl.cast(s, tl.int32) * SLICED
            one, other = first, second
            if SPLIT:
                ptrs = parts_ptr + (above + tl.arange(0, SLICED))[:, None] * TILE_M + m[None, :]
                one = sum_of_parts(ptrs, SIZE, parts)
                other = one
                if GATED:
                    other = sum_of_parts(ptrs + OUTPUTS * TILE_M, SIZE, parts)
            _finish(
                one, other, t_ptr, b0_ptr, b1_ptr, b2_ptr, bias_ptr, residual_ptr, y_ptr, h_ptr, y_factors_ptr,
                low + above, m, tile, M, N, features, first0, first1, first2, size0, size1, size2,
                scaling0, scaling1, scaling2, ACTIVATION, BIAS, RESIDUAL, RANK0, RANK1, RANK2, TILE_M, SLICED,
            )  # fmt: skip


@triton.jit
def _fp8_product(w, x):
    """w · xᵀ, whose sum the tensor cores keep to some 14 bits: of one step only."""
    if tiles.INTERPRETED:
        w, x = (_from_byte(w.to(tl.uint8, bitcast=True)), _from_byte(x.to(tl.uint8, bitcast=True)))
        return tl.dot(w, tl.trans(x), input_precision="ieee")
    return tl.dot(w, tl.trans(x))


@triton.jit
def _multiply(
    halves_ptr, factors_ptr, w_ptr, scale_ptr, n, inside, low, features, begin, end, N, K, steps, stride_scale,
    MODE: tl.constexpr, GATED: tl.constexpr, FACTOR: tl.constexpr, EVEN: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The product of the rows n of a weight over some of K's steps, with its halves added up."""
    # Few tokens: one product for both halves, so that a weight is read from shared memory once. More: one for each,
    # whose sums take half of the registers.
    JOINED: tl.constexpr = TILE_M <= 16
    COLUMNS: tl.constexpr = 2 * TILE_M if JOINED else TILE_M
    GROUP: tl.constexpr = STEP if FACTOR == 0 else min(STEP, FACTOR)
    m, c, r = tl.arange(0, COLUMNS), tl.arange(0, GROUP), tl.arange(0, TILE_N)
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * K + c[None, :]
    x_ptrs = halves_ptr + m[:, None] * (steps * STEP) + c[None, :]
    # Rows of a tile lie in one row of blocks, or, if they are 256, or of gate and up, in two.
    TWO: tl.constexpr = GATED or TILE_N > _BLOCK
    beyond = features if GATED else TILE_N // 2
    scales_ptr = scale_ptr + low // _BLOCK * stride_scale
    others_ptr = scale_ptr + tl.minimum(low + beyond, N - 1) // _BLOCK * stride_scale
    total = tl.zeros([TILE_N, COLUMNS], tl.float32)
    if MODE == CHANNEL:
        of_rows = tl.load(scale_ptr + n)[:, None]
    # Scales are loaded a step ahead: they are wanted right after the product.
    scale, other = 1.0, 1.0
    if MODE == BLOCKS:
        scale, other = tl.load(scales_ptr + begin * STEP // _BLOCK), tl.load(others_ptr + begin * STEP // _BLOCK)
    for i in range(begin, end):
        step = tl.cast(i, tl.int32)
        following, other_following = scale, other
        if MODE == BLOCKS:
            block = tl.minimum(step + 1, steps - 1) * STEP // _BLOCK
            following = tl.load(scales_ptr + block)
            if TWO:
                other_following = tl.load(others_ptr + block)
        for j in tl.static_range(STEP // GROUP):
            first = step * STEP + j * GROUP
            if FACTOR > 0:
                factor = tl.load(factors_ptr + first // FACTOR * (2 * TILE_M) + m)[None, :]
            if EVEN:
                w = tl.load(w_ptrs + first, eviction_policy="evict_first")
            else:
                present = inside[:, None] & (first + c < K)[None, :]
                w = tl.load(w_ptrs + first, mask=present, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + first, eviction_policy="evict_last")
            added = _fp8_product(w, x)
            if not JOINED:
                x_low = tl.load(x_ptrs + (TILE_M * steps * STEP + first), eviction_policy="evict_last")
                added += _fp8_product(w, x_low) * (1.0 / _LOW)
            if MODE == BLOCKS:
                added *= tl.where(r < TILE_N // 2, scale, other)[:, None] if TWO else scale
            if FACTOR > 0:
                added *= factor
            total += added
        scale, other = following, other_following
    if MODE == CHANNEL:
        total *= of_rows
    if MODE == TENSOR:
        total *= tl.load(scale_ptr)
    if FACTOR == 0:  # last, because it may be large
        total *= tl.load(factors_ptr + m)[None, :]
    if JOINED:
        total = tl.sum(tl.reshape(total, [TILE_N, 2, TILE_M]), axis=1)
    return total


@triton.jit
def _project(
    x_ptr, a_ptr, t_parts_ptr, t_ptr, done_ptr, counter_ptr, part, parts, rank, M, K,
    RANKS: tl.constexpr, PADDED: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """x · Aᵀ over one part of K; the last of them adds all parts up, and writes t."""
    dtype: tl.constexpr = t_ptr.dtype.element_ty
    r, m, k = tl.arange(0, PADDED), tl.arange(0, TILE_M), tl.arange(0, _BLOCK)
    steps = tl.cdiv(K, _BLOCK)
    each = tl.cdiv(steps, parts)
    begin = part * each
    end = tl.minimum(begin + each, steps)
    total = tl.zeros([PADDED, TILE_M], tl.float32)
    for i in tl.range(begin, end, num_stages=2):  # more would take shared memory from the other programs
        column = tl.cast(i, tl.int32) * _BLOCK + k
        inside = (r[:, None] < rank) & (column[None, :] < K)
        a = in_dtype(tl.load(a_ptr + r[:, None] * K + column[None, :], mask=inside, other=0.0), dtype)
        present = (m[:, None] < M) & (column[None, :] < K)
        x = tl.load(x_ptr + m[:, None] * K + column[None, :], mask=present, other=0.0)
        total = product(a, tl.trans(x), total)
    parts_ptrs = t_parts_ptr + r[:, None] * TILE_M + m[None, :]
    tl.store(parts_ptrs + part * (PADDED * TILE_M), total)
    if arrive(counter_ptr) == parts - 1:
        total = sum_of_parts(parts_ptrs, PADDED * TILE_M, parts)
        tl.store(t_ptr + m[None, :] * RANKS + r[:, None], tiles.round_to(total, dtype), mask=r[:, None] < rank)
        arrive(done_ptr)


@triton.jit
def _finish(
    first, second, t_ptr, b0_ptr, b1_ptr, b2_ptr, bias_ptr, residual_ptr, y_ptr, h_ptr, y_factors_ptr, low, m, tile,
    M, N, features, first0, first1, first2, size0, size1, size2, scaling0, scaling1, scaling2,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RANK0: tl.constexpr, RANK1: tl.constexpr,
    RANK2: tl.constexpr, TILE_M: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Add to a product what belongs to it, and store y; or, with an `ACTIVATION`, h of gate and up, and its halves."""
    dtype: tl.constexpr = t_ptr.dtype.element_ty
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    n, high = low + tl.arange(0, OUTPUTS), low + OUTPUTS - 1
    gate, total = first, first
    for half in tl.static_range(1 if ACTIVATION is None else 2):
        gate = total
        if half == 1:
            total = second
        above = half * features
        if RANK0 > 0:
            total = adapted(
                total, t_ptr, b0_ptr, n + above, m, low + above, high + above, first0, size0, scaling0, 0, RANKS, RANK0
            )
        if RANK1 > 0:
            total = adapted(
                total, t_ptr, b1_ptr, n + above, m, low + above, high + above, first1, size1, scaling1, RANK0, RANKS,
                RANK1,
            )  # fmt: skip
        if RANK2 > 0:
            total = adapted(
                total, t_ptr, b2_ptr, n + above, m, low + above, high + above, first2, size2, scaling2, RANK0 + RANK1,
                RANKS, RANK2,
            )  # fmt: skip
    inside = (n[:, None] < features) & (m[None, :] < M)
    where = m[None, :] * features + n[:, None]
    if ACTIVATION is None:
        if BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            total += tl.load(residual_ptr + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + where, tiles.round_to(total, dtype), mask=inside)
    else:
        value, _ = ACTIVATION(gate)
        h = tiles.round_to(tl.where(inside, value * total, 0.0), dtype)
        tl.store(y_ptr + where, h, mask=inside)
        wide = h.to(tl.float32)
        power, factor = power_for_halves(tiles.magnitude_bits(wide), 0)
        pairs = tl.reshape(wide * power[None, :], [OUTPUTS // 2, 2, TILE_M])
        even, odd = tl.split(tl.permute(pairs, (0, 2, 1)))
        high_words, low_words = _halves(even, odd)
        across = tl.cdiv(features, OUTPUTS) * (OUTPUTS // 2)
        words_ptr = h_ptr.to(tl.pointer_type(tl.int16))
        words_ptrs = words_ptr + m[None, :] * across + (tile * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2))[:, None]
        tl.store(words_ptrs, high_words)
        tl.store(words_ptrs + TILE_M * across, low_words)
        tl.store(y_factors_ptr + tile * (2 * TILE_M) + m, factor)
        tl.store(y_factors_ptr + tile * (2 * TILE_M) + TILE_M + m, factor * (1.0 / _LOW))
