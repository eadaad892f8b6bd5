"""Quantising an operand in one pass over it: the kernels behind `numerics.operand.quantize_operand`.

`x[R, C]` is read once and written as `rows[R, C]`, as `columns[C, R]`, or as both. Where the scale comes from:

    tensor         one scale: delayed, from the row; else from an amax pass (which ends at once where a scale is known)
    channel        one per row, or per column, from an amax pass
    128×128        from an amax pass
    1×128          of a tile's own rows (128 elements along the contracted dimension), or columns; each in its own pass
    1×32 (mx)      the same with 32, a power of two

A group of matrices that lie side by side (q, k and v, say) is written into slices of one buffer, by one launch each.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.launch import launch
from octavo.kernels.quantize_scaled import amax_kernel, scaled_kernel
from octavo.kernels.quantize_tensor import tensor_kernel
from octavo.kernels.tiles import BLOCK_1X128, BLOCK_128X128, CHANNEL, MX, NONE, TENSOR, multiprocessors
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantize import BLOCK, MX_BLOCK, Quantized

Tile = tuple[int, int, int, int, int, int | None]

# Rows and columns of a tile, warps, loads in flight, programs per multiprocessor, and registers per thread: the best of
# some dozen each on an H200, at 8,192 × 4,096 and 28,672 × 4,096.
_TENSOR_TILE: Tile = (64, 64, 8, 3, 4, 64)
_SCALED_TILE: Tile = (64, 64, 4, 1, 8, None)
_ROWS_TILE: Tile = (32, 128, 4, 1, 8, None)  # as wide as a block
_COLUMNS_TILE: Tile = (128, 32, 4, 1, 8, None)  # as high as one
_AMAX_TILE: Tile = (64, 64, 4, 3, 8, None)
_SMALL_TILES = {NONE.value, TENSOR.value, CHANNEL.value, BLOCK_128X128.value}  # scales known before the tile


def can_quantize(xs: Sequence[Tensor], recipe: OperandRecipe) -> bool:
    """Whether the kernel covers this: formats that NVIDIA has, no percentile, groups that no block straddles."""
    wide = all(x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.dim() >= 2 and x.numel() for x in xs)
    whole = len(xs) == 1 or all(x.dim() == 2 and x.shape[0] % BLOCK == 0 for x in xs)
    return wide and whole and recipe.format in (E4M3, E5M2) and recipe.percentile is None


def quantize_operand(
    x: Tensor, row: Tensor, recipe: OperandRecipe, *, record: bool = True, layout: str = "rows"
) -> list[Quantized]:
    """As `numerics.operand.quantize_operand`."""
    return quantize_group([x], row, recipe, record=record, layout=layout)


def quantize_group(
    xs: Sequence[Tensor],
    row: Tensor,
    recipe: OperandRecipe,
    *,
    record: bool = True,
    layout: str = "rows",
    known: bool = False,
) -> list[Quantized]:
    """As quantising `torch.cat(xs)`, without making it. `known`: a delayed scale was in use before, no need to look."""
    mode_r, mode_c = _modes(recipe, layout)
    batch = xs[0].shape[:-2]
    if batch or len(xs) == 1:
        # Without a transposed copy, a batch is just more rows.
        flat = not mode_c and mode_r != BLOCK_128X128.value
        xs = [x.reshape(1, -1, x.shape[-1]) if flat else x.reshape(-1, *x.shape[-2:]) for x in xs]
    else:
        xs = [x.unsqueeze(0) for x in xs]
    xs = [x if x.stride(-1) == 1 else x.contiguous() for x in xs]
    b, c = xs[0].shape[0], xs[0].shape[2]
    r = sum(x.shape[1] for x in xs)
    rows = _new_output(xs[0], mode_r, recipe, b, r, c)
    columns = _new_output(xs[0], mode_c, recipe, b, c, r)
    if not record and recipe.delayed and not known:
        row = row.clone()  # a first use looks for its scale, and forgets it
    measured = _measure(xs, row, recipe, mode_r, mode_c, b, r, c, known)
    for pass_r, pass_c in _passes(mode_r, mode_c):
        outputs = (rows if pass_r else columns, columns if pass_c else rows)
        recording = record and (pass_r, pass_c) == _passes(mode_r, mode_c)[0]
        _write(xs, row, recipe, pass_r, pass_c, outputs, measured, recording)
    return [_shaped(q, batch) for q, mode in ((rows, mode_r), (columns, mode_c)) if mode]


def _passes(mode_r: int, mode_c: int) -> list[tuple[int, int]]:
    """Both layouts at once, or one after the other where each wants tiles of another shape for its own blocks."""
    if mode_r and mode_c and not {mode_r, mode_c} <= _SMALL_TILES:
        return [(mode_r, NONE.value), (NONE.value, mode_c)]
    return [(mode_r, mode_c)]


def _write(
    xs: Sequence[Tensor],
    row: Tensor,
    recipe: OperandRecipe,
    mode_r: int,
    mode_c: int,
    outputs: tuple[Quantized, Quantized],
    measured: tuple[Tensor, Tensor, Tensor],
    record: bool,
) -> None:
    """One pass over every matrix of the group."""
    b, c = xs[0].shape[0], xs[0].shape[2]
    r = sum(x.shape[1] for x in xs)
    whole = TENSOR.value in (mode_r, mode_c)
    small = {mode_r, mode_c} <= _SMALL_TILES
    tile = _TENSOR_TILE if whole else _SCALED_TILE if small else _ROWS_TILE if mode_r else _COLUMNS_TILE
    amax, row_amax, column_amax = measured
    first, second = outputs
    stochastic = recipe.rounding == "stochastic"
    r0 = 0
    for x in xs:
        end = r0 + x.shape[1]
        grid, constants = _launch(x, c, b, tile)
        sizes = (r0, end, r, c, b, x.stride(0), x.stride(1), 1.0 / (b * r * c))
        seed = int(torch.randint(2**31 - 2, ())) if stochastic else 0
        constants |= {
            "RECORD": record,
            "FIRST": r0 == 0,
            "MAXIMUM": recipe.format.max,
            "MARGIN": recipe.margin,
            "STOCHASTIC": stochastic,
        }
        if whole:
            constants |= {"ROWS": mode_r > 0, "COLUMNS": mode_c > 0, "DELAYED": recipe.delayed}
            args = (x, row, amax, first.data, second.data, first.scale, second.scale, *sizes, seed)
            launch(tensor_kernel, grid, args, constants)
        else:
            constants |= {
                "MODE_R": mode_r,
                "MODE_C": mode_c,
                "CLIPS": recipe.margin < 1 or (recipe.granularity == "mx" and recipe.mx_rule == "floor"),
                "MX_UP": recipe.mx_rule == "up",
            }
            launch(scaled_kernel, grid, (x, row, row_amax, column_amax, *first, *second, *sizes, seed), constants)
        r0 = end


def _launch(x: Tensor, c: int, b: int, tile: Tile) -> tuple[tuple[int], dict[str, Any]]:
    """The grid for one matrix `[b, r, c]`, and the constants that go with the tile."""
    tile_r, tile_c, warps, stages, programs, registers = tile
    r = x.shape[1]
    count = b * -(-r // tile_r) * -(-c // tile_c)
    constants = {
        "EVEN": r % tile_r == 0 and c % tile_c == 0,
        "TILE_R": tile_r,
        "TILE_C": tile_c,
        "STAGES": stages,
        "num_warps": warps,
    }
    if registers is not None:
        constants["maxnreg"] = registers
    return (min(count, programs * multiprocessors(x.device)),), constants


@cache
def _modes(recipe: OperandRecipe, layout: str) -> tuple[int, int]:
    def mode(granularity: str) -> int:
        if granularity == "block":
            return (BLOCK_128X128 if recipe.block[0] == BLOCK else BLOCK_1X128).value
        return {"tensor": TENSOR, "channel": CHANNEL, "mx": MX}[granularity].value

    rows = mode(recipe.granularity) if layout != "columns" else NONE.value
    columns = mode(recipe.columns or recipe.granularity) if layout != "rows" else NONE.value
    return rows, columns


def _new_output(x: Tensor, mode: int, recipe: OperandRecipe, b: int, r: int, c: int) -> Quantized:
    if mode == NONE.value:
        return Quantized(x, x)
    shape: tuple[int, ...] = ()
    if mode == CHANNEL.value:
        shape = (b, r, 1)
    elif mode != TENSOR.value:
        down, across = (BLOCK, BLOCK) if mode == BLOCK_128X128.value else (1, MX_BLOCK if mode == MX.value else BLOCK)
        shape = (b, -(-r // down), -(-c // across))
    dtype = torch.uint8 if mode == MX.value else torch.float32
    return Quantized(x.new_empty((b, r, c), dtype=recipe.format.dtype), x.new_empty(shape, dtype=dtype))


def _measure(
    xs: Sequence[Tensor],
    row: Tensor,
    recipe: OperandRecipe,
    mode_r: int,
    mode_c: int,
    b: int,
    r: int,
    c: int,
    known: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What must be known before quantising: the amax of everything, of each row, of each column, where needed."""
    whole = TENSOR.value in (mode_r, mode_c)
    by_row, by_column = mode_r == CHANNEL.value, mode_c == CHANNEL.value
    by_block = BLOCK_128X128.value in (mode_r, mode_c)
    amax = row if recipe.delayed or not whole else row.new_zeros(1)
    blocks = b * -(-r // BLOCK) * -(-c // BLOCK)
    row_amax = row.new_zeros(blocks if by_block else b * r) if by_row or by_block else row
    column_amax = row.new_zeros(b * c) if by_column else row
    if by_row or by_column or by_block or (whole and not (known and recipe.delayed)):
        r0 = 0
        for x in xs:
            grid, constants = _launch(x, c, 1, _AMAX_TILE)
            constants |= {"DELAYED": recipe.delayed, "ROWS": by_row, "COLUMNS": by_column}
            constants |= {"WHOLE": whole, "BLOCKS": by_block}
            sizes = (r0, r0 + x.shape[1], r, c, x.stride(0), x.stride(1))
            launch(amax_kernel, (*grid, b), (x, row, amax, row_amax, column_amax, *sizes), constants)
            r0 += x.shape[1]
    return amax, row_amax, column_amax


def _shaped(q: Quantized, batch: torch.Size) -> Quantized:
    """With the batch dimensions of the input again."""
    scale = q.scale if q.scale.dim() == 0 else q.scale.view(*batch, -1, q.scale.shape[-1])
    return Quantized(q.data.view(*batch, -1, q.data.shape[-1]), scale)
