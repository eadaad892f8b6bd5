"""Quantising an operand in one pass over it: the kernels behind `numerics.operand.quantize_operand`.

`x[R, C]` is read once and written as `rows[R, C]`, as `columns[C, R]`, or as both. Where the scale comes from:

    tensor         one scale: given; or delayed, from the row (`delayed.py`); or from an amax pass
    channel        one per row, of rows that a program holds whole; else per row or column from an amax pass, or found
                   by the pass over the other layout (columns, on the way over whole rows)
    128×128        of a block, over whose tiles a program walks twice
    1×128          of a tile's own rows (128 elements along the contracted dimension), or columns; each in its own pass
    1×32 (mx)      the same with 32, a power of two

A group of matrices that lie side by side (q, k and v, say) is written into slices of one buffer, by one launch each.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import delayed
from octavo.kernels.launch import Plan, Plans, kind, may_overlap, seed_of
from octavo.kernels.quantize_block import block_kernel
from octavo.kernels.quantize_columns import columns_kernel
from octavo.kernels.quantize_rows import WIDEST, arrange, rows_kernel
from octavo.kernels.quantize_scaled import amax_kernel, scaled_kernel
from octavo.kernels.quantize_tensor import tensor_kernel
from octavo.kernels.quantize_tiles import (
    AMAX_TILE,
    CHANNEL_AMAX_TILE,
    SMALL_TILES,
    WHOLE_COLUMNS_TILES,
    WORDS,
    Tile,
    tile_of,
)
from octavo.kernels.tiles import (
    BLOCK_1X128,
    BLOCK_128X128,
    CHANNEL,
    MX,
    NONE,
    TENSOR,
    multiprocessors,
    programs_in_strips,
)
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantize import BLOCK, MX_BLOCK, Quantized

_BAND = 4  # rows of tiles that are written as columns at the same time
_SMALL_MATRIX = 2**26  # elements: up to here twice as many programs share the columns of blocks
_SMALL_ENOUGH_TO_OVERLAP = 2**27  # elements: passes over more get in each other's way
_LARGEST_BATCH = 65_535  # the second dimension of a grid
_WIDE = (torch.bfloat16, torch.float16, torch.float32)

_PLANS = Plans()


def can_quantize(xs: Sequence[Tensor], recipe: OperandRecipe) -> bool:
    """Whether the kernel covers this: formats that NVIDIA has, no percentile, groups that no block straddles."""
    if len(xs) > 1 and not all(x.dim() == 2 and x.shape[0] % BLOCK == 0 for x in xs):
        return False
    if xs[0].dim() > 2 and xs[0].shape[:-2].numel() > _LARGEST_BATCH:
        return False
    return _has_kernel(recipe) and all(x.dtype in _WIDE and x.dim() >= 2 and x.numel() for x in xs)


def clips(recipe: OperandRecipe) -> bool:
    """Whether scales found in the tensor itself let anything saturate."""
    return recipe.margin < 1 or (recipe.granularity == "mx" and recipe.mx_rule == "floor")


@cache
def _has_kernel(recipe: OperandRecipe) -> bool:
    return recipe.format in (E4M3, E5M2) and recipe.percentile is None


def quantize_operand(
    x: Tensor, row: Tensor, recipe: OperandRecipe, *, record: bool = True, layout: str = "rows"
) -> list[Quantized]:
    """The kernel of `numerics.operand.quantize_operand`."""
    return quantize_group([x], row, recipe, record=record, layout=layout)


def quantize_group(
    xs: Sequence[Tensor],
    row: Tensor,
    recipe: OperandRecipe,
    *,
    record: bool = True,
    layout: str = "rows",
    scale: Tensor | None = None,
) -> list[Quantized]:
    """Quantise `torch.cat(xs)`, without making it; see `numerics.operand.quantize_group`."""
    batch = xs[0].shape[:-2]
    xs = [x if x.is_contiguous() else _in_even_steps(x) for x in xs]
    given = scale is not None
    if scale is not None:
        row, record = scale, False
    elif recipe.delayed:
        row, record = delayed.writable(row, record), True
    key = (recipe, record, layout, given, batch, kind(row, *xs))
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS[key] = _Planner(xs, recipe, batch, given).plan(record, layout)
    made = plan.run(*xs, row)
    return [Quantized(made[i], made[i + 1]) for i in range(0, len(made), 2)]


def can_fold(x: Tensor, recipe: OperandRecipe) -> bool:
    """Whether `quantize_folded` covers this: whole rows, each with its scale."""
    return recipe.granularity == "channel" and x.dim() == 2 and x.shape[1] <= WIDEST and can_quantize([x], recipe)


def quantize_folded(x: Tensor, factor: Tensor, row: Tensor, recipe: OperandRecipe) -> Quantized:
    """`x[R, C] · factor[C]`, rounded to the dtype of x, and quantised as rows."""
    x, factor = x if x.stride(-1) == 1 else x.contiguous(), factor.contiguous()
    key = ("folded", recipe, kind(row, x, factor))
    plan = _PLANS.get(key)
    if plan is None:
        planner = _Planner([x], recipe, torch.Size())
        plan = Plan(given=3)
        output = plan.make(x.shape, recipe.format.dtype), plan.make((x.shape[0], 1), torch.float32)
        planner.write_rows(plan, output, record=True, factor=2)
        plan.results = output
        _PLANS[key] = plan
    return Quantized(*plan.run(x, row, factor))


def _in_even_steps(x: Tensor) -> Tensor:
    """A view with elements next to each other and even steps between matrices; a copy if there is none."""
    if x.dim() > 3:
        x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()


class _Planner:
    """Works out the launches for a group of matrices `[b, rᵢ, c]`: r rows together."""

    def __init__(self, xs: Sequence[Tensor], recipe: OperandRecipe, batch: torch.Size, given: bool = False):
        self.xs, self.recipe, self.batch = xs, recipe, batch
        self.scalings = (delayed.GIVEN,) if given else delayed.passes(recipe.delayed)  # of one for the whole tensor
        self.b, self.c = batch.numel(), xs[0].shape[-1]
        self.heights = [x.shape[-2] for x in xs]
        self.r = sum(self.heights)
        self.row = len(xs)

    def plan(self, record: bool, layout: str) -> Plan:
        mode_r, mode_c = _modes(self.recipe, layout)
        plan = Plan(given=len(self.xs) + 1, overlaps=self._overlaps(mode_r, mode_c))
        r, c = self.r, self.c
        rows = self._output(plan, mode_r, r, c)
        columns = self._output(plan, mode_c, c, r)
        if not mode_c and mode_r != BLOCK_128X128.value and len(self.xs) == 1 and self.xs[0].is_contiguous():
            # Without a transposed copy, a batch is just more rows.
            self.heights, self.b = [self.b * r], 1
            self.r = self.heights[0]
        if mode_r == CHANNEL.value and self.b == 1 and c <= WIDEST and (not mode_c or self._may_find_maxima(mode_c)):
            column_amax = self.write_rows(plan, rows, record=record, column_amax=mode_c > 0)
            plan.results = rows
            if mode_c:
                measured = (self.row, self.row, column_amax)
                self._write(plan, NONE.value, mode_c, (columns, columns), measured, record=False, column_amax=False)
                plan.results = (*rows, *columns)
            return plan
        passes = _passes(mode_r, mode_c)
        on_the_way = len(passes) == 2 and mode_r != BLOCK_128X128.value
        measured = self._measure(plan, mode_r, mode_c, on_the_way)
        for i, (pass_r, pass_c) in enumerate(passes):
            outputs = (rows if pass_r else columns, columns if pass_c else rows)
            column_amax = on_the_way and i == 0 and mode_c == CHANNEL.value
            self._write(plan, pass_r, pass_c, outputs, measured, record=record and i == 0, column_amax=column_amax)
        plan.results = (*(rows if mode_r else ()), *(columns if mode_c else ()))
        return plan

    def write_rows(
        self, plan: Plan, output: tuple[int, int], *, record: bool, factor: int | None = None, column_amax: bool = False
    ) -> int:
        """Whole rows at once, each with its scale; times a factor per column if there is one. The amax of columns."""
        recipe, c, fold = self.recipe, self.c, factor is not None
        processors = multiprocessors(self.xs[0].device)
        arranged = [arrange(height, c, processors, fold=fold, maxima=column_amax) for height in self.heights]
        programs = sum(grid[0] for grid, _ in arranged)
        maxima = amax = self.row
        if column_amax:
            maxima, amax = plan.make((programs, c), self.xs[0].dtype), plan.make((c,), torch.float32)
        first = 0
        for (i, r0, end), (grid, constants) in zip(self._parts(), arranged, strict=True):
            constants |= {"FOLD": fold, "MAXIMA": column_amax, "RECORD": record, "FIRST": r0 == 0}
            constants |= {"CLIPS": clips(recipe)} | _rounding(recipe)
            numbers = (r0, end, c, self._strides(self.xs[i])[1], first, 1.0 / (self.r * c), seed_of(recipe))
            tensors = (i, self.row, self.row if factor is None else factor, *output, maxima, amax)
            plan.launch(rows_kernel, grid, tensors, numbers, constants)
            first += grid[0]
        if not column_amax:
            return self.row
        grid, constants = self._arrange(programs, 1, CHANNEL_AMAX_TILE, strips=True)
        constants |= {"ROWS": False, "COLUMNS": True, "WHOLE": False}
        measured = (maxima, self.row, self.row, amax)
        plan.launch(amax_kernel, (*grid, 1), measured, (0, programs, programs, c, 0, c), constants)
        return amax

    def _overlaps(self, mode_r: int, mode_c: int) -> bool:
        """Whether a launch should begin before the last one ends. (Per tensor, programs that begin so pile up.)"""
        small = mode_r > 0 and self.b * self.r * self.c <= _SMALL_ENOUGH_TO_OVERLAP
        passes = mode_c == CHANNEL.value or (small and mode_c in (BLOCK_1X128.value, MX.value))
        return passes and may_overlap(self.xs[0].device)

    def _may_find_maxima(self, mode_c: int) -> bool:
        """Whether whole rows leave registers for the maxima of columns."""
        return mode_c == CHANNEL.value and self.c * self.xs[0].element_size() <= 2 * WIDEST

    def _strides(self, x: Tensor) -> tuple[int, int]:
        """From one matrix to the next, and from one row to the next."""
        if x.is_contiguous():  # whatever it says of dimensions of size 1
            return x.shape[-2] * self.c, self.c
        return (x.stride(0) if x.dim() > 2 else 0), x.stride(-2)

    def _output(self, plan: Plan, mode: int, r: int, c: int) -> tuple[int, int]:
        """A matrix and its scales."""
        if mode == NONE.value:
            return 0, 0
        shape: tuple[int, ...] = ()
        if mode == CHANNEL.value:
            shape = (*self.batch, r, 1)
        elif mode != TENSOR.value:
            down = BLOCK if mode == BLOCK_128X128.value else 1
            across = MX_BLOCK if mode == MX.value else BLOCK
            shape = (*self.batch, -(-r // down), -(-c // across))
        dtype = torch.uint8 if mode == MX.value else torch.float32
        return plan.make((*self.batch, r, c), self.recipe.format.dtype), plan.make(shape, dtype)

    def _measure(self, plan: Plan, mode_r: int, mode_c: int, on_the_way: bool) -> tuple[int, int, int]:
        """What must be known before quantising: the amax of everything, of each row, of each column, where needed.

        `on_the_way`: the columns have a pass of their own, before which the other pass will have found their amax.
        """
        b, r, c = self.b, self.r, self.c
        whole = TENSOR.value in (mode_r, mode_c) and self.scalings == (delayed.CURRENT,)
        by_row, by_column = mode_r == CHANNEL.value, mode_c == CHANNEL.value
        amax = row_amax = column_amax = self.row
        if whole:
            amax = plan.make((1,), torch.float32, zeros=True)
        if by_row:
            row_amax = plan.make((b * r,), torch.float32, zeros=True)
        if by_column:
            column_amax = plan.make((b * c,), torch.float32, zeros=True)
            by_column = not on_the_way
        if by_row or by_column or whole:
            how = {"ROWS": by_row, "COLUMNS": by_column, "WHOLE": whole}
            for i, r0, end in self._parts():
                tile = CHANNEL_AMAX_TILE if by_row or by_column else AMAX_TILE
                grid, constants = self._arrange(self.heights[i], 1, tile, strips=by_column)
                sizes = (r0, end, r, c, *self._strides(self.xs[i]))
                plan.launch(amax_kernel, (*grid, b), (i, amax, row_amax, column_amax), sizes, constants | how)
        return amax, row_amax, column_amax

    def _write(
        self,
        plan: Plan,
        mode_r: int,
        mode_c: int,
        outputs: tuple[tuple[int, int], tuple[int, int]],
        measured: tuple[int, int, int],
        *,
        record: bool,
        column_amax: bool,
    ) -> None:
        """One pass over every matrix of the group."""
        recipe, b, r, c = self.recipe, self.b, self.r, self.c
        whole, blocks = TENSOR.value in (mode_r, mode_c), BLOCK_128X128.value in (mode_r, mode_c)
        tile = tile_of(mode_r, mode_c, column_amax)
        if record and not mode_r and not whole and not blocks:
            tile = (*tile[:5], None)  # counting in a transposed tile takes registers; hardly anybody asks for it
        amax, *amaxes = measured
        (first, first_scale), (second, second_scale) = outputs
        scalings = self.scalings if whole else (delayed.CURRENT,)
        for scaling, (i, r0, end) in product(scalings, self._parts()):
            alone = not mode_r and not record
            if alone and self._write_whole_columns(plan, i, r0, end, mode_c, measured[2], outputs[1]):
                continue
            grid, constants = self._arrange(self.heights[i], b, tile, strips=column_amax, whole_blocks=blocks)
            numbers = (r0, end, r, c, b, *self._strides(self.xs[i]), 1.0 / (b * r * c), seed_of(recipe))
            constants |= {"RECORD": record, "FIRST": r0 == 0} | _rounding(recipe)
            kernel: Any
            tensors: tuple[int, ...]
            if whole:
                kernel, tensors = tensor_kernel, (amax, first, second, first_scale, second_scale)
                constants |= {"ROWS": mode_r > 0, "COLUMNS": mode_c > 0, "SCALING": scaling.value}
                constants["BAND"] = _BAND if mode_c else 1
            elif blocks:
                kernel, tensors = block_kernel, (first, first_scale, second, second_scale)
                constants |= {"ROWS": mode_r > 0, "COLUMNS": mode_c > 0, "CLIPS": clips(recipe)}
                del constants["STAGES"]
            else:
                kernel, tensors = scaled_kernel, (*amaxes, first, first_scale, second, second_scale)
                constants |= {"MODE_R": mode_r, "MODE_C": mode_c, "COLUMN_AMAX": column_amax}
                constants |= {"CLIPS": clips(recipe), "MX_UP": recipe.mx_rule == "up"}
            plan.launch(kernel, grid, (i, self.row, *tensors), numbers, constants)

    def _write_whole_columns(
        self, plan: Plan, i: int, r0: int, end: int, mode: int, amax: int, output: tuple[int, int]
    ) -> bool:
        """One pass over one matrix, if it consists of whole tiles and words."""
        tile, x = WHOLE_COLUMNS_TILES.get(mode), self.xs[i]
        steps = (*self._strides(x), x.data_ptr() // x.element_size())
        if tile is None or any(step * x.element_size() * 8 % WORDS[mode] for step in steps):
            return False
        if mode != CHANNEL.value and self.b * self.heights[i] * self.c <= _SMALL_MATRIX:
            tile = (*tile[:4], 2 * tile[4], tile[5])
        grid, constants = self._arrange(self.heights[i], self.b, tile)
        if not constants.pop("EVEN"):
            return False
        del constants["STAGES"]
        constants |= {"MODE": mode, "WORD": WORDS[mode], "MX_UP": self.recipe.mx_rule == "up"} | _rounding(self.recipe)
        numbers = (r0, end, self.r, self.c, self.b, *self._strides(x), seed_of(self.recipe))
        plan.launch(columns_kernel, grid, (i, amax, *output), numbers, constants)
        return True

    def _parts(self) -> list[tuple[int, int, int]]:
        """Each matrix of the group: its number, and its first and last rows among all."""
        ends = list(accumulate(self.heights))
        return [(i, end - height, end) for i, (end, height) in enumerate(zip(ends, self.heights, strict=True))]

    def _arrange(
        self, r: int, b: int, tile: Tile, *, strips: bool = False, whole_blocks: bool = False
    ) -> tuple[tuple[int], dict[str, Any]]:
        """The grid for a matrix of r rows, and the constants of the tile. `strips`: a program keeps to its columns."""
        tile_r, tile_c, warps, stages, programs, registers = tile
        c = self.c
        down, across = (BLOCK, BLOCK) if whole_blocks else (tile_r, tile_c)
        count = b * -(-r // down) * -(-c // across)
        programs *= multiprocessors(self.xs[0].device)
        constants = {
            "EVEN": r % down == 0 and c % across == 0,
            "TILE_R": tile_r,
            "TILE_C": tile_c,
            "STAGES": stages,
            "num_warps": warps,
        }
        if registers is not None:
            constants["maxnreg"] = registers
        return (
            programs_in_strips(b * -(-c // across), count, programs) if strips else min(count, programs),
        ), constants


def _rounding(recipe: OperandRecipe) -> dict[str, Any]:
    return {
        "MAXIMUM": recipe.format.max,
        "MARGIN": recipe.margin,
        "STOCHASTIC": recipe.rounding == "stochastic",
    }


def _passes(mode_r: int, mode_c: int) -> list[tuple[int, int]]:
    """Both layouts at once, or one after the other where each wants tiles of another shape for its own blocks."""
    in_one_tile = {mode_r, mode_c} <= SMALL_TILES or mode_r == mode_c == BLOCK_128X128.value
    if mode_r and mode_c and not in_one_tile:
        return [(mode_r, NONE.value), (NONE.value, mode_c)]
    return [(mode_r, mode_c)]


@cache
def _modes(recipe: OperandRecipe, layout: str) -> tuple[int, int]:
    def mode(granularity: str) -> int:
        if granularity == "block":
            return (BLOCK_128X128 if recipe.block[0] == BLOCK else BLOCK_1X128).value
        return {"tensor": TENSOR, "channel": CHANNEL, "mx": MX}[granularity].value

    rows = mode(recipe.granularity) if layout != "columns" else NONE.value
    columns = mode(recipe.columns or recipe.granularity) if layout != "rows" else NONE.value
    return rows, columns
