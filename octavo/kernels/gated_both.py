"""The backward of a gated activation in one pass, with a scale per block of 1×128 or 1×32 (mx) along both axes.

A tile of gate, of up and of the gradient of h becomes tiles of the gradients of gate and of up, for both layouts, and
of h, for columns. All are held as `words.py` says. Three tiles at once take many registers, of which fewer programs
fit: in `STEPS`, a program reads what it needs again, from a cache, and computes it again.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles, words
from octavo.kernels.gated_tiles import activate
from octavo.kernels.tiles import BLOCK_1X128, MX, multiprocessors
from octavo.numerics.config import OperandRecipe

# Tokens and features of a tile, rows of a thread, steps, warps, programs per multiprocessor, and registers per thread.
TILES: dict[int, tuple[int, int, int, int, int, int, int]] = {
    BLOCK_1X128.value: (128, 128, 8, 2, 8, 2, 128),
    MX.value: (128, 64, 8, 1, 4, 3, 168),
}


@triton.jit
def _gradients(
    dh_base, gate_base, m, f, F, dtype: tl.constexpr, SILU: tl.constexpr, DGATE: tl.constexpr, DUP: tl.constexpr,
    H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of gate and of up, and h: what is wanted of them, rounded as memory would, without infinities."""
    dh_where, where = words.addresses(dh_base, m, f, F // 2), words.addresses(gate_base, m, f, F)
    dgate, dup, h = (), (), ()
    for _ in tl.static_range(ROWS):
        gate = tl.load(where)
        gate_0, slope_0 = activate(words.half(gate, 0, dtype), SILU)
        gate_1, slope_1 = activate(words.half(gate, 1, dtype), SILU)
        if DGATE or H:
            up = tl.load(words.below(where, F // 2))
            up_0, up_1 = words.half(up, 0, dtype), words.half(up, 1, dtype)
        if DGATE or DUP:
            dh = tl.load(dh_where)
            dh_0, dh_1 = words.half(dh, 0, dtype), words.half(dh, 1, dtype)
        if DGATE:
            dgate = words.and_one(dgate, _rounded(dh_0 * up_0 * slope_0, dh_1 * up_1 * slope_1, dtype))
        if DUP:
            dup = words.and_one(dup, _rounded(dh_0 * gate_0, dh_1 * gate_1, dtype))
        if H:
            h = words.and_one(h, _rounded(gate_0 * up_0, gate_1 * up_1, dtype))
        dh_where, where = words.below(dh_where, F // 2), words.below(where, F)
    return dgate, dup, h


@triton.jit
def _rounded(first, second, dtype: tl.constexpr):
    return words.without_infinities(words.pair(first, second, dtype), dtype)


@triton.jit
def gated_both_kernel(
    dh_ptr,
    gate_up_ptr,
    row_ptr,
    rows_ptr,
    row_scale_ptr,
    columns_ptr,
    column_scale_ptr,
    h_ptr,
    h_scale_ptr,
    M,
    F,
    per_element,
    MODE: tl.constexpr,
    SILU: tl.constexpr,
    CLIPS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    MX_UP: tl.constexpr,
    H_MAXIMUM: tl.constexpr,
    H_MARGIN: tl.constexpr,
    H_MX_UP: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):
    """`STEPS`: 1, all three at once; 2, h after the gradients; 3, one after the other."""
    dtype: tl.constexpr = dh_ptr.dtype.element_ty
    BLOCK: tl.constexpr = 32 if MODE == MX else 128
    dh_ptr = dh_ptr.to(tl.pointer_type(tl.int32))
    gate_up_ptr = gate_up_ptr.to(tl.pointer_type(tl.int32))
    across, per_row, per_column = F // TILE_F, F // BLOCK, M // BLOCK
    count = M // TILE_M * across
    all_m, all_f = words.places(ROWS, TILE_M, TILE_F)
    counts, trouble = words.no_counts(all_m, all_f)
    step = tiles.sample_step(count)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        i, j = (tile // across).to(tl.int64), tile % across
        m, f = words.anew(all_m), words.anew(all_f)
        sampled = tiles.is_sampled(tile, step)
        dh_base = dh_ptr + i * TILE_M * (F // 2) + j * (TILE_F // 2)
        gate_base = gate_up_ptr + i * TILE_M * F + j * (TILE_F // 2)
        dgate, dup, h = _gradients(dh_base, gate_base, m, f, F, dtype, SILU, True, STEPS < 3, STEPS == 1, ROWS)
        for half in tl.static_range(2):
            if half == 1 and STEPS == 3:
                _, dup, _ = _gradients(dh_base, gate_base, m, f, F, dtype, SILU, False, True, False, ROWS)
            d = dgate if half == 0 else dup
            trouble = words.add_trouble(trouble, d, dtype)
            row, column = i * TILE_M, (half * across + j).to(tl.int64) * TILE_F
            counts = words.write(
                d, m, f, rows_ptr + row * 2 * F + column, row_scale_ptr + row * 2 * per_row + column // BLOCK,
                columns_ptr + column * M + row, column_scale_ptr + column * per_column + row // BLOCK, M, 2 * F, counts,
                sampled, dtype, True, True, CLIPS, MODE, MAXIMUM, MARGIN, MX_UP,
            )  # fmt: skip
        if STEPS > 1:
            _, _, h = _gradients(dh_base, gate_base, m, f, F, dtype, SILU, False, False, True, ROWS)
        row, column = i * TILE_M, j.to(tl.int64) * TILE_F
        words.write(
            h, m, f, h_ptr, h_scale_ptr, h_ptr + column * M + row, h_scale_ptr + column * per_column + row // BLOCK, M,
            F, counts, sampled, dtype, False, False, False, MODE, H_MAXIMUM, H_MARGIN, H_MX_UP,
        )  # fmt: skip
    words.record(row_ptr, counts, trouble, count, step, per_element)
    if tl.program_id(0) == 0:
        tiles.record_use(row_ptr)


def can_write(mode: int, dh: Tensor, gate_up: Tensor, *recipes: OperandRecipe) -> bool:
    """Whether these are whole tiles of 16-bit numbers of one kind, and rounding is to nearest."""
    if mode not in TILES or dh.dtype == torch.float32 or dh.dtype != gate_up.dtype:
        return False
    tile_m, tile_f, *_ = TILES[mode]
    aligned = dh.data_ptr() % 16 == 0 and gate_up.data_ptr() % 16 == 0
    nearest = all(recipe.rounding != "stochastic" for recipe in recipes)
    return aligned and nearest and dh.shape[0] % tile_m == 0 and dh.shape[1] % tile_f == 0


def arrange_both(mode: int, dh: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and the constants of the tile."""
    tile_m, tile_f, rows, steps, warps, programs, registers = TILES[mode]
    constants = {"MODE": mode, "ROWS": rows, "STEPS": steps, "TILE_M": tile_m, "TILE_F": tile_f}
    constants |= {"num_warps": warps, "maxnreg": registers}
    return (min(dh.numel() // (tile_m * tile_f), programs * multiprocessors(dh.device)),), constants
