"""Whole tiles of 16-bit numbers, held so that a thread has neighbours along both axes: both layouts from one reading.

A thread takes eight neighbours of each of ROWS rows, as four words of two. It writes them as 8 bytes of each row, and
as ROWS bytes of each of eight columns. Nothing changes hands between threads but maxima. Four lanes have 32 columns,
and DOWN lanes 32 rows: blocks of mx lie within a warp.

    dimension   0       1      2        3             4       5
    size        4       DOWN   GROUPS   TILE_R / 32   WIDE    4
    whose       lanes   lanes  lanes    warps         warps   a thread's own words
    along       a row   a col. a row    a column      a row   a row

Triton chooses layouts by what is contiguous in memory, which here is the last dimension of any tensor of addresses. Of
the others it gives lanes to the first ones first, then warps. So loads, stores along rows, and stores along columns
(with a thread's rows as a seventh dimension) all get the same layout.
"""

import triton
import triton.language as tl

from octavo.kernels import tiles
from octavo.kernels.tiles import INTERPRETED, MX

_BLOCK = tl.constexpr(128)
_MX_BLOCK = tl.constexpr(32)


@triton.jit
def places(ROWS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Row and column in the tile of each thread's first number: `[1, DOWN, 1, HIGH, 1]`, `[4, 1, GROUPS, 1, WIDE]`."""
    DOWN: tl.constexpr = _MX_BLOCK // ROWS
    GROUPS: tl.constexpr = 8 // DOWN
    WIDE: tl.constexpr = TILE_C // (_MX_BLOCK * GROUPS)
    r = tl.arange(0, DOWN)[None, :, None, None, None] * ROWS
    r += tl.arange(0, TILE_R // _MX_BLOCK)[None, None, None, :, None] * _MX_BLOCK
    c = tl.arange(0, 4)[:, None, None, None, None] * 8
    c += tl.arange(0, GROUPS)[None, None, :, None, None] * _MX_BLOCK
    c += tl.arange(0, WIDE)[None, None, None, None, :] * (_MX_BLOCK * GROUPS)
    return r, c


@triton.jit
def anew(place):
    """The same numbers, as if they were others: addresses made of them before a loop would take all registers."""
    if INTERPRETED:
        return place
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def no_counts(r, c):
    """Of each thread: the largest magnitude, numbers lost and clipped; and no trouble in its words."""
    zeros = r * 0 + c * 0
    return (zeros.to(tl.float32), zeros, zeros), zeros[:, :, :, :, :, None] + tl.zeros([4], tl.int32)


@triton.jit
def and_one(parts, part):
    return parts + (part,)  # noqa: RUF005, Triton has no stars


@triton.jit
def addresses(base, r, c, stride):
    """Of each thread's words in its first row. `base` points to words, and `stride` is in words."""
    return below(base + (r * stride + c // 2)[:, :, :, :, :, None], tl.arange(0, 4))


@triton.jit
def below(where, stride):
    """Addresses in the next row. One after the other: all at once they would take many registers."""
    return tl.max_contiguous(tl.multiple_of(where + stride, [1, 1, 1, 1, 1, 16]), [1, 1, 1, 1, 1, 4])


@triton.jit
def half(words, k: tl.constexpr, dtype: tl.constexpr):
    """The first or the second number of each word, in FP32. BF16 is its upper half."""
    if dtype == tl.bfloat16:
        x = (words & -0x10000 if k else words << 16).to(tl.float32, bitcast=True)
    else:
        x = (words >> 16 * k).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return x


@triton.jit
def pair(first, second, dtype: tl.constexpr):
    """Two FP32 numbers to a word, each to nearest even."""
    if INTERPRETED:
        first = tiles.narrow(first, dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (tiles.narrow(second, dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return tl.inline_asm_elementwise(
        _asm("cvt.rn.{}.f32 $0, $2, $1;", dtype), "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def without_infinities(words, dtype: tl.constexpr):
    """Infinities become NaN: v + 0 · v is v if v is finite."""
    if INTERPRETED:
        low, high = words & 0x7FFF, words >> 16 & 0x7FFF
        words = tl.where(_unless_strange(low, dtype) == low, words, words | 0x7FFF)
        return tl.where(_unless_strange(high, dtype) == high, words, words | 0x7FFF0000)
    return tl.inline_asm_elementwise(
        _asm("{{.reg .b32 zero; mov.b32 zero, 0; fma.rn.{} $0, $1, zero, $1;}}", dtype), "=r,r", [words],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def magnitudes(words):
    return words & 0x7FFF7FFF


@triton.jit
def larger(one, other, dtype: tl.constexpr):
    """Of magnitudes, number by number. NaN is passed over."""
    if INTERPRETED:
        low = tl.maximum(_unless_strange(one & 0xFFFF, dtype), _unless_strange(other & 0xFFFF, dtype))
        return low | tl.maximum(_unless_strange(one >> 16, dtype), _unless_strange(other >> 16, dtype)) << 16
    return tl.inline_asm_elementwise(
        _asm("max.{} $0, $1, $2;", dtype), "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def add_trouble(trouble, parts, dtype: tl.constexpr):
    """Zeros, to which NaN is added once there is something that is not finite."""
    for k in tl.static_range(len(parts)):
        if INTERPRETED:
            low, high = parts[k] & 0x7FFF, parts[k] >> 16 & 0x7FFF
            finite = (_unless_strange(low, dtype) == low) & (_unless_strange(high, dtype) == high)
            trouble = tl.where(finite, trouble, 0x7FFF)
        else:
            trouble = tl.inline_asm_elementwise(
                _asm("{{.reg .b32 zero; mov.b32 zero, 0; fma.rn.{} $0, $2, zero, $1;}}", dtype), "=r,r,r",
                [trouble, parts[k]], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
    return trouble


@triton.jit
def is_trouble(trouble):
    return tl.max(tl.where(trouble & 0x7FFF7FFF != 0, 1, 0)) > 0


@triton.jit
def _unless_strange(bits, dtype: tl.constexpr):
    """The bits of a magnitude, or 0 if it is not finite."""
    return tl.where(bits < (0x7F80 if dtype == tl.bfloat16 else 0x7C00), bits, 0)


@triton.constexpr_function
def _asm(code, dtype):
    return code.format({"bf16": "bf16x2", "fp16": "f16x2"}[str(dtype)])


@triton.jit
def _largest(words, dtype: tl.constexpr):
    """Of each thread's four words the largest magnitude, in FP32."""
    first, second = _halve(magnitudes(words))
    first, second = tl.split(larger(first, second, dtype))
    top = larger(first, second, dtype)
    return tl.maximum(half(top, 0, dtype), half(top, 1, dtype))


@triton.jit
def _halve(words):
    """Of each thread's four words the even ones, and the odd ones."""
    return tl.split(tl.reshape(words, words.shape[:5] + [2, 2]))  # noqa: RUF005, Triton has no stars


@triton.jit
def _scales(amax, MODE: tl.constexpr, MAXIMUM: tl.constexpr, MARGIN: tl.constexpr, MX_UP: tl.constexpr):
    """Of blocks: what to store, the scale, and its inverse."""
    if MODE == MX:
        exponent = tiles.mx_exponent(amax, MAXIMUM, MARGIN, MX_UP)
        scales = exponent.to(tl.uint8), tiles.mx_factor(exponent), tiles.mx_factor(254 - exponent)
    else:
        scale = tiles.scale_from_amax(amax, MAXIMUM, MARGIN)
        scales = scale, scale, tiles.reciprocal(scale)
    return scales


@triton.jit
def _four(a, b, c, d, MAXIMUM: tl.constexpr):
    """Four FP32 numbers without infinities to FP8, to nearest even, saturating: a word of four bytes."""
    if INTERPRETED:
        return _byte(a, MAXIMUM) | _byte(b, MAXIMUM) << 8 | _byte(c, MAXIMUM) << 16 | _byte(d, MAXIMUM) << 24
    kind: tl.constexpr = "e4m3x2" if MAXIMUM == 448.0 else "e5m2x2"
    code: tl.constexpr = (
        "{.reg .b16 low, high; cvt.rn.satfinite." + kind + ".f32 low, $2, $1; cvt.rn.satfinite." + kind
        + ".f32 high, $4, $3; mov.b32 $0, {low, high};}"
    )  # fmt: skip
    return tl.inline_asm_elementwise(code, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _byte(v, MAXIMUM: tl.constexpr):
    v = tiles.saturate(v, 0, 0, MAXIMUM, False, False)
    dtype: tl.constexpr = tl.float8e4nv if MAXIMUM == 448.0 else tl.float8e5
    return tiles.cast(v, dtype, tl.bfloat16).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _row_amax(words, dtype: tl.constexpr, MODE: tl.constexpr):
    """Of each thread's row in the tile, or of its mx block."""
    amax = tl.max(_largest(words, dtype), axis=0, keep_dims=True)
    if MODE != MX:
        amax = tl.max(tl.max(amax, axis=4, keep_dims=True), axis=2, keep_dims=True)
    return amax


@triton.jit
def _column_scales(
    parts, r, c, scale_ptr, per_column, dtype: tl.constexpr, MODE: tl.constexpr, MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr, MX_UP: tl.constexpr,
):  # fmt: skip
    """Stores those of a tile; returns what to multiply the first and the second number of each word by."""
    BLOCK: tl.constexpr = _MX_BLOCK if MODE == MX else _BLOCK
    top = magnitudes(parts[0])
    for k in tl.static_range(1, len(parts)):
        top = larger(top, magnitudes(parts[k]), dtype)
    factors = ()
    for k in tl.static_range(2):
        amax = tl.max(half(top, k, dtype), axis=1, keep_dims=True)
        if MODE != MX:
            amax = tl.max(amax, axis=3, keep_dims=True)
        stored, _, factor = _scales(amax, MODE, MAXIMUM, MARGIN, MX_UP)
        column, row = c[:, :, :, :, :, None] + (2 * tl.arange(0, 4) + k), r[:, :, :, :, :, None]
        block = tl.max_contiguous(column * per_column + row // BLOCK, [1, 1, 1, 1, 1, 1])
        tl.store(scale_ptr + block, tl.broadcast_to(stored, block.shape), mask=(row % BLOCK == 0) & (column >= 0))
        factors = and_one(factors, factor)
    return factors


@triton.jit
def _write_row(words, where, factor, dtype: tl.constexpr, MAXIMUM: tl.constexpr):
    even, odd = _halve(words)
    a, b = half(even, 0, dtype) * factor, half(even, 1, dtype) * factor
    c, d = half(odd, 0, dtype) * factor, half(odd, 1, dtype) * factor
    tl.store(where, _four(a, b, c, d, MAXIMUM))


@triton.jit
def _stack(parts, first: tl.constexpr, step: tl.constexpr):
    """Parts along new dimensions, which are one thread's: the last tells even ones from odd."""
    if step == len(parts):
        stacked = parts[first]
    else:
        stacked = tl.join(_stack(parts, first, 2 * step), _stack(parts, first + step, 2 * step))
    return stacked


@triton.jit
def write(
    parts, r, c, rows_ptr, row_scale_ptr, columns_ptr, column_scale_ptr, R, C, counts, sampled, dtype: tl.constexpr,
    ROWS: tl.constexpr, RECORD: tl.constexpr, CLIPS: tl.constexpr, MODE: tl.constexpr, MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr, MX_UP: tl.constexpr,
):  # fmt: skip
    """A tile to `columns[C, R]`, and to `rows[R, C]` if those are wanted, with scales; where these pointers point to.

    `counts`: of each thread, the largest magnitude and how many numbers of its rows rows were lost to zero (counted if
    the tile is `sampled`) and to the clamp. Returns them, raised.
    """
    BLOCK: tl.constexpr = _MX_BLOCK if MODE == MX else _BLOCK
    HIGH: tl.constexpr = len(parts) // 4
    top, lost, clipped = counts
    low_factor, high_factor = _column_scales(
        parts, r, c, column_scale_ptr, R // BLOCK, dtype, MODE, MAXIMUM, MARGIN, MX_UP
    )
    per_row = C // BLOCK
    scales = row_scale_ptr + (r * per_row + c // BLOCK)
    first = (c % BLOCK == 0) & (r >= 0)
    rows_ptr = rows_ptr.to(tl.pointer_type(tl.int32))
    columns_ptr = columns_ptr.to(tl.pointer_type(tl.int32))
    where = rows_ptr + ((r * (C // 4) + c // 4)[:, :, :, :, :, None] + tl.arange(0, 2))
    low, high = (), ()
    for k in tl.static_range(len(parts)):
        if ROWS:
            amax = _row_amax(parts[k], dtype, MODE)
            stored, scale, factor = _scales(amax, MODE, MAXIMUM, MARGIN, MX_UP)
            tl.store(tl.max_contiguous(scales, [1, 1, 1, 1, 1]), tl.broadcast_to(stored, first.shape), mask=first)
            aligned = tl.max_contiguous(tl.multiple_of(where, [1, 1, 1, 1, 1, 8]), [1, 1, 1, 1, 1, 2])
            _write_row(parts[k], aligned, factor[:, :, :, :, :, None], dtype, MAXIMUM)
            if RECORD:
                top = tl.maximum(top, amax)
                lost, clipped = _count(parts[k], factor, scale, lost, clipped, sampled, dtype, CLIPS, MAXIMUM)
            scales, where = scales + per_row, where + C // 4
        if k % 4 == 3:
            low = and_one(low, _four_of(parts, k - 3, 0, low_factor, dtype, MAXIMUM))
            high = and_one(high, _four_of(parts, k - 3, 1, high_factor, dtype, MAXIMUM))
    for k in tl.static_range(2):
        stacked = _stack(low if k == 0 else high, 0, 1)
        column = c[:, :, :, :, :, None] + (2 * tl.arange(0, 4) + k)
        inner = (column * (R // 4) + r[:, :, :, :, :, None] // 4)[:, :, :, :, :, :, None] + tl.arange(0, HIGH)
        aligned = tl.multiple_of(columns_ptr + inner, [1, 1, 1, 1, 1, 1, 4 * HIGH])
        tl.store(tl.max_contiguous(aligned, [1, 1, 1, 1, 1, 1, HIGH]), tl.reshape(stacked, inner.shape))
    return top, lost, clipped


@triton.jit
def _four_of(parts, k: tl.constexpr, number: tl.constexpr, factor, dtype: tl.constexpr, MAXIMUM: tl.constexpr):
    a, b = half(parts[k], number, dtype) * factor, half(parts[k + 1], number, dtype) * factor
    c, d = half(parts[k + 2], number, dtype) * factor, half(parts[k + 3], number, dtype) * factor
    return _four(a, b, c, d, MAXIMUM)


@triton.jit
def _count(
    words, factor, scale, lost, clipped, sampled, dtype: tl.constexpr, CLIPS: tl.constexpr, MAXIMUM: tl.constexpr
):
    for k in tl.static_range(2):
        x = half(words, k, dtype)
        if sampled:
            flags = tiles.is_lost(x, x * factor[:, :, :, :, :, None], MAXIMUM)
            lost += tl.sum(tl.where(flags, 1, 0), axis=5)
        if CLIPS:
            flags = tiles.is_clipped(x, scale[:, :, :, :, :, None], MAXIMUM)
            clipped += tl.sum(tl.where(flags, 1, 0), axis=5)
    return lost, clipped


@triton.jit
def record(row_ptr, counts, trouble, count, step, per_element):
    """What a program's threads saw and counted on `count` tiles."""
    top, lost, clipped = counts
    all_lost = tiles.from_sample(tl.reshape(lost, [32, lost.numel // 32]), count, step)
    tiles.record(row_ptr, tl.max(top), is_trouble(trouble), all_lost, tl.sum(clipped), per_element)
