"""Quantising with one scale per row in one pass: a program holds a whole row, so its amax is there before it leaves.

The row is loaded in parts, in its own dtype, and each part is converted to FP32 when it is used: a whole row in FP32
would not fit into the registers.

For the columns, whose scales are next, a program may leave the largest magnitudes of its rows: one row of `maxima`, of
which there are as many as programs. (Atomics instead would be one for every 16 elements of 8,192 × 4,096.)

A row may be multiplied by a factor per column on the way: a frozen weight's channel scales, which backward folds into
the gradient (see `ops/weight.py`). The product is rounded to the dtype of `x`, as if it had gone through memory.
"""

import triton
import triton.language as tl

from octavo.kernels import finite, tiles
from octavo.kernels.tuning import RowTiles

NARROW, WIDEST = 4096, 32_768  # columns: of a row in one part, and of any


@triton.jit
def _and(parts, part):
    return parts + (part,)  # noqa: RUF005, Triton has no stars


@triton.jit
def _load(base, c, C, EVEN: tl.constexpr):
    """Columns c of a row."""
    if EVEN:
        return tl.load(base + c)
    return tl.load(base + c, mask=c < C, other=0.0)


@triton.jit
def _bits(x, FINITE: tl.constexpr):
    """Magnitudes as the bits of their dtype, which order like the values; 0 for non-finite values with `FINITE`.

    Not in FP32: those values would stay in registers for what comes later.
    """
    FP32: tl.constexpr = x.dtype == tl.float32
    bits = x.to(tl.int32 if FP32 else tl.int16, bitcast=True).to(tl.int32) & (0x7FFFFFFF if FP32 else 0x7FFF)
    return tl.where(bits < _infinity(x.dtype), bits, 0) if FINITE else bits


@triton.constexpr_function
def _infinity(dtype):
    return {"fp32": 0x7F800000, "bf16": 0x7F80, "fp16": 0x7C00}[str(dtype)]


@triton.jit
def _largest(parts, FINITE: tl.constexpr):
    """The largest magnitude of a row as bits: of everything, or of what is finite."""
    top = _bits(parts[0], FINITE)
    for k in tl.static_range(1, len(parts)):
        top = tl.maximum(top, _bits(parts[k], FINITE))
    return tl.max(top, axis=1)


@triton.jit
def _raise(tops, parts):
    """The largest magnitudes of columns so far."""
    raised = ()
    for k in tl.static_range(len(parts)):
        raised = _and(raised, finite.raised(tops[k], parts[k]))
    return raised


