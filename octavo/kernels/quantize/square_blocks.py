"""Quantising with one scale per square block, such as 128×128, for rows, for columns, or for both.

A program walks over the tiles of a block twice: for the largest magnitude, then to write them. The second time they
come from a cache. (A whole block in registers is too much: it spills, or leaves no room for a second program.)
"""

import triton
import triton.language as tl

from octavo.kernels import tiles
from octavo.kernels.quantize.tensor import load_tile, offsets, store_tile


@triton.jit
def _largest_bits(
    x_ptr, i, j, inner, limit_r, limit_c, stride_r, FINITE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude of block (i, j); NaN and infinities count as larger, unless `FINITE`."""
    PER_R: tl.constexpr = BLOCK // TILE_R
    PER_C: tl.constexpr = BLOCK // TILE_C
    top = tl.zeros([TILE_R, TILE_C // 8], tl.int32)
    for a in tl.static_range(PER_R):
        for b in tl.static_range(PER_C):
            tile_i, tile_j = i * PER_R + a, j * PER_C + b
            x = load_tile(x_ptr, tile_i, tile_j, inner, limit_r, limit_c, stride_r, EVEN, TILE_R, TILE_C)
            bits = tiles.magnitude_bits(x.to(tl.float32))
            if FINITE:
                bits = tl.where(bits < tiles.INFINITY_BITS, bits, 0)
            top = tl.maximum(top, tiles.largest_of_eight(bits))
    return tiles.largest(top)


@triton.jit(do_not_specialize=["seed"])
def block_kernel(
    x_ptr,
    state_ptr,
    rows_ptr,
    row_scale_ptr,
    columns_ptr,
    column_scale_ptr,
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
    RECORD: tl.constexpr,
    FIRST: tl.constexpr,
    CLIPS: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """`x` is rows r0 to end of R, and r0 a multiple of BLOCK. `CLIPS`: these scales saturate."""
    PER_R: tl.constexpr = BLOCK // TILE_R
    PER_C: tl.constexpr = BLOCK // TILE_C
    down, across = tl.cdiv(R, BLOCK), tl.cdiv(C, BLOCK)
    per_matrix = tl.cdiv(end - r0, BLOCK) * across
    count = batches * per_matrix
    inner = offsets(stride_r, TILE_R, TILE_C)
    inner_out = offsets(C, TILE_R, TILE_C)
    inner_t = offsets(R, TILE_C, TILE_R)
    finite_top = tl.program_id(0) * 0.0
    non_finite = tl.program_id(0) < 0
    lost = tl.zeros([TILE_R, TILE_C // 8], tl.int32)
    clipped = tl.program_id(0) * 0
    step = tiles.sample_step(count)
    for block in range(tl.program_id(0), count, tl.num_programs(0)):
        batch = (block // per_matrix).to(tl.int64)
        i, j = block % per_matrix // across, block % across
        x_matrix = x_ptr + batch * stride_b
        bits = _largest_bits(x_matrix, i, j, inner, end - r0, C, stride_r, False, BLOCK, EVEN, TILE_R, TILE_C)
        if bits >= tiles.INFINITY_BITS:  # rare
            bits = _largest_bits(x_matrix, i, j, inner, end - r0, C, stride_r, True, BLOCK, EVEN, TILE_R, TILE_C)
            non_finite = non_finite | True
        amax = bits.to(tl.float32, bitcast=True)
        finite_top = tl.maximum(finite_top, amax)
        scale = tiles.scale_from_amax(amax, FORMAT, MARGIN)
        inverse = tiles.reciprocal(scale)
        i_all = i + r0 // BLOCK  # among all the rows, of which x is a part
        if ROWS:
            tl.store(row_scale_ptr + (batch * down + i_all) * across + j, scale)
        if COLUMNS:
            tl.store(column_scale_ptr + (batch * across + j) * down + i_all, scale)
        for a in tl.static_range(PER_R):
            for b in tl.static_range(PER_C):
                tile_i, tile_j = i * PER_R + a, j * PER_C + b
                loaded = load_tile(x_matrix, tile_i, tile_j, inner, end - r0, C, stride_r, EVEN, TILE_R, TILE_C)
                x = loaded.to(tl.float32)
                where = (batch * R + r0 + tile_i * TILE_R) * C + tile_j * TILE_C + inner_out if STOCHASTIC else 0
                v = tiles.saturate(x * inverse, seed, where, FORMAT, STOCHASTIC)
                if RECORD:
                    if tiles.is_sampled(block, step):
                        lost += tiles.count_of_eight(tiles.is_lost(x, v, FORMAT))
                    if CLIPS:
                        clipped += tiles.count(tiles.is_clipped(x, scale, FORMAT))
                if ROWS:
                    q = tiles.cast(v, rows_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else loaded.dtype)
                    out = rows_ptr + (batch * R + r0) * C
                    store_tile(out, q, tile_i, tile_j, inner_out, end - r0, C, C, EVEN, TILE_R, TILE_C)
                if COLUMNS:
                    if STOCHASTIC:
                        q_t = tiles.cast(tl.trans(v), columns_ptr.dtype.element_ty, tl.float32)  # the very same values
                    else:
                        v_t = tiles.saturate(tl.trans(loaded).to(tl.float32) * inverse, 0, 0, FORMAT, False)
                        q_t = tiles.cast(v_t, columns_ptr.dtype.element_ty, loaded.dtype)
                    out_t = columns_ptr + batch * R * C + r0
                    store_tile(out_t, q_t, tile_j, tile_i, inner_t, C, end - r0, R, EVEN, TILE_C, TILE_R)

    if RECORD:
        tiles.record(state_ptr, finite_top, non_finite, tiles.from_sample(lost, count, step), clipped, per_element)
        if FIRST:
            if tl.program_id(0) == 0:
                tiles.record_use(state_ptr)
