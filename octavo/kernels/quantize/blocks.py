"""Quantising with many scales, for rows and for columns: per channel, per block of 1×128, per 1×32 (mx).

A program walks over tiles of `x[R, C]`. Scales of blocks come from the tile itself, which holds whole blocks; those of
channels from a pass before, which may be the pass that writes the other layout. The transposed tile is a tile of the
transposed matrix: the same code, with rows and columns exchanged.

The amax of columns is kept in registers, because a program stays in the same columns: there are as many programs as
columns of tiles, or a multiple. (An atomic for every column of every tile took five times as long as all the rest.)
"""

import triton
import triton.language as tl

from octavo.kernels import finite, tiles
from octavo.kernels.quantize.tensor import load_tile, offsets, store_tile
from octavo.kernels.tiles import CHANNEL, MX, NONE


@triton.jit(do_not_specialize=["seed"])
def scaled_kernel(
    x_ptr,
    state_ptr,
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
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MX_UP: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`x` is rows r0 to end of R. `CLIPS`: these scales saturate. `COLUMN_AMAX`: find it, too, for a later pass."""
    tiles.follow(OVERLAPS)
    across = tl.cdiv(C, TILE_C)
    per_matrix = tl.cdiv(end - r0, TILE_R) * across
    strips = batches * across
    rows_ptr += r0.to(tl.int64) * C
    columns_ptr += r0
    inner = offsets(stride_r, TILE_R, TILE_C)
    inner_out = offsets(C, TILE_R, TILE_C)
    inner_t = offsets(R, TILE_C, TILE_R)
    source_t: tl.constexpr = tl.float32 if STOCHASTIC else x_ptr.dtype.element_ty
    trouble = tl.zeros([TILE_R, TILE_C // 8], tl.float32)
    top = tl.zeros([TILE_R if MODE_R != NONE else TILE_C], tl.float32)
    lost = tl.zeros([TILE_R, TILE_C // 8], tl.int32)
    lost_t = tl.zeros([TILE_C, TILE_R // 8], tl.int32)
    column_top = tl.zeros([TILE_R, TILE_C], tl.float32)
    clipped = tl.program_id(0) * 0
    count = batches * per_matrix

    step = tiles.sample_step(count)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=STAGES):
        if COLUMN_AMAX:  # always in the same columns
            batch = (tile % strips // across).to(tl.int64)
            i, j = tile // strips, tile % across
        else:
            batch = (tile // per_matrix).to(tl.int64)
            i, j = tile % per_matrix // across, tile % across
        loaded = load_tile(x_ptr + batch * stride_b, i, j, inner, end - r0, C, stride_r, EVEN, TILE_R, TILE_C)
        x = loaded.to(tl.float32)
        i_all = i + r0 // TILE_R  # among all the rows, of which x is a part
        if RECORD:
            trouble += finite.trouble_of_eight(x)
        if COLUMN_AMAX:
            column_top = tl.maximum(column_top, finite.magnitude(x))
        if MODE_R != NONE:
            v, spread, amax = scale_rows(
                x, amax_of_rows(x, MODE_R), i_all, j, batch, end, R, C, row_amax_ptr, row_scale_ptr, MODE_R, FORMAT,
                MARGIN, MX_UP, TILE_R, TILE_C,
            )  # fmt: skip
            where = (batch * R + i_all * TILE_R) * C + j * TILE_C + inner_out
            v = tiles.saturate(v, seed, where, FORMAT, STOCHASTIC)
            if RECORD:
                top = tl.maximum(top, amax)
                if tiles.is_sampled(tile, step):
                    lost += tiles.count_of_eight(tiles.is_lost(x, v, FORMAT))
                if CLIPS:
                    clipped += tiles.count(tiles.is_clipped(x, spread, FORMAT))
            q = tiles.cast(v, rows_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else loaded.dtype)
            store_tile(rows_ptr + batch * R * C, q, i, j, inner_out, end - r0, C, C, EVEN, TILE_R, TILE_C)
        if MODE_C != NONE:
            x_t = tl.trans(loaded).to(tl.float32)
            v_t, spread_t, amax_t = scale_rows(
                x_t, amax_of_columns(x, MODE_C), j, i_all, batch, C, C, R, column_amax_ptr, column_scale_ptr, MODE_C,
                FORMAT, MARGIN, MX_UP, TILE_C, TILE_R, True,
            )  # fmt: skip
            where_t = (batch * C + j * TILE_C) * R + i_all * TILE_R + inner_t
            v_t = tiles.saturate(v_t, seed + 1, where_t, FORMAT, STOCHASTIC)
            if RECORD and MODE_R == NONE:
                top = tl.maximum(top, amax_t)
                if tiles.is_sampled(tile, step):
                    lost_t += tiles.count_of_eight(tiles.is_lost(x_t, v_t, FORMAT))
                if CLIPS:
                    clipped += tiles.count(tiles.is_clipped(x_t, spread_t, FORMAT))
            q_t = tiles.cast(v_t, columns_ptr.dtype.element_ty, source_t)
            store_tile(columns_ptr + batch * R * C, q_t, j, i, inner_t, C, end - r0, R, EVEN, TILE_C, TILE_R)

    if COLUMN_AMAX:
        strip = tl.program_id(0) % strips
        c = strip % across * TILE_C + tl.arange(0, TILE_C)
        where_c = column_amax_ptr + (strip // across).to(tl.int64) * C + c
        tiles.raise_to(where_c, tl.max(column_top, axis=0), c < C)
    if RECORD:
        all_lost = tiles.from_sample(lost, count, step) if MODE_R != NONE else tiles.from_sample(lost_t, count, step)
        tiles.record(state_ptr, tl.max(top, axis=0), finite.is_trouble(trouble), all_lost, clipped, per_element)
        if FIRST:
            if tl.program_id(0) == 0:
                tiles.record_use(state_ptr)


@triton.jit
def amax_of_rows(x, MODE: tl.constexpr, FINITE: tl.constexpr = False):
    """Amax of each row of a tile, or (mx) of each group in a row. `FINITE`: x has been through `finite.only`."""
    magnitude = finite.magnitude(x, True) if FINITE else finite.magnitude(x)
    if MODE == MX:
        GROUP: tl.constexpr = tiles.group(MODE)
        amax = tl.max(tl.reshape(magnitude, [x.shape[0], x.shape[1] // GROUP, GROUP]), axis=2)
    else:
        amax = tl.max(magnitude, axis=1)
    return amax


@triton.jit
def amax_of_columns(x, MODE: tl.constexpr):
    """Amax of each column of a tile, or (mx) of each group in a column."""
    magnitude = finite.magnitude(x)
    if MODE == MX:
        GROUP: tl.constexpr = tiles.group(MODE)
        amax = tl.trans(tl.max(tl.reshape(magnitude, [x.shape[0] // GROUP, GROUP, x.shape[1]]), axis=1))
    else:
        amax = tl.max(magnitude, axis=0)
    return amax


@triton.jit
def scale_rows(
    x,
    amax,
    i,
    j,
    batch,
    end,
    R,
    C,
    amax_ptr,
    scale_ptr,
    MODE: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    MX_UP: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):
    """Tile (i, j) divided by scales along its rows, these scales, and the largest amax of each row. Stores the scales.

    `amax` is that of the tile's blocks; of channels it is in memory. `TRANSPOSED`: x is a transposed tile; scales that
    were found in it are read back from memory, because they can be read into any layout, so Triton transposes x itself;
    with scales from registers it transposes the result, in FP8 (see `tiles.cast`).
    """
    r = i * TILE_R + tl.arange(0, TILE_R)
    if MODE == MX:
        GROUP: tl.constexpr = tiles.group(MODE)
        GROUPS: tl.constexpr = TILE_C // GROUP
        exponent = tiles.mx_exponent(amax, FORMAT, MARGIN, MX_UP)
        g = j * GROUPS + tl.arange(0, GROUPS)
        per_row = tl.cdiv(C, GROUP)
        where = scale_ptr + (batch * R + r[:, None]) * per_row + g[None, :]
        wanted = (r[:, None] < end) & (g[None, :] < per_row)
        tl.store(where, exponent.to(tl.uint8), mask=wanted)
        if TRANSPOSED:
            tl.debug_barrier()
            exponent = tl.load(where, mask=wanted, other=127).to(tl.int32)
        spread = _spread(tiles.mx_factor(exponent), TILE_R, GROUPS, GROUP)
        factor = _spread(tiles.mx_factor(254 - exponent), TILE_R, GROUPS, GROUP)
        amax = tl.max(amax, axis=1)
    else:
        if MODE == CHANNEL:
            amax = tl.load(amax_ptr + batch * R + r, mask=r < end, other=0.0)
            where = scale_ptr + batch * R + r
            wanted = (r < end) & (j == 0)
        else:
            where = scale_ptr + (batch * R + r) * tl.cdiv(C, TILE_C) + j
            wanted = r < end
        scale = tiles.scale_from_amax(amax, FORMAT, MARGIN)
        tl.store(where, scale, mask=wanted)
        if TRANSPOSED and MODE != CHANNEL:
            tl.debug_barrier()  # written by other threads
            scale = tl.load(where, mask=wanted, other=1.0)
        spread = scale[:, None]
        factor = tiles.reciprocal(scale)[:, None]
    return x * factor, spread, amax


@triton.jit
def _spread(per_group, TILE_R: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """`[rows, groups]` to `[rows, groups × elements of a group]`."""
    spread = tl.broadcast_to(per_group[:, :, None], [TILE_R, GROUPS, GROUP])
    return tl.reshape(spread, [TILE_R, GROUPS * GROUP])


@triton.jit
def amax_kernel(
    x_ptr,
    amax_ptr,
    row_amax_ptr,
    column_amax_ptr,
    r0,
    end,
    R,
    C,
    stride_b,
    stride_r,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The largest finite magnitude of everything, of each row, of each column: atomics into zeros.

    With `COLUMNS` there must be as many programs as columns of tiles, or a multiple.
    """
    tiles.follow(OVERLAPS)
    batch = tl.program_id(1).to(tl.int64)
    x_ptr += batch * stride_b
    across = tl.cdiv(C, TILE_C)
    inner = offsets(stride_r, TILE_R, TILE_C)
    top = tl.zeros([TILE_R, TILE_C // 8], tl.float32)
    column_top = tl.zeros([TILE_R, TILE_C], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(end - r0, TILE_R) * across, tl.num_programs(0), num_stages=STAGES):
        i, j = tile // across, tile % across
        x = load_tile(x_ptr, i, j, inner, end - r0, C, stride_r, EVEN, TILE_R, TILE_C)
        magnitude = finite.magnitude(x.to(tl.float32))
        if ROWS:
            r = r0 + i * TILE_R + tl.arange(0, TILE_R)
            tiles.raise_to(row_amax_ptr + batch * R + r, tl.max(magnitude, axis=1), r < end)
        if COLUMNS:
            column_top = tl.maximum(column_top, magnitude)
        if WHOLE:
            top = tl.maximum(top, tiles.largest_of_eight(magnitude))
    if COLUMNS:
        c = tl.program_id(0) % across * TILE_C + tl.arange(0, TILE_C)
        tiles.raise_to(column_amax_ptr + batch * C + c, tl.max(column_top, axis=0), c < C)
    if WHOLE:
        amax = tiles.largest(top)
        if amax > 0:
            tl.atomic_max(amax_ptr, amax, sem="relaxed")
