"""Quantising columns in whole tiles, without statistics: per channel, per block of 1×128, per 1×32 (mx).

A thread takes a word of 32 or 64 bits (2 or 4 neighbours, if elements have 16) from each of 16 rows. So it holds 16
neighbours of the transposed matrix for each column of the word, and writes them as 16 bytes. With words of 32 bits:

    lane             0        1        2        3      …
    rows 0 to 15     word 0            word 1          …      one load for every row, of 16 words: 64 bytes
    rows 16 to 31             word 0            word 1 …      one store for every column, of 2 lanes: 32 bytes

With words of 64 bits 4 lanes share a column, of 64 rows: loads of 64 bytes again, stores of 64. That suits all but mx,
whose blocks are 32 rows.

Nothing changes hands between threads but maxima. Where Triton transposes a tile, either maxima are found before, in a
layout that does not suit them, or it transposes FP8 (see `tiles.cast`).
"""

import triton
import triton.language as tl

from octavo.kernels import finite, tiles
from octavo.kernels.tiles import CHANNEL, MX

ROWS = tl.constexpr(16)  # of a thread


@triton.jit
def stack(words, step, ROWS: tl.constexpr):
    """The words of several rows along new dimensions, which are one thread's: the last tells even rows from odd."""
    if ROWS == 1:
        stacked = tl.load(words)
    else:
        stacked = tl.join(stack(words, 2 * step, ROWS // 2), stack(words + step, 2 * step, ROWS // 2))
    return stacked


@triton.jit
def column(words, k: tl.constexpr, dtype: tl.constexpr, FINITE: tl.constexpr = False):
    """Column k of those in a word, in FP32. BF16 is its upper half. `FINITE`: through `finite.only`."""
    PER_HALF: tl.constexpr = 32 // dtype.primitive_bitwidth
    if words.dtype == tl.int64:
        words = (words >> 32 if k >= PER_HALF else words).to(tl.int32)
    if FINITE and PER_HALF == 2:
        words = finite.only_pairs(words, dtype)
    if dtype == tl.float32:
        x = words.to(tl.float32, bitcast=True)
        x = finite.only(x) if FINITE else x
    elif dtype == tl.bfloat16:
        x = (words & -0x10000 if k % PER_HALF else words << 16).to(tl.float32, bitcast=True)
    else:
        x = (words >> 16 * (k % PER_HALF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["seed"])
def columns_kernel(
    x_ptr,
    amax_ptr,
    out_ptr,
    scale_ptr,
    r0,
    end,
    R,
    C,
    batches,
    stride_b,
    stride_r,
    seed,
    MODE: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MX_UP: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WORD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`x` is rows r0 to end of R, columns r0 to end of `out[C, R]`. A block of 1×128 is as long as a tile."""
    if MODE == CHANNEL:
        tiles.follow(OVERLAPS)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER_WORD: tl.constexpr = WORD // dtype.primitive_bitwidth
    WORDS: tl.constexpr = TILE_C // PER_WORD
    LANES: tl.constexpr = WORD // 16
    GROUPS: tl.constexpr = TILE_R // (ROWS * LANES)
    x_ptr = x_ptr.to(tl.pointer_type(tl.int64 if WORD == 64 else tl.int32))
    stride_b, stride_r = stride_b // PER_WORD, stride_r // PER_WORD
    across = C // TILE_C
    per_matrix = (end - r0) // TILE_R * across
    # Triton gives lanes to the first dimensions first, unless one is known to be contiguous in memory.
    word = tl.arange(0, WORDS)[None, :, None]
    r = ROWS * (tl.arange(0, LANES)[:, None, None] + LANES * tl.arange(0, GROUPS)[None, None, :])
    inner = tl.max_contiguous(r * stride_r + word, [1, 1, 1])
    inner_t = (r + PER_WORD * word * R)[:, :, :, None] + tl.arange(0, ROWS)[None, None, None, :]
    for tile in range(tl.program_id(0), batches * per_matrix, tl.num_programs(0)):
        batch = (tile // per_matrix).to(tl.int64)
        i, j = tiles.place(tile % per_matrix, (end - r0) // TILE_R, across, 1, True)
        base = x_ptr + batch * stride_b + i.to(tl.int64) * TILE_R * stride_r + j * WORDS
        words = tl.reshape(stack(base + inner, stride_r, ROWS), [LANES, WORDS, GROUPS, ROWS])
        row = r0 + i * TILE_R
        for k in tl.static_range(PER_WORD):
            # One by one where words are long: in pairs, the pairs would be held beside the words.
            x = column(words, k, dtype, True) if WORD == 32 else finite.only(column(words, k, dtype))
            first_column = batch * C + j * TILE_C + k
            c = first_column + PER_WORD * tl.arange(0, WORDS)[:, None]
            factor = column_factor(x, c, row, R, amax_ptr, scale_ptr, MODE, FORMAT, MARGIN, MX_UP)
            where = first_column * R + row + inner_t
            v = x * factor[None, :, :, None]
            v = tiles.saturate(v, seed + 1, where, FORMAT, STOCHASTIC, tiles.INTERPRETED)
            tl.store(out_ptr + where, tiles.cast(v, out_ptr.dtype.element_ty, tl.bfloat16))
    if MODE != CHANNEL:
        tiles.follow(OVERLAPS)  # what was before may still be at work: when this is done, that is to be, too


@triton.jit
def column_factor(
    x, c, row, R, amax_ptr, scale_ptr, MODE: tl.constexpr, FORMAT: tl.constexpr, MARGIN: tl.constexpr,
    MX_UP: tl.constexpr,
):  # fmt: skip
    """Inverse scales of columns c of a tile without infinities; stores the scales."""
    if MODE == CHANNEL:
        scale = tiles.scale_from_amax(tl.load(amax_ptr + c), FORMAT, MARGIN)
        tl.store(scale_ptr + c, scale, mask=(c >= 0) & (row == 0))
        factor = tiles.reciprocal(scale)
    elif MODE == MX:
        GROUP: tl.constexpr = tiles.group(MODE)
        tl.static_assert(x.shape[0] * x.shape[3] == GROUP, "a group of lanes has a block of rows")
        exponent = tiles.mx_exponent(_amax(x), FORMAT, MARGIN, MX_UP)
        group = row // GROUP + tl.arange(0, x.shape[2])[None, :]
        tl.store(scale_ptr + c * (R // GROUP) + group, exponent.to(tl.uint8))
        factor = tiles.mx_factor(254 - exponent)
    else:
        scale = tiles.scale_from_amax(tl.max(_amax(x), axis=1, keep_dims=True), FORMAT, MARGIN)
        BLOCK: tl.constexpr = tiles.group(MODE)
        tl.store(scale_ptr + c * (R // BLOCK) + row // BLOCK, scale)
        factor = tiles.reciprocal(scale)
    return factor


@triton.jit
def _amax(x):
    """Amax over the rows of every group of lanes."""
    return tl.max(tl.max(finite.magnitude(x, True), axis=3), axis=0)
