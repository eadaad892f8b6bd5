"""Quantising with one scale for the whole tensor: the one-pass kernel behind `quantize_group`.

A program walks over tiles of `x[R, C]`, with the next ones on their way, and writes each as `rows[R, C]`, as
`columns[C, R]`, or as both: the high-precision tensor is read once. The transposed tile is read from shared memory a
second time, in BF16, and rounded again (asked to transpose FP8 bytes instead, Triton 3.6 makes the same code).

Instructions count here as much as bytes (docs/LOG.md), so the loop does no more than it must: the largest magnitude
is kept per thread, underflow is counted on every eighth tile, and a program that met NaN or infinity, or saturated
elements to be counted, walks over its tiles a second time.
"""

import triton
import triton.language as tl

from octavo.kernels import delayed, finite, tiles


@triton.jit
def load_tile(
    x_ptr, i, j, inner, limit_r, limit_c, stride_r, EVEN: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):
    """Tile (i, j) of a matrix; `inner` are the offsets inside a tile, which no loop has to compute again."""
    base = x_ptr + i.to(tl.int64) * TILE_R * stride_r + j * TILE_C
    if EVEN:
        return tl.load(base + inner)
    r, c = i * TILE_R + tl.arange(0, TILE_R), j * TILE_C + tl.arange(0, TILE_C)
    return tl.load(base + inner, mask=(r[:, None] < limit_r) & (c[None, :] < limit_c), other=0.0)


