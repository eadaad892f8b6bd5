"""The kernels of the few-token products: x laid out, and products with all that is added to them.

    lay_out     x[M, K] → x'[TILE_M, K padded to 128] in FP16, after an RMS norm, if there is one
    products    y = x' · wᵀ · scales + Σᵢ sᵢ · tᵢ · Bᵢᵀ + bias + residual, tᵢ = x · Aᵢᵀ; or h = act(gate) · up, laid out

A weight's tile is the left operand, so that few tokens are few columns: `yᵀ = w · xᵀ`. It goes through shared memory as
it is, one byte an element, and is converted in registers, from which Hopper's tensor cores take it.

x' is x times a power of two for each row (`numerics.few_tokens` says what that may lose). h has one for each row and
each 64 of its columns, because that many belong to a program: the even, or the odd, of 128 that are a step of the
product that follows.

Programs of `products` come in this order, in which a GPU starts them:

    parts of K of x · Aᵀ            the last of an adapter's to arrive adds them up, in order
    tiles of outputs by parts of K  where there are several, they wait for each other, and each adds up some outputs

A program waits for such as have a lower number, and for the parts of its own tile, which have the next ones. So those
with the lowest numbers never wait for one that has not started. The interpreter runs them one by one: there, the last
of a tile's does the work of all.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import tiles
from octavo.kernels.adapters.tiles import choose, padded, product
from octavo.kernels.few_tokens.tiles import (
    BLOCKS,
    CHANNEL,
    TENSOR,
    adapted,
    arrive,
    from_words,
    in_dtype,
    power_for,
    prefetch,
    sum_of_parts,
    wait_for,
)
from octavo.kernels.norm import inverse_rms, weighted
from octavo.numerics.quantize import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_HALF = tl.constexpr(BLOCK // 2)
# Counters: adapters whose t is there, parts that have arrived of each t, and those of each tile of outputs.
ADAPTERS_DONE = 0
PARTS_OF_T = 1
PARTS_OF_TILE = 4
SLICE = 16  # outputs that one of several parts adds up at a time
_PARTS_OF_T = tl.constexpr(PARTS_OF_T)
_PARTS_OF_TILE = tl.constexpr(PARTS_OF_TILE)
_SLICE = tl.constexpr(SLICE)


@triton.jit
def lay_out_kernel(
    h_ptr, weight_ptr, x_ptr, factors_ptr, counters_ptr, M, across, eps, counters,
    NORM: tl.constexpr, SHIFTED: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, COUNTERS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs: rows. `across`: columns of x', of every 128 the even ones, then the odd ones. Sets counters to zero."""
    if OVERLAPS:
        gdc_launch_dependents()  # before it waits itself: what starts then reads weights only, and waits
        gdc_wait()
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    row, c = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(h_ptr + row * K + c, mask=(row < M) & (c < K), other=0.0)
    if NORM:
        h = x.to(tl.float32)
        inverse = inverse_rms(tl.sum(h * h, axis=0), eps, K)
        weight = tl.load(weight_ptr + c, mask=c < K, other=0.0).to(tl.float32)
        x = weighted(h, inverse, weight, SHIFTED, dtype)
    factor = 1.0
    if dtype != tl.float16:
        power, factor = power_for(tiles.magnitude_bits(x.to(tl.float32)), 0)
        x = (x.to(tl.float32) * power).to(tl.float16)
    tl.store(factors_ptr + row, factor)
    even, odd = tl.split(tl.reshape(x, [WIDTH // 2, 2]))
    pair = 2 * tl.arange(0, WIDTH // 2)
    x_ptrs = x_ptr + row * across + pair // _BLOCK * _BLOCK + pair % _BLOCK // 2
    tl.store(x_ptrs, even, mask=pair < across)
    tl.store(x_ptrs + _HALF, odd, mask=pair < across)
    i = tl.arange(0, COUNTERS)
    tl.store(counters_ptr + i, tl.zeros([COUNTERS], tl.int32), mask=(i < counters) & (row == 0))


@triton.jit(do_not_specialize=["parts", "t_parts", "prefetched"])
def products_kernel(
    x_ptr, factors_ptr, w_ptr, scale_ptr, a0_ptr, a1_ptr, a2_ptr, b0_ptr, b1_ptr, b2_ptr, t_parts_ptr, t_ptr, parts_ptr,
    counters_ptr, bias_ptr, residual_ptr, y_ptr, y_factors_ptr,
    M, N, K, steps, stride_scale, counters_at, parts, t_parts, prefetched,
    first0, first1, first2, size0, size1, size2, scaling0, scaling1, scaling2,
    FORMAT: tl.constexpr, MODE: tl.constexpr, ACTIVATION: tl.constexpr, STEPPED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`w_ptr`: to words of two bytes. `steps`: of 128 columns. `STEPPED`: x' is h, with factors for every half step.

    `EVEN`: whole tiles of N and K. `SPLIT`: into several `parts` of K. `prefetched`: steps whose weights L2 reads
    before x' is there. `ROWS`: of x', one tile of tokens or more, whose programs have the same weights and follow each
    other.
    """
    ADAPTERS: tl.constexpr = (RANK0 > 0) + (RANK1 > 0) + (RANK2 > 0)
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    GATED: tl.constexpr = ACTIVATION is not None
    counters_ptr += counters_at
    pid = tl.program_id(0)
    product_id = pid - ADAPTERS * t_parts
    unit, part = product_id // parts, product_id % parts  # a tile of outputs for a tile of tokens; a part of K
    tile, m = unit, tl.arange(0, TILE_M)
    if ROWS > TILE_M:
        tile = unit // (ROWS // TILE_M)
        m += unit % (ROWS // TILE_M) * TILE_M
    each = tl.cdiv(steps, parts)
    begin = part * each
    end = tl.minimum(begin + each, steps)
    if GATED:  # the even, or the odd, of 128 features
        features = N // 2
        low, stride = tile // 2 * _BLOCK + tile % 2, 2
    else:
        features = N
        low, stride = tile * TILE_N, 1
    if OVERLAPS:
        gdc_launch_dependents()
        if (product_id >= 0) & (prefetched > 0):
            _prefetch_weights(w_ptr, low, stride, features, begin, end, K, prefetched, GATED, TILE_N)
        gdc_wait()
    if product_id < 0:
        i, t_part = pid // t_parts, pid % t_parts
        rank = tl.where(i == 2, RANK2, tl.where(i == 1, RANK1, RANK0))
        column = tl.where(i == 2, RANK0 + RANK1, tl.where(i == 1, RANK0, 0))
        PADDED: tl.constexpr = padded(max(RANK0, RANK1, RANK2))
        _project(
            x_ptr, factors_ptr, choose(i, a0_ptr, a1_ptr, a2_ptr), t_parts_ptr + i * t_parts * PADDED * ROWS,
            t_ptr + column, counters_ptr, counters_ptr + _PARTS_OF_T + i, t_part, t_parts, rank, K, steps, STEPPED,
            RANKS, PADDED, ROWS,
        )  # fmt: skip
    else:
        r, column_of_part = tl.arange(0, TILE_N), tl.arange(0, TILE_M)
        n = low + stride * r
        # Of gate and up, or twice the same, of which only one is computed then.
        first, second = _multiply(
            x_ptr, factors_ptr, w_ptr, scale_ptr, n, m, low, features, begin, end, N, K, steps, stride_scale, FORMAT,
            MODE, GATED, STEPPED, EVEN, ROWS, TILE_M, TILE_N,
        )  # fmt: skip
        SLICED: tl.constexpr = _SLICE if SPLIT and not GATED else TILE_N
        SLICES: tl.constexpr = TILE_N // SLICED
        slice, by = 0, 1
        if SPLIT:
            HALVES: tl.constexpr = 2 if GATED else 1
            SIZE: tl.constexpr = TILE_N * TILE_M
            parts_ptr += unit * (parts * HALVES * SIZE)
            mine = parts_ptr + part * (HALVES * SIZE) + r[:, None] * TILE_M + column_of_part[None, :]
            tl.store(mine, first)
            if GATED:
                tl.store(mine + SIZE, second)
            arrived = arrive(counters_ptr + _PARTS_OF_TILE + unit)
            slice, by = part, parts
            if tiles.INTERPRETED:
                slice, by = tl.where(arrived == parts - 1, 0, SLICES), 1
            elif part < SLICES:
                wait_for(counters_ptr + _PARTS_OF_TILE + unit, parts)
        if ADAPTERS > 0:
            if slice < SLICES:
                wait_for(counters_ptr, ADAPTERS)
        for s in tl.range(slice, SLICES, by, num_stages=1):
            above = tl.cast(s, tl.int32) * SLICED
            one, other = first, second
            if SPLIT:
                ptrs = parts_ptr + (above + tl.arange(0, SLICED))[:, None] * TILE_M + column_of_part[None, :]
                one = sum_of_parts(ptrs, HALVES * SIZE, parts)
                other = one
                if GATED:
                    other = sum_of_parts(ptrs + SIZE, HALVES * SIZE, parts)
            _finish(
                one, other, t_ptr, b0_ptr, b1_ptr, b2_ptr, bias_ptr, residual_ptr, y_ptr, y_factors_ptr,
                low + stride * above, m, tile, M, N, features, first0, first1, first2, size0, size1, size2,
                scaling0, scaling1, scaling2, ACTIVATION, BIAS, RESIDUAL, RANK0, RANK1, RANK2, ROWS, TILE_M, SLICED,
            )  # fmt: skip


@triton.jit
def _prefetch_weights(
    w_ptr, low, stride, features, begin, end, K, prefetched, GATED: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    """Have L2 read the first steps of a program's weights: a piece of a row for each of 128 threads, or a whole one."""
    ROWS: tl.constexpr = 2 * TILE_N if GATED else TILE_N
    PIECES: tl.constexpr = max(1, _BLOCK // ROWS)
    size = tl.cdiv(prefetched, PIECES) * _BLOCK
    i = tl.arange(0, ROWS * PIECES)
    row = tl.minimum(low + stride * (i % TILE_N), features - 1)
    if GATED:
        row += i // TILE_N * features
    limit = tl.minimum(end * _BLOCK, K)
    column = tl.minimum(begin * _BLOCK + i // ROWS * size, limit - 16)
    prefetch(w_ptr + (row.to(tl.int64) * K + column) // 2, tl.minimum(limit - column, size))


@triton.jit
def _words(ptrs, rows, features, column, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptrs, eviction_policy="evict_first")
    inside = (rows[:, None] < features) & (column[None, :] < K // 2)
    return tl.load(ptrs, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _step(
    total, words, x_even, x_odd, scale, even_factor, odd_factor, FORMAT: tl.constexpr, MODE: tl.constexpr,
    STEPPED: tl.constexpr,
):  # fmt: skip
    """`total` plus the product of 128 columns."""
    even, odd = from_words(words, FORMAT)
    if STEPPED:
        total += product(even, tl.trans(x_even)) * (even_factor * scale)[None, :]
        return total + product(odd, tl.trans(x_odd)) * (odd_factor * scale)[None, :]
    if MODE == BLOCKS:
        return total + product(odd, tl.trans(x_odd), product(even, tl.trans(x_even))) * scale
    return product(odd, tl.trans(x_odd), product(even, tl.trans(x_even), total))


@triton.jit
def _multiply(
    x_ptr, factors_ptr, w_ptr, scale_ptr, n, m, low, features, begin, end, N, K, steps, stride_scale,
    FORMAT: tl.constexpr, MODE: tl.constexpr, GATED: tl.constexpr, STEPPED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Rows n of a weight by rows m of x', and those `features` further on if `GATED`, over some of K's steps."""
    c = tl.arange(0, _HALF)
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * (K // 2) + c[None, :]
    other_ptrs = w_ptrs + features.to(tl.int64) * (K // 2)
    x_ptrs = x_ptr + m[:, None] * (steps * _BLOCK) + c[None, :]
    # Tiles lie in one row of blocks. Scales are loaded a step ahead: they are wanted right after the product.
    scale, other_scale = 1.0, 1.0
    even_factor = tl.full([TILE_M], 1.0, tl.float32)
    odd_factor = even_factor
    scales_ptr = scale_ptr + low // _BLOCK * stride_scale
    others_ptr = scale_ptr + tl.minimum(low + features, N - 1) // _BLOCK * stride_scale
    if MODE == BLOCKS:
        scale, other_scale = tl.load(scales_ptr + begin), tl.load(others_ptr + begin)
    first = tl.zeros([TILE_N, TILE_M], tl.float32)
    second = first
    for i in range(begin, end):
        step = tl.cast(i, tl.int32)
        following, other_following = scale, other_scale
        if MODE == BLOCKS:
            following = tl.load(scales_ptr + tl.minimum(step + 1, steps - 1))
            if GATED:
                other_following = tl.load(others_ptr + tl.minimum(step + 1, steps - 1))
        if STEPPED:
            even_factor = tl.load(factors_ptr + 2 * step * ROWS + m)
            odd_factor = tl.load(factors_ptr + (2 * step + 1) * ROWS + m)
        words = _words(w_ptrs + step * _HALF, n, features, step * _HALF + c, K, EVEN)
        x_even = tl.load(x_ptrs + step * _BLOCK, eviction_policy="evict_last")
        x_odd = tl.load(x_ptrs + (step * _BLOCK + _HALF), eviction_policy="evict_last")
        first = _step(first, words, x_even, x_odd, scale, even_factor, odd_factor, FORMAT, MODE, STEPPED)
        if GATED:
            words = _words(other_ptrs + step * _HALF, n, features, step * _HALF + c, K, EVEN)
            second = _step(second, words, x_even, x_odd, other_scale, even_factor, odd_factor, FORMAT, MODE, STEPPED)
        scale, other_scale = following, other_following
    if MODE == CHANNEL:
        row = tl.minimum(n, features - 1)
        first *= tl.load(scale_ptr + row)[:, None]
        if GATED:
            second *= tl.load(scale_ptr + features + row)[:, None]
    if MODE == TENSOR:
        whole = tl.load(scale_ptr)
        first *= whole
        second *= whole
    if not STEPPED:  # last, because it may be large
        factor = tl.load(factors_ptr + m)[None, :]
        first *= factor
        second *= factor
    return first, second


@triton.jit
def _project(
    x_ptr, factors_ptr, a_ptr, t_parts_ptr, t_ptr, done_ptr, counter_ptr, part, parts, rank, K, steps,
    STEPPED: tl.constexpr, RANKS: tl.constexpr, PADDED: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """x · Aᵀ over one part of K; the last of them adds all parts up, and writes t. x is in its own dtype again."""
    dtype: tl.constexpr = t_ptr.dtype.element_ty
    r, m, c, k = tl.arange(0, PADDED), tl.arange(0, TILE_M), tl.arange(0, _HALF), tl.arange(0, _BLOCK)
    each = tl.cdiv(steps, parts)
    begin = part * each
    end = tl.minimum(begin + each, steps)
    x_ptrs = x_ptr + m[:, None] * (steps * _BLOCK) + c[None, :]
    even_factor = tl.load(factors_ptr + m)
    odd_factor = even_factor
    total = tl.zeros([PADDED, TILE_M], tl.float32)
    for i in tl.range(begin, end, num_stages=2):  # more would take shared memory from the other programs
        step = tl.cast(i, tl.int32)
        if STEPPED:
            even_factor = tl.load(factors_ptr + 2 * step * TILE_M + m)
            odd_factor = tl.load(factors_ptr + (2 * step + 1) * TILE_M + m)
        column = step * _BLOCK + k
        inside = (r[:, None] < rank) & (column[None, :] < K)
        a = in_dtype(tl.load(a_ptr + r[:, None] * K + column[None, :], mask=inside, other=0.0), dtype)
        even, odd = tl.split(tl.reshape(a, [PADDED, _HALF, 2]))
        x_even = tl.load(x_ptrs + step * _BLOCK).to(tl.float32) * even_factor[:, None]
        x_odd = tl.load(x_ptrs + (step * _BLOCK + _HALF)).to(tl.float32) * odd_factor[:, None]
        total = product(even, tl.trans(tiles.round_to(x_even, dtype)), total)
        total = product(odd, tl.trans(tiles.round_to(x_odd, dtype)), total)
    parts_ptrs = t_parts_ptr + r[:, None] * TILE_M + m[None, :]
    tl.store(parts_ptrs + part * (PADDED * TILE_M), total)
    if arrive(counter_ptr) == parts - 1:
        total = sum_of_parts(parts_ptrs, PADDED * TILE_M, parts)
        tl.store(t_ptr + m[None, :] * RANKS + r[:, None], tiles.round_to(total, dtype), mask=r[:, None] < rank)
        arrive(done_ptr)


@triton.jit
def _finish(
    first, second, t_ptr, b0_ptr, b1_ptr, b2_ptr, bias_ptr, residual_ptr, y_ptr, y_factors_ptr, low, m, tile, M, N,
    features, first0, first1, first2, size0, size1, size2, scaling0, scaling1, scaling2,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RANK0: tl.constexpr, RANK1: tl.constexpr,
    RANK2: tl.constexpr, ROWS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Add to a product what belongs to it, and store y; or, with an `ACTIVATION`, h of gate and up, and its factors."""
    dtype: tl.constexpr = t_ptr.dtype.element_ty
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    r = tl.arange(0, TILE_N)
    n, high = low + HALVES * r, low + HALVES * (TILE_N - 1)
    gate, total = first, first
    for half in tl.static_range(HALVES):
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
    if ACTIVATION is None:
        where = m[None, :] * N + n[:, None]
        if BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            total += tl.load(residual_ptr + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + where, tiles.round_to(total, dtype), mask=inside)
    else:
        value, _ = ACTIVATION(gate)
        h = tiles.round_to(tl.where(inside, value * total, 0.0), dtype)
        factor = tl.full([TILE_M], 1.0, tl.float32)
        if dtype != tl.float16:
            power, factor = power_for(tiles.magnitude_bits(h.to(tl.float32)), 0)
            h = (h.to(tl.float32) * power[None, :]).to(tl.float16)
        across = tl.cdiv(features, _BLOCK) * _BLOCK
        tl.store(y_ptr + m[None, :] * across + (tile * TILE_N + r)[:, None], h)
        tl.store(y_factors_ptr + tile * ROWS + m, factor)
