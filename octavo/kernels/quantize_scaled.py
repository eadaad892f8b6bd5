"""Quantising with many scales, for rows and for columns: per channel, per 1×128 or 128×128 block, per 1×32 (mx).

A program walks over tiles of `x[R, C]`. Scales of blocks come from the tile itself, which holds whole blocks; those of
channels from a pass before, which may be the pass that writes the other layout. The transposed tile is a tile of the
transposed matrix: the same code, with rows and columns exchanged.
"""

import triton
import triton.language as tl

from octavo.kernels import tiles
from octavo.kernels.quantize_tensor import load_tile, offsets, store_tile
from octavo.kernels.tiles import BLOCK_128X128, CHANNEL, MX, NONE

_BLOCK = tl.constexpr(128)
_MX_BLOCK = tl.constexpr(32)


@triton.jit(do_not_specialize=["seed"])
def scaled_kernel(
    x_ptr,
    row_ptr,
    row_amax_ptr,
    column_amax_ptr,
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
    MODE_R: tl.constexpr,
    MODE_C: tl.constexpr,
    COLUMN_AMAX: tl.constexpr,
    RECORD: tl.constexpr,
    FIRST: tl.constexpr,
    CLIPS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MX_UP: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`x` is rows r0 to end of R. `CLIPS`: these scales saturate. `COLUMN_AMAX`: find it, too, for a later pass."""
    across = tl.cdiv(C, TILE_C)
    per_matrix = tl.cdiv(end - r0, TILE_R) * across
    rows_ptr += r0.to(tl.int64) * C
    columns_ptr += r0
    inner = offsets(stride_r, TILE_R, TILE_C)
    inner_out = offsets(C, TILE_R, TILE_C)
    inner_t = offsets(R, TILE_C, TILE_R)
    WHOLE: tl.constexpr = MODE_R == BLOCK_128X128 or (MODE_R == NONE and MODE_C == BLOCK_128X128)
    # With scales found in the transposed tile, Triton would transpose the FP8 bytes; see `tiles.cast`.
    source_t: tl.constexpr = x_ptr.dtype.element_ty if WHOLE or MODE_C == CHANNEL else tl.float32
    top = tl.zeros([TILE_R, TILE_C // 8], tl.int32)
    lost = tl.zeros([TILE_R, TILE_C // 8], tl.int32)
    lost_t = tl.zeros([TILE_C, TILE_R // 8], tl.int32)
    clipped = tl.program_id(0) * 0
    count = batches * per_matrix

    step = tiles.sample_step(count)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=STAGES):
        batch = (tile // per_matrix).to(tl.int64)
        i, j = tile % per_matrix // across, tile % across
        narrow = load_tile(x_ptr + batch * stride_b, i, j, inner, end - r0, C, stride_r, EVEN, TILE_R, TILE_C)
        x = narrow.to(tl.float32)
        i_all = i + r0 // TILE_R  # among all the rows, of which x is a part
        if RECORD:
            top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(x)))
        if WHOLE:
            block_r, block_c = i_all * TILE_R // _BLOCK, j * TILE_C // _BLOCK
            down, wide = tl.cdiv(R, _BLOCK), tl.cdiv(C, _BLOCK)
            amax = tiles.largest(tiles.finite_magnitude(x))
            scale = tiles.scale_from_amax(amax, MAXIMUM, MARGIN)
            inverse = tiles.reciprocal(scale)
            if MODE_R == BLOCK_128X128:
                tl.store(row_scale_ptr + (batch * down + block_r) * wide + block_c, scale)
            if MODE_C == BLOCK_128X128:
                tl.store(column_scale_ptr + (batch * wide + block_c) * down + block_r, scale)
        if COLUMN_AMAX:
            c = j * TILE_C + tl.arange(0, TILE_C)
            tiles.raise_to(column_amax_ptr + batch * C + c, tl.max(tiles.finite_magnitude(x), axis=0), c < C)
        if MODE_R != NONE:
            if WHOLE:
                v, spread = x * inverse, scale
            else:
                v, spread = scale_rows(
                    x, i_all, j, batch, end, R, C, row_amax_ptr, row_scale_ptr, MODE_R, MAXIMUM, MARGIN, MX_UP, TILE_R,
                    TILE_C,
                )  # fmt: skip
            where = (batch * R + i_all * TILE_R) * C + j * TILE_C + inner_out
            v = tiles.saturate(v, seed, where, MAXIMUM, STOCHASTIC)
            if RECORD:
                if tiles.is_sampled(tile, step):
                    lost += tiles.count_of_eight(tiles.is_lost(x, v, MAXIMUM))
                if CLIPS:
                    clipped += tiles.count(tiles.is_clipped(x, spread, MAXIMUM))
            q = tiles.cast(v, rows_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else narrow.dtype)
            store_tile(rows_ptr + batch * R * C, q, i, j, inner_out, end - r0, C, C, EVEN, TILE_R, TILE_C)
        if MODE_C != NONE:
            if WHOLE and STOCHASTIC and MODE_R != NONE:
                q_t = tiles.cast(tl.trans(v), columns_ptr.dtype.element_ty, tl.float32)  # the very same values
            else:
                x_t = tl.trans(narrow).to(tl.float32)
                if WHOLE:
                    v_t, spread_t = x_t * inverse, scale
                else:
                    v_t, spread_t = scale_rows(
                        x_t, j, i_all, batch, C, C, R, column_amax_ptr, column_scale_ptr, MODE_C, MAXIMUM, MARGIN,
                        MX_UP, TILE_C, TILE_R,
                    )  # fmt: skip
                where_t = (batch * C + j * TILE_C) * R + i_all * TILE_R + inner_t
                v_t = tiles.saturate(v_t, seed + 1, where_t, MAXIMUM, STOCHASTIC)
                if RECORD and MODE_R == NONE:
                    if tiles.is_sampled(tile, step):
                        lost_t += tiles.count_of_eight(tiles.is_lost(x_t, v_t, MAXIMUM))
                    if CLIPS:
                        clipped += tiles.count(tiles.is_clipped(x_t, spread_t, MAXIMUM))
                q_t = tiles.cast(v_t, columns_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else source_t)
            store_tile(columns_ptr + batch * R * C, q_t, j, i, inner_t, C, end - r0, R, EVEN, TILE_C, TILE_R)

    if RECORD:
        top_bits = tiles.largest(top)
        finite_top = top_bits.to(tl.float32, bitcast=True)
        if top_bits >= tiles.INFINITY_BITS:  # rare, so walk over the tiles again
            finite_top = 0.0
            for tile in range(tl.program_id(0), count, tl.num_programs(0)):
                batch = (tile // per_matrix).to(tl.int64)
                i, j = tile % per_matrix // across, tile % across
                x = load_tile(x_ptr + batch * stride_b, i, j, inner, end - r0, C, stride_r, EVEN, TILE_R, TILE_C)
                finite_top = tl.maximum(finite_top, tiles.largest(tiles.finite_magnitude(x.to(tl.float32))))
        all_lost = tiles.from_sample(lost, count, step) if MODE_R != NONE else tiles.from_sample(lost_t, count, step)
        tiles.record(row_ptr, finite_top, top_bits >= tiles.INFINITY_BITS, all_lost, clipped, per_element)
        if FIRST:
            if tl.program_id(0) == 0:
                tiles.record_use(row_ptr)


@triton.jit
def scale_rows(
    x,
    i,
    j,
    batch,
    end,
    R,
    C,
    amax_ptr,
    scale_ptr,
    MODE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    MX_UP: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Tile (i, j) divided by scales along its rows, and these scales; stores them, too."""
    r = i * TILE_R + tl.arange(0, TILE_R)
    if MODE == MX:
        GROUPS: tl.constexpr = TILE_C // _MX_BLOCK
        blocks = tl.reshape(tiles.finite_magnitude(x), [TILE_R, GROUPS, _MX_BLOCK])
        exponent = tiles.mx_exponent(tl.max(blocks, axis=2), MAXIMUM, MARGIN, MX_UP)
        g = j * GROUPS + tl.arange(0, GROUPS)
        per_row = tl.cdiv(C, _MX_BLOCK)
        where = scale_ptr + (batch * R + r[:, None]) * per_row + g[None, :]
        tl.store(where, exponent.to(tl.uint8), mask=(r[:, None] < end) & (g[None, :] < per_row))
        spread = _spread(tiles.mx_factor(exponent), TILE_R, GROUPS)
        factor = _spread(tiles.mx_factor(254 - exponent), TILE_R, GROUPS)
    else:
        if MODE == CHANNEL:
            amax = tl.load(amax_ptr + batch * R + r, mask=r < end, other=0.0)
            where = scale_ptr + batch * R + r
            wanted = (r < end) & (j == 0)
        else:
            amax = tl.max(tiles.finite_magnitude(x), axis=1)
            where = scale_ptr + (batch * R + r) * tl.cdiv(C, TILE_C) + j
            wanted = r < end
        scale = tiles.scale_from_amax(amax, MAXIMUM, MARGIN)
        tl.store(where, scale, mask=wanted)
        spread = scale[:, None]
        factor = tiles.reciprocal(scale)[:, None]
    return x * factor, spread


@triton.jit
def _spread(per_group, TILE_R: tl.constexpr, GROUPS: tl.constexpr):
    """`[rows, groups]` to `[rows, 32 × groups]`."""
    spread = tl.broadcast_to(per_group[:, :, None], [TILE_R, GROUPS, _MX_BLOCK])
    return tl.reshape(spread, [TILE_R, GROUPS * _MX_BLOCK])


@triton.jit
def amax_kernel(
    x_ptr,
    row_ptr,
    amax_ptr,
    row_amax_ptr,
    column_amax_ptr,
    r0,
    end,
    R,
    C,
    stride_b,
    stride_r,
    DELAYED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The largest finite magnitude of everything, of each row, of each column: atomics into zeros."""
    if DELAYED:
        if tl.load(row_ptr + tiles.SCALE) > 0:
            return
        amax_ptr += tiles.AMAX
    batch = tl.program_id(1).to(tl.int64)
    x_ptr += batch * stride_b
    across = tl.cdiv(C, TILE_C)
    inner = offsets(stride_r, TILE_R, TILE_C)
    top = tl.zeros([TILE_R, TILE_C // 8], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(end - r0, TILE_R) * across, tl.num_programs(0), num_stages=STAGES):
        i, j = tile // across, tile % across
        x = load_tile(x_ptr, i, j, inner, end - r0, C, stride_r, EVEN, TILE_R, TILE_C)
        magnitude = tiles.finite_magnitude(x.to(tl.float32))
        r, c = r0 + i * TILE_R + tl.arange(0, TILE_R), j * TILE_C + tl.arange(0, TILE_C)
        if ROWS:
            tiles.raise_to(row_amax_ptr + batch * R + r, tl.max(magnitude, axis=1), r < end)
        if COLUMNS:
            tiles.raise_to(column_amax_ptr + batch * C + c, tl.max(magnitude, axis=0), c < C)
        if WHOLE:
            top = tl.maximum(top, tiles.largest_of_eight(magnitude))
    if WHOLE:
        found = tiles.largest(top)
        if found > 0:
            tl.atomic_max(amax_ptr, found, sem="relaxed")