@triton.jit
def store_tile(
    out_ptr,
    value,
    i,
    j,
    inner,
    limit_r,
    limit_c,
    stride_r,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    base = out_ptr + i.to(tl.int64) * TILE_R * stride_r + j * TILE_C
    if EVEN:
        tl.store(base + inner, value)
    else:
        r, c = i * TILE_R + tl.arange(0, TILE_R), j * TILE_C + tl.arange(0, TILE_C)
        tl.store(base + inner, value, mask=(r[:, None] < limit_r) & (c[None, :] < limit_c))


@triton.jit
def offsets(stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets inside a tile."""
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit(do_not_specialize=["seed"])
def tensor_kernel(
    x_ptr,
    state_ptr,
    amax_ptr,  # of a current scale
    rows_ptr,
    columns_ptr,
    scale_ptr,
    scale_t_ptr,
    r0,
    end,
    R,
    C,
    batches,
    stride_b,
    stride_r,
    per_element,
    seed,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALING: tl.constexpr,
    RECORD: tl.constexpr,
    FIRST: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    STAGES: tl.constexpr,
    BAND: tl.constexpr,
):
    """`x` is rows r0 to end of R. `SCALING`: see `delayed.py`."""
    if SCALING == delayed.AGAIN:
        if delayed.is_held(state_ptr, FORMAT, MARGIN):
            return
    down, across = tl.cdiv(end - r0, TILE_R), tl.cdiv(C, TILE_C)
    per_matrix = down * across
    count = batches * per_matrix
    rows_ptr += r0.to(tl.int64) * C
    columns_ptr += r0
    BACKWARDS: tl.constexpr = SCALING == delayed.CURRENT
    scale, before = delayed.find_scale(state_ptr, amax_ptr, SCALING, FORMAT, MARGIN)
    inverse, inverse_before = tiles.reciprocal(scale), tiles.reciprocal(before)
    inner = offsets(stride_r, TILE_R, TILE_C)
    inner_out = offsets(C, TILE_R, TILE_C)
    inner_t = offsets(R, TILE_C, TILE_R)
    top = tl.zeros([TILE_R, TILE_C // 8], tl.int32)
    lost = tl.zeros([TILE_R, TILE_C // 8], tl.int32)

    step = tiles.sample_step(count)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=STAGES):
        batch = (tile // per_matrix).to(tl.int64)
        i, j = tiles.place(tile % per_matrix, down, across, BAND, BACKWARDS)
        loaded = load_tile(x_ptr + batch * stride_b, i, j, inner, end - r0, C, stride_r, EVEN, TILE_R, TILE_C)
        x = loaded.to(tl.float32)
        v = tiles.scaled(x, inverse, STOCHASTIC or not RECORD)
        if RECORD:
            top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(x)))
            if not STOCHASTIC:
                if tiles.is_sampled(tile, step):
                    lost += delayed.lost_of_eight(x, v, inverse_before, 0, 0, FORMAT, False, SCALING)
        if STOCHASTIC:
            where = (batch * R + r0 + i * TILE_R) * C + j * TILE_C + inner_out
            v = tiles.saturate(v, seed, where, FORMAT, True, False)
            if RECORD:
                if tiles.is_sampled(tile, step):
                    lost += delayed.lost_of_eight(x, v, inverse_before, seed, where, FORMAT, True, SCALING)
        else:
            v = tiles.saturate(v, 0, 0, FORMAT, False, False)
        if ROWS:
            q = tiles.cast(v, rows_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else loaded.dtype)
            store_tile(rows_ptr + batch * R * C, q, i, j, inner_out, end - r0, C, C, EVEN, TILE_R, TILE_C)
        if COLUMNS:
            if STOCHASTIC:
                q_t = tiles.cast(tl.trans(v), columns_ptr.dtype.element_ty, tl.float32)  # the very same values
            else:
                v_t = tiles.scaled(tl.trans(loaded).to(tl.float32), inverse, not RECORD)
                v_t = tiles.saturate(v_t, 0, 0, FORMAT, False, False)
                q_t = tiles.cast(v_t, columns_ptr.dtype.element_ty, loaded.dtype)
            store_tile(columns_ptr + batch * R * C, q_t, j, i, inner_t, C, end - r0, R, EVEN, TILE_C, TILE_R)

    if RECORD:
        top_bits = tiles.largest(top)
        clipped = top_bits * 0
        finite_top = top_bits.to(tl.float32, bitcast=True)
        if tiles.needs_care(top_bits, delayed.largest_counted(scale, before, FORMAT, MARGIN, SCALING)):
            finite_top = 0.0
            for tile in range(tl.program_id(0), count, tl.num_programs(0)):
                batch = (tile // per_matrix).to(tl.int64)
                i, j = tiles.place(tile % per_matrix, down, across, BAND, BACKWARDS)
                loaded = load_tile(x_ptr + batch * stride_b, i, j, inner, end - r0, C, stride_r, EVEN, TILE_R, TILE_C)
                x = loaded.to(tl.float32)
                finite_top = tl.maximum(finite_top, tiles.largest(finite.magnitude(x)))
                clipped += delayed.clipped(x, scale, before, FORMAT, SCALING)
                if not STOCHASTIC:
                    v = tiles.saturate(tiles.scaled(x, inverse), 0, 0, FORMAT, False, False)
                    if ROWS:
                        q = tiles.cast(v, rows_ptr.dtype.element_ty, loaded.dtype)
                        store_tile(rows_ptr + batch * R * C, q, i, j, inner_out, end - r0, C, C, EVEN, TILE_R, TILE_C)
                    if COLUMNS:
                        q_t = tiles.cast(tl.trans(v), columns_ptr.dtype.element_ty, loaded.dtype)
                        out = columns_ptr + batch * R * C
                        store_tile(out, q_t, j, i, inner_t, C, end - r0, R, EVEN, TILE_C, TILE_R)
        all_lost = tiles.from_sample(lost, count, step)
        tiles.record(state_ptr, finite_top, top_bits >= tiles.INFINITY_BITS, all_lost, clipped, per_element)
    if FIRST:
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            tl.store(scale_t_ptr, scale)
            if RECORD:
                delayed.note_use(state_ptr, amax_ptr, scale, SCALING, FORMAT, MARGIN)