@triton.jit
def _write(x, inverse, out_ptr, target, c, C, seed, source: tl.constexpr, FORMAT: tl.constexpr,
           STOCHASTIC: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    v = tiles.saturate(x.to(tl.float32) * inverse, seed, target + c, FORMAT, STOCHASTIC)
    q = tiles.cast(v, out_ptr.dtype.element_ty, source)
    if EVEN:
        tl.store(out_ptr + target + c, q)
    else:
        tl.store(out_ptr + target + c, q, mask=c < C)


@triton.jit
def _count(x, inverse, scale, lost, clipped, sampled, FORMAT: tl.constexpr, CLIPS: tl.constexpr):
    x_fp32 = x.to(tl.float32)
    if sampled:
        lost += tiles.count(tiles.is_lost(x_fp32, x_fp32 * inverse, FORMAT))
    if CLIPS:
        clipped += tiles.count(tiles.is_clipped(x_fp32, scale[:, None], FORMAT))
    return lost, clipped


@triton.jit(do_not_specialize=["seed"])
def rows_kernel(
    x_ptr,
    state_ptr,
    factor_ptr,
    out_ptr,
    scale_ptr,
    maxima_ptr,
    amax_ptr,
    r0,
    end,
    C,
    stride_r,
    first_program,
    per_element,
    seed,
    FOLD: tl.constexpr,
    MAXIMA: tl.constexpr,
    RECORD: tl.constexpr,
    FIRST: tl.constexpr,
    CLIPS: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    NEAR: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`x` is rows r0 to end of `out`; PARTS parts are all of a row. `CLIPS`: these scales saturate.

    `MAXIMA`: leave those of columns, in row `first` of `maxima` and the following, one for each program; and zeros
    for the largest of all, which is found next.
    `NEAR`: there are registers enough to hold the factors, too.
    """
    tiles.follow(OVERLAPS)
    c = tl.arange(0, PART)[None, :]
    count = end - r0
    top = 0.0
    trouble, lost, clipped = count < 0, count * 0, count * 0
    step = tiles.sample_step(count)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    source: tl.constexpr = tl.float32 if STOCHASTIC or not EVEN else dtype
    tops = ()
    if MAXIMA:
        for _ in tl.static_range(PARTS):
            tops = _and(tops, tl.zeros([1, PART], dtype))
    factors = ()
    if FOLD and NEAR:
        for k in tl.static_range(PARTS):
            factors = _and(factors, _load(factor_ptr, k * PART + c, C, EVEN))
    for r in range(tl.program_id(0), count, tl.num_programs(0)):
        base = x_ptr + tl.cast(r, tl.int64) * stride_r
        target = tl.cast(r0 + r, tl.int64) * C
        parts = ()
        for k in tl.static_range(PARTS):
            part = _load(base, k * PART + c, C, EVEN)
            if FOLD:
                factor = factors[k] if NEAR else _load(factor_ptr, k * PART + c, C, EVEN)
                part = tiles.round_to(part.to(tl.float32) * factor, dtype)
            parts = _and(parts, part)
        if MAXIMA:
            tops = _raise(tops, parts)
        bits = _largest(parts, False)
        strange = tl.max(bits, axis=0) >= _infinity(dtype)
        if strange:
            bits = _largest(parts, True)
        if dtype != tl.float32:
            bits = bits.to(tl.int16)
        amax = bits.to(dtype, bitcast=True).to(tl.float32)
        scale = tiles.scale_from_amax(amax, FORMAT, MARGIN)
        tl.store(scale_ptr + r0 + r + tl.arange(0, 1), scale)
        inverse = tiles.reciprocal(scale)[:, None]
        sampled = tiles.is_sampled(r, step)
        for k in tl.static_range(PARTS):
            where = k * PART + c
            _write(parts[k], inverse, out_ptr, target, where, C, seed, source, FORMAT, STOCHASTIC, EVEN)
        if RECORD:  # apart, so that what is written need not be held for it
            for k in tl.static_range(PARTS):
                lost, clipped = _count(parts[k], inverse, scale, lost, clipped, sampled, FORMAT, CLIPS)
        if RECORD:
            top = tl.maximum(top, tl.max(amax, axis=0))
            trouble = trouble | strange
    if MAXIMA:
        if FIRST:
            if tl.program_id(0) == 0:
                for k in tl.static_range(PARTS):
                    tl.store(amax_ptr + k * PART + c, tl.zeros([1, PART], tl.float32), mask=k * PART + c < C)
        maxima_ptr += tl.cast(first_program + tl.program_id(0), tl.int64) * C
        for k in tl.static_range(PARTS):
            tl.store(maxima_ptr + k * PART + c, tops[k], mask=k * PART + c < C)
    if RECORD:
        all_lost = tiles.from_sample(tl.full([1, 1], lost, tl.int32), count, step)
        tiles.record(state_ptr, top, trouble, all_lost, clipped, per_element)
        if FIRST:
            if tl.program_id(0) == 0:
                tiles.record_use(state_ptr)


def arrange(r: int, c: int, multiprocessors: int, tiles: RowTiles) -> tuple[tuple[int], dict[str, int | bool]]:
    """The grid, and the constants of the tile."""
    if c <= NARROW:
        part = max(triton.next_power_of_2(c), 128)
        warps = max(part // 1024, 1)
        programs = tiles.narrow // warps
    else:
        _, part, warps, programs = next(tile for tile in tiles.wide if c <= tile.widest)
    # Not too few even where there is one processor: with many rows for each, underflow is counted on some only.
    programs *= max(multiprocessors, 32)
    constants = {"EVEN": c % part == 0, "NEAR": c <= NARROW, "PART": part, "PARTS": -(-c // part), "num_warps": warps}
    return (min(r, programs),), constants
