"""Quantising whole tiles to both layouts in one pass, with a scale per block of 1×128 or 1×32 (mx) along each.

A tile holds whole blocks along both axes, and is held as `words.py` says: it is read once, and nothing is transposed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles, words
from octavo.kernels.tiles import BLOCK_1X128, MX, multiprocessors
from octavo.numerics.config import OperandRecipe

# Rows and columns of a tile, rows of a thread, warps, programs per multiprocessor, and registers per thread.
TILES: dict[int, tuple[int, int, int, int, int, int]] = {
    BLOCK_1X128.value: (128, 128, 16, 4, 4, 128),
    MX.value: (128, 64, 8, 4, 4, 128),
}


@triton.jit
def both_kernel(
    x_ptr,
    row_ptr,
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
    MODE: tl.constexpr,
    RECORD: tl.constexpr,
    FIRST: tl.constexpr,
    CLIPS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    MX_UP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """`x` is rows r0 to end of R; `CLIPS`: these scales saturate."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    BLOCK: tl.constexpr = 32 if MODE == MX else 128
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    stride_b, stride_r = stride_b // 2, stride_r // 2
    across = C // TILE_C
    per_matrix = (end - r0) // TILE_R * across
    count = batches * per_matrix
    all_r, all_c = words.places(ROWS, TILE_R, TILE_C)
    counts, trouble = words.no_counts(all_r, all_c)
    step = tiles.sample_step(count)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        batch = (tile // per_matrix).to(tl.int64)
        i, j = tile % per_matrix // across, tile % across
        r, c = words.anew(all_r), words.anew(all_c)
        base = x_ptr + batch * stride_b + i.to(tl.int64) * TILE_R * stride_r + j * (TILE_C // 2)
        where, parts = words.addresses(base, r, c, stride_r), ()
        for _ in tl.static_range(ROWS):
            parts = words.and_one(parts, words.without_infinities(tl.load(where), dtype))
            where = words.below(where, stride_r)
        if RECORD:
            trouble = words.add_trouble(trouble, parts, dtype)
        row, column, down = batch * R + r0 + i * TILE_R, batch * C + j * TILE_C, r0 + i * TILE_R
        counts = words.write(
            parts, r, c, rows_ptr + row * C + j * TILE_C, row_scale_ptr + row * (C // BLOCK) + j * TILE_C // BLOCK,
            columns_ptr + column * R + down, column_scale_ptr + column * (R // BLOCK) + down // BLOCK, R, C, counts,
            tiles.is_sampled(tile, step), dtype, True, RECORD, CLIPS, MODE, MAXIMUM, MARGIN, MX_UP,
        )  # fmt: skip
    if RECORD:
        words.record(row_ptr, counts, trouble, count, step, per_element)
        if FIRST:
            if tl.program_id(0) == 0:
                tiles.record_use(row_ptr)


def can_write(mode: int, recipe: OperandRecipe, x: Tensor, strides: tuple[int, int]) -> bool:
    """Whether x has 16-bit numbers, whole tiles and rows at multiples of 16 bytes, and rounding is to nearest."""
    if mode not in TILES or recipe.rounding == "stochastic" or x.dtype == torch.float32:
        return False
    tile_r, tile_c, *_ = TILES[mode]
    whole = x.shape[-2] % tile_r == 0 and x.shape[-1] % tile_c == 0
    return whole and x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)


def arrange_both(mode: int, recipe: OperandRecipe, x: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and the constants of the tile and of rounding."""
    tile_r, tile_c, rows, warps, programs, registers = TILES[mode]
    constants = {"MODE": mode, "MAXIMUM": recipe.format.max, "MARGIN": recipe.margin, "MX_UP": recipe.mx_rule == "up"}
    constants |= {"ROWS": rows, "TILE_R": tile_r, "TILE_C": tile_c, "num_warps": warps, "maxnreg": registers}
    return (min(x.numel() // (tile_r * tile_c), programs * multiprocessors(x.device)),), constants
