"""Columns of a gated MLP's backward in whole tiles: the second pass of `blocks.py` where nothing is transposed.

A thread takes words of 16 rows of gate, up and the gradient of h, as `quantize/columns.py` does: it has 16 neighbours
of each transposed result, and writes them as 16 bytes.
"""

import triton
import triton.language as tl

from octavo.kernels import finite, tiles
from octavo.kernels.quantize.columns import ROWS, column, column_factor, stack


@triton.jit(do_not_specialize=["seed"])
def whole_columns_kernel(
    dh_ptr,
    gate_up_ptr,
    column_amax_ptr,
    h_amax_ptr,
    columns_ptr,
    column_scale_ptr,
    h_ptr,
    h_scale_ptr,
    M,
    F,
    seed,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MX_UP: tl.constexpr,
    H_FORMAT: tl.constexpr,
    H_MARGIN: tl.constexpr,
    H_STOCHASTIC: tl.constexpr,
    H_MX_UP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
    BAND: tl.constexpr,
):
    """The gradients of gate and up as `[2F, M]`, and h as `[F, M]`. A block of 1×128 is as long as a tile."""
    dtype: tl.constexpr = dh_ptr.dtype.element_ty
    PER_WORD: tl.constexpr = 32 // dtype.primitive_bitwidth
    WORDS: tl.constexpr = TILE_F // PER_WORD
    GROUPS: tl.constexpr = TILE_M // 32
    SHAPE: tl.constexpr = [2, WORDS, GROUPS, ROWS]
    dh_ptr, gate_up_ptr = dh_ptr.to(tl.pointer_type(tl.int32)), gate_up_ptr.to(tl.pointer_type(tl.int32))
    row = F // PER_WORD  # words of one of h
    down, across = M // TILE_M, F // TILE_F
    word = tl.arange(0, WORDS)[None, :, None]
    r = ROWS * tl.arange(0, 2)[:, None, None] + 32 * tl.arange(0, GROUPS)[None, None, :]
    inner = tl.max_contiguous(r * (2 * row) + word, [1, 1, 1])
    inner_h = tl.max_contiguous(r * row + word, [1, 1, 1])
    inner_t = (r + PER_WORD * word * M)[:, :, :, None] + tl.arange(0, ROWS)[None, None, None, :]
    for tile in range(tl.program_id(0), down * across, tl.num_programs(0)):
        i, j = tiles.place(tile, down, across, BAND, True)
        m0 = i.to(tl.int64) * TILE_M
        base = gate_up_ptr + m0 * (2 * row) + j * WORDS
        gates = tl.reshape(stack(base + inner, 2 * row, ROWS), SHAPE)
        ups = tl.reshape(stack(base + row + inner, 2 * row, ROWS), SHAPE)
        dhs = tl.reshape(stack(dh_ptr + m0 * row + j * WORDS + inner_h, row, ROWS), SHAPE)
        for k in tl.static_range(PER_WORD):
            gate, up, dh = column(gates, k, dtype), column(ups, k, dtype), column(dhs, k, dtype)
            value, slope = ACTIVATION(gate)
            first_column = m0 * 0 + j * TILE_F + k
            c = first_column + PER_WORD * tl.arange(0, WORDS)[:, None]
            where = first_column * M + m0 + inner_t
            for half in tl.static_range(2):
                d = finite.only(tiles.round_to(dh * up * slope if half == 0 else dh * value, dtype)).to(tl.float32)
                factor = column_factor(
                    d, c + half * F, i * TILE_M, M, column_amax_ptr, column_scale_ptr, MODE, FORMAT, MARGIN, MX_UP
                )
                v = d * factor[None, :, :, None]
                v = tiles.saturate(v, seed + 1 + half, where, FORMAT, STOCHASTIC, tiles.INTERPRETED)
                q = tiles.cast(v, columns_ptr.dtype.element_ty, tl.bfloat16)
                tl.store(columns_ptr + half * tl.cast(F, tl.int64) * M + where, q)
            h = finite.only(tiles.round_to(value * up, dtype)).to(tl.float32)
            factor = column_factor(h, c, i * TILE_M, M, h_amax_ptr, h_scale_ptr, MODE, H_FORMAT, H_MARGIN, H_MX_UP)
            v = h * factor[None, :, :, None]
            v = tiles.saturate(v, seed + 3, where, H_FORMAT, H_STOCHASTIC, tiles.INTERPRETED)
            tl.store(h_ptr + where, tiles.cast(v, h_ptr.dtype.element_ty, tl.bfloat16))
