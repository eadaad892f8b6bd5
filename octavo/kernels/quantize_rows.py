"""Quantising with one scale per row in one pass over memory: a program sees a whole row before any of it leaves.

A row is held in parts, as it came from memory, and each part is widened when its turn comes: widened all at once, a
row would not fit into the registers. Very wide rows do not fit even so: they are read a second time, from the cache.

A row may be multiplied by a factor per column on the way: a frozen weight's channel scales, which backward folds into
the gradient (see `ops_frozen.py`). The product is rounded to the dtype of `x`, as if it had gone through memory.
"""

import triton
import triton.language as tl

from octavo.kernels import tiles

WIDEST = 32_768  # columns


@triton.jit
def _and(parts, part):
    return parts + (part,)  # noqa: RUF005, Triton has no stars


@triton.jit
def _load(base, factor_ptr, c, C, FOLD: tl.constexpr, EVEN: tl.constexpr):
    """Columns c of a row, times their factors if there are any."""
    if EVEN:
        x = tl.load(base + c)
    else:
        x = tl.load(base + c, mask=c < C, other=0.0)
    if FOLD:
        factor = tl.load(factor_ptr + c, mask=c < C, other=0.0)
        x = tiles.narrow(x.to(tl.float32) * factor, x.dtype)
    return x


@triton.jit
def _bits(x, FINITE: tl.constexpr):
    """Magnitudes as the bits of their dtype, which order like the values; 0 for what is not finite, if it is not to be.

    Not as wide values: those would be kept in registers for what comes later.
    """
    wide: tl.constexpr = x.dtype == tl.float32
    bits = x.to(tl.int32 if wide else tl.int16, bitcast=True).to(tl.int32) & (0x7FFFFFFF if wide else 0x7FFF)
    return tl.where(bits < _infinity(x.dtype), bits, 0) if FINITE else bits


@triton.constexpr_function
def _infinity(dtype):
    return {"fp32": 0x7F800000, "bf16": 0x7F80, "fp16": 0x7C00}[str(dtype)]


@triton.jit
def _largest(parts, base, factor_ptr, c, C, FINITE: tl.constexpr, FOLD: tl.constexpr, EVEN: tl.constexpr,
             HOLD: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The largest magnitude of a row as bits: of everything, or of what is finite."""
    top = tl.zeros([1, PART], tl.int32)
    if HOLD:
        for k in tl.static_range(PARTS):
            top = tl.maximum(top, _bits(parts[k], FINITE))
    else:
        for k in tl.range(PARTS):
            top = tl.maximum(top, _bits(_load(base, factor_ptr, k * PART + c, C, FOLD, EVEN), FINITE))
    return tl.max(top, axis=1)


@triton.jit
def _write(x, inverse, out_ptr, target, c, C, seed, source: tl.constexpr, MAXIMUM: tl.constexpr,
           STOCHASTIC: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    v = tiles.saturate(x.to(tl.float32) * inverse, seed, target + c, MAXIMUM, STOCHASTIC)
    q = tiles.cast(v, out_ptr.dtype.element_ty, source)
    if EVEN:
        tl.store(out_ptr + target + c, q)
    else:
        tl.store(out_ptr + target + c, q, mask=c < C)


@triton.jit
def _count(x, inverse, scale, lost, clipped, sampled, MAXIMUM: tl.constexpr, CLIPS: tl.constexpr):
    wide = x.to(tl.float32)
    if sampled:
        lost += tiles.count(tiles.is_lost(wide, wide * inverse, MAXIMUM))
    if CLIPS:
        clipped += tiles.count(tiles.is_clipped(wide, scale[:, None], MAXIMUM))
    return lost, clipped


@triton.jit(do_not_specialize=["seed"])
def rows_kernel(
    x_ptr,
    row_ptr,
    factor_ptr,
    out_ptr,
    scale_ptr,
    r0,
    end,
    C,
    stride_r,
    per_element,
    seed,
    FOLD: tl.constexpr,
    RECORD: tl.constexpr,
    FIRST: tl.constexpr,
    CLIPS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    HOLD: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`x` is rows r0 to end of `out`; PARTS parts are all of a row. `CLIPS`: these scales saturate."""
    c = tl.arange(0, PART)[None, :]
    count = end - r0
    top = 0.0
    trouble, lost, clipped = count < 0, count * 0, count * 0
    step = tiles.sample_step(count)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    source: tl.constexpr = tl.float32 if STOCHASTIC or not EVEN else dtype
    for r in range(tl.program_id(0), count, tl.num_programs(0)):
        base = x_ptr + tl.cast(r, tl.int64) * stride_r
        target = tl.cast(r0 + r, tl.int64) * C
        parts = ()
        if HOLD:
            for k in tl.static_range(PARTS):
                parts = _and(parts, _load(base, factor_ptr, k * PART + c, C, FOLD, EVEN))
        bits = _largest(parts, base, factor_ptr, c, C, False, FOLD, EVEN, HOLD, PART, PARTS)
        strange = tl.max(bits, axis=0) >= _infinity(dtype)
        if strange:
            bits = _largest(parts, base, factor_ptr, c, C, True, FOLD, EVEN, HOLD, PART, PARTS)
        if dtype != tl.float32:
            bits = bits.to(tl.int16)
        amax = bits.to(dtype, bitcast=True).to(tl.float32)
        scale = tiles.scale_from_amax(amax, MAXIMUM, MARGIN)
        tl.store(scale_ptr + r0 + r + tl.arange(0, 1), scale)
        inverse = tiles.reciprocal(scale)[:, None]
        sampled = tiles.is_sampled(r, step)
        if HOLD:
            for k in tl.static_range(PARTS):
                where = k * PART + c
                _write(parts[k], inverse, out_ptr, target, where, C, seed, source, MAXIMUM, STOCHASTIC, EVEN)
            if RECORD:  # apart, so that what is written need not be held for it
                for k in tl.static_range(PARTS):
                    lost, clipped = _count(parts[k], inverse, scale, lost, clipped, sampled, MAXIMUM, CLIPS)
        else:
            for k in tl.range(PARTS):
                where = k * PART + c
                x = _load(base, factor_ptr, where, C, FOLD, EVEN)
                _write(x, inverse, out_ptr, target, where, C, seed, source, MAXIMUM, STOCHASTIC, EVEN)
                if RECORD:
                    lost, clipped = _count(x, inverse, scale, lost, clipped, sampled, MAXIMUM, CLIPS)
        if RECORD:
            top = tl.maximum(top, tl.max(amax, axis=0))
            trouble = trouble | strange
    if RECORD:
        all_lost = tiles.from_sample(tl.full([1, 1], lost, tl.int32), count, step)
        tiles.record(row_ptr, top, trouble, all_lost, clipped, per_element)
        if FIRST:
            if tl.program_id(0) == 0:
                tiles.record_use(row_ptr)


def arrange(r: int, c: int, multiprocessors: int) -> tuple[tuple[int], dict[str, int | bool]]:
    """The grid and the constants of the tile."""
    part = min(max(triton.next_power_of_2(c), 128), 4096 if c <= 4096 else 2048)
    parts = -(-c // part)
    warps = max(part // 512, 1) if parts == 1 else 8
    hold = parts <= 4
    # Not too few even where there is one processor: with many rows for each, underflow is counted on some only.
    programs = max(multiprocessors, 32) * (4 if parts == 1 else 3 if hold else 4)
    constants = {"EVEN": c % part == 0, "HOLD": hold, "PART": part, "PARTS": parts, "num_warps": warps}
    return (min(r, programs),), constants
