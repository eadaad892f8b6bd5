"""Quantising an operand in one pass over it: the kernels behind `numerics.operand.quantize_operand`.

`x[R, C]` is read once and written as `rows[R, C]`, as `columns[C, R]`, or as both. Where the scale comes from:

    tensor         one scale: given; or delayed, from the state (`delayed.py`); or from an amax pass
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
from octavo.kernels.launch import LaunchCache, Launches, kind, seed_of
from octavo.kernels.quantize.blocks import amax_kernel, scaled_kernel
from octavo.kernels.quantize.columns import columns_kernel
from octavo.kernels.quantize.modes import NAMES, SQUARES, check_blocks, has_modes, make_scale, modes_of, passes, tile_of
from octavo.kernels.quantize.rows import WIDEST, arrange, rows_kernel
from octavo.kernels.quantize.square_blocks import block_kernel
from octavo.kernels.quantize.tensor import tensor_kernel
from octavo.kernels.tiles import (
    BLOCK_1X128,
    CHANNEL,
    MX,
    NONE,
    TENSOR,
    multiprocessors,
    programs_in_strips,
)
from octavo.kernels.tuning import Tile, may_overlap, tuning_for
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantize import BLOCK, GRANULARITIES, Quantized

_LARGEST_BATCH = 65_535  # the second dimension of a grid
_WIDE = (torch.bfloat16, torch.float16, torch.float32)

_LAUNCHES = LaunchCache()


def can_quantize(xs: Sequence[Tensor], recipe: OperandRecipe) -> bool:
    """Whether the kernel covers this: a granularity with a mode, formats that NVIDIA has, no percentile.

    A group has several matrices only if no block straddles two of them.
    """
    if len(xs) > 1 and not all(x.dim() == 2 and x.shape[0] % BLOCK == 0 for x in xs):
        return False
    if xs[0].dim() > 2 and xs[0].shape[:-2].numel() > _LARGEST_BATCH:
        return False
    return _has_kernel(recipe) and all(x.dtype in _WIDE and x.dim() >= 2 and x.numel() for x in xs)


def clips(recipe: OperandRecipe) -> bool:
    """Whether scales found in the tensor itself let anything saturate."""
    return recipe.margin < 1 or (GRANULARITIES[recipe.granularity].is_e8m0 and recipe.mx_rule == "floor")


@cache
def _has_kernel(recipe: OperandRecipe) -> bool:
    return has_modes(recipe) and recipe.format in (E4M3, E5M2) and recipe.percentile is None


def quantize_operand(
    x: Tensor, state: Tensor, recipe: OperandRecipe, *, record: bool = True, layout: str = "rows"
) -> list[Quantized]:
    """The kernel of `numerics.operand.quantize_operand`."""
    return quantize_group([x], state, recipe, record=record, layout=layout)


def quantize_group(
    xs: Sequence[Tensor],
    state: Tensor,
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
        state, record = scale, False
    elif recipe.delayed:
        state, record = delayed.writable(state, record), True
    key = (recipe, record, layout, given, batch, kind(state, *xs))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _LaunchBuilder(xs, recipe, batch, given).build(record, layout))
    made = launches.run(*xs, state)
    return [Quantized(made[i], made[i + 1]) for i in range(0, len(made), 2)]


def can_measure(x: Tensor) -> bool:
    """Whether `matrix_amax` covers this."""
    return x.dim() == 2 and x.dtype in _WIDE and x.numel() > 0


def matrix_amax(x: Tensor, *, by_column: bool) -> Tensor:
    """The largest finite magnitude of `x[R, C]`, or of each column: the first pass of quantising, alone."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    key = ("amax", by_column, kind(x))
    builder = _LaunchBuilder([x], OperandRecipe(E4M3), torch.Size())
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, builder.build_amax(by_column))
    (amax,) = launches.run(x, x)  # the second stands for a state, which is not read
    return amax


def can_fold(x: Tensor, recipe: OperandRecipe) -> bool:
    """Whether `quantize_folded` covers this: whole rows, each with its scale."""
    return recipe.granularity == "channel" and x.dim() == 2 and x.shape[1] <= WIDEST and can_quantize([x], recipe)


def quantize_folded(x: Tensor, factor: Tensor, state: Tensor, recipe: OperandRecipe) -> Quantized:
    """`x[R, C] · factor[C]`, rounded to the dtype of x, and quantised as rows."""
    x, factor = x if x.stride(-1) == 1 else x.contiguous(), factor.contiguous()
    key = ("folded", recipe, kind(state, x, factor))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _LaunchBuilder([x], recipe, torch.Size()).build_folded())
    return Quantized(*launches.run(x, state, factor))


def _in_even_steps(x: Tensor) -> Tensor:
    """A view with elements next to each other and even steps between matrices; a copy if there is none."""
    if x.dim() > 3:
        x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()


class _LaunchBuilder:
    """Works out the launches for a group of matrices `[b, rᵢ, c]`: r rows together."""

    def __init__(self, xs: Sequence[Tensor], recipe: OperandRecipe, batch: torch.Size, given: bool = False):
        self.xs, self.recipe, self.batch = xs, recipe, batch
        self.scalings = (delayed.GIVEN,) if given else delayed.passes(recipe.delayed)  # of one for the whole tensor
        self.b, self.c = batch.numel(), xs[0].shape[-1]
        self.heights = [x.shape[-2] for x in xs]
        self.r = sum(self.heights)
        self.state = len(xs)
        self.tuning = tuning_for(xs[0].device).quantize

    def build(self, record: bool, layout: str) -> Launches:
        mode_r, mode_c = modes_of(self.recipe, layout)
        launches = Launches(given=len(self.xs) + 1, overlaps=self._overlaps(mode_r, mode_c))
        r, c = self.r, self.c
        rows = self._output(launches, mode_r, r, c)
        columns = self._output(launches, mode_c, c, r)
        if not mode_c and mode_r not in SQUARES and len(self.xs) == 1 and self.xs[0].is_contiguous():
            # Without a transposed copy, a batch is just more rows.
            self.heights, self.b = [self.b * r], 1
            self.r = self.heights[0]
        if mode_r == CHANNEL.value and self.b == 1 and c <= WIDEST and (not mode_c or self._may_find_maxima(mode_c)):
            column_amax = self._write_rows(launches, rows, record=record, column_amax=mode_c > 0)
            launches.results = rows
            if mode_c:
                measured = (self.state, self.state, column_amax)
                self._write(launches, NONE.value, mode_c, (columns, columns), measured, record=False, column_amax=False)
                launches.results = (*rows, *columns)
            return launches
        pass_modes = passes(mode_r, mode_c)
        on_the_way = len(pass_modes) == 2 and mode_r not in SQUARES
        measured = self._measure(launches, mode_r, mode_c, on_the_way)
        for i, (pass_r, pass_c) in enumerate(pass_modes):
            outputs = (rows if pass_r else columns, columns if pass_c else rows)
            column_amax = on_the_way and i == 0 and mode_c == CHANNEL.value
            self._write(launches, pass_r, pass_c, outputs, measured, record=record and i == 0, column_amax=column_amax)
        launches.results = (*(rows if mode_r else ()), *(columns if mode_c else ()))
        return launches

    def build_amax(self, by_column: bool) -> Launches:
        """The amax of everything, or of each column, and nothing else."""
        launches = Launches(given=2)
        modes = (NONE.value, CHANNEL.value) if by_column else (TENSOR.value, NONE.value)
        amax, _, column_amax = self._measure(launches, *modes, False)
        launches.results = (column_amax if by_column else amax,)
        return launches

    def build_folded(self) -> Launches:
        """Rows, multiplied by a factor per column, which is given after the state."""
        launches = Launches(given=3)
        output = launches.make((self.r, self.c), self.recipe.format.dtype), launches.make((self.r, 1), torch.float32)
        self._write_rows(launches, output, record=True, factor=2)
        launches.results = output
        return launches

    def _write_rows(
        self,
        launches: Launches,
        output: tuple[int, int],
        *,
        record: bool,
        factor: int | None = None,
        column_amax: bool = False,
    ) -> int:
        """Whole rows at once, each with its scale; times a factor per column if there is one. The amax of columns."""
        recipe, c, fold = self.recipe, self.c, factor is not None
        processors = multiprocessors(self.xs[0].device)
        tiles = self.tuning.whole_rows["folded" if fold else "maxima" if column_amax else "plain"]
        arranged = [arrange(height, c, processors, tiles) for height in self.heights]
        programs = sum(grid[0] for grid, _ in arranged)
        maxima = amax = self.state
        if column_amax:
            maxima, amax = launches.make((programs, c), self.xs[0].dtype), launches.make((c,), torch.float32)
        first_program = 0
        for (i, r0, end), (grid, constants) in zip(self._row_ranges(), arranged, strict=True):
            constants |= {"FOLD": fold, "MAXIMA": column_amax, "RECORD": record, "FIRST": r0 == 0}
            constants |= {"CLIPS": clips(recipe)} | _rounding(recipe)
            numbers = (r0, end, c, self._strides(self.xs[i])[1], first_program, 1.0 / (self.r * c), seed_of(recipe))
            tensors = (i, self.state, self.state if factor is None else factor, *output, maxima, amax)
            launches.launch(rows_kernel, grid, tensors, numbers, constants)
            first_program += grid[0]
        if not column_amax:
            return self.state
        grid, constants = self._arrange(programs, 1, self.tuning.channel_amax, strips=True)
        constants |= {"ROWS": False, "COLUMNS": True, "WHOLE": False}
        measured = (maxima, self.state, self.state, amax)
        launches.launch(amax_kernel, (*grid, 1), measured, (0, programs, programs, c, 0, c), constants)
        return amax

    def _overlaps(self, mode_r: int, mode_c: int) -> bool:
        """Whether a launch should begin before the last one ends. (Per tensor, programs that begin so pile up.)"""
        small = mode_r > 0 and self.b * self.r * self.c <= self.tuning.largest_to_overlap
        pays = mode_c == CHANNEL.value or (small and mode_c in (BLOCK_1X128.value, MX.value))
        return pays and may_overlap(self.xs[0].device)

    def _may_find_maxima(self, mode_c: int) -> bool:
        """Whether whole rows leave registers for the maxima of columns."""
        return mode_c == CHANNEL.value and self.c * self.xs[0].element_size() <= 2 * WIDEST

    def _strides(self, x: Tensor) -> tuple[int, int]:
        """Strides between matrices, and between rows."""
        if x.is_contiguous():  # whatever it says of dimensions of size 1
            return x.shape[-2] * self.c, self.c
        return (x.stride(0) if x.dim() > 2 else 0), x.stride(-2)

    def _output(self, launches: Launches, mode: int, r: int, c: int) -> tuple[int, int]:
        """A matrix and its scales."""
        if mode == NONE.value:
            return 0, 0
        shape = (*self.batch, r, c)
        return launches.make(shape, self.recipe.format.dtype), make_scale(launches, mode, shape)

    def _measure(self, launches: Launches, mode_r: int, mode_c: int, on_the_way: bool) -> tuple[int, int, int]:
        """Measure what quantising needs to know first: the amax of everything, of each row, of each column.

        `on_the_way`: the columns have a pass of their own, before which the other pass will have found their amax.
        """
        b, r, c = self.b, self.r, self.c
        whole = TENSOR.value in (mode_r, mode_c) and self.scalings == (delayed.CURRENT,)
        by_row, by_column = mode_r == CHANNEL.value, mode_c == CHANNEL.value
        amax = row_amax = column_amax = self.state
        if whole:
            amax = launches.make((1,), torch.float32, zeros=True)
        if by_row:
            row_amax = launches.make((b * r,), torch.float32, zeros=True)
        if by_column:
            column_amax = launches.make((b * c,), torch.float32, zeros=True)
            by_column = not on_the_way
        if by_row or by_column or whole:
            how = {"ROWS": by_row, "COLUMNS": by_column, "WHOLE": whole}
            for i, r0, end in self._row_ranges():
                tile = self.tuning.channel_amax if by_row or by_column else self.tuning.amax
                grid, constants = self._arrange(self.heights[i], 1, tile, strips=by_column)
                sizes = (r0, end, r, c, *self._strides(self.xs[i]))
                launches.launch(amax_kernel, (*grid, b), (i, amax, row_amax, column_amax), sizes, constants | how)
        return amax, row_amax, column_amax

    def _write(
        self,
        launches: Launches,
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
        whole, square = TENSOR.value in (mode_r, mode_c), SQUARES.get(mode_r or mode_c)
        tile = tile_of(self.tuning, mode_r, mode_c, column_amax)
        if record and not mode_r and not whole and square is None:
            tile = tile._replace(
                registers=None
            )  # counting in a transposed tile takes registers; hardly anybody asks for it
        amax, *amaxes = measured
        (rows, row_scale), (columns, column_scale) = outputs
        scalings = self.scalings if whole else (delayed.CURRENT,)
        for scaling, (i, r0, end) in product(scalings, self._row_ranges()):
            alone = not mode_r and not record
            if alone and self._write_whole_columns(launches, i, r0, end, mode_c, measured[2], outputs[1]):
                continue
            grid, constants = self._arrange(self.heights[i], b, tile, strips=column_amax, square=square)
            numbers = (r0, end, r, c, b, *self._strides(self.xs[i]), 1.0 / (b * r * c), seed_of(recipe))
            constants |= {"RECORD": record, "FIRST": r0 == 0} | _rounding(recipe)
            kernel: Any
            tensors: tuple[int, ...]
            if whole:
                kernel, tensors = tensor_kernel, (amax, rows, columns, row_scale, column_scale)
                constants |= {"ROWS": mode_r > 0, "COLUMNS": mode_c > 0, "SCALING": scaling.value}
                constants["BAND"] = self.tuning.band if mode_c else 1
            elif square is not None:
                kernel, tensors = block_kernel, (rows, row_scale, columns, column_scale)
                constants |= {"ROWS": mode_r > 0, "COLUMNS": mode_c > 0, "CLIPS": clips(recipe), "BLOCK": square}
                del constants["STAGES"]
            else:
                kernel, tensors = scaled_kernel, (*amaxes, rows, row_scale, columns, column_scale)
                constants |= {"MODE_R": mode_r, "MODE_C": mode_c, "COLUMN_AMAX": column_amax}
                constants |= {"CLIPS": clips(recipe), "MX_UP": recipe.mx_rule == "up"}
            launches.launch(kernel, grid, (i, self.state, *tensors), numbers, constants)

    def _write_whole_columns(
        self, launches: Launches, i: int, r0: int, end: int, mode: int, amax: int, output: tuple[int, int]
    ) -> bool:
        """One pass over one matrix, if it consists of whole tiles and words."""
        name, x = NAMES.get(mode), self.xs[i]
        if name is None or name not in self.tuning.whole_columns:
            return False
        tile, word = self.tuning.whole_columns[name], self.tuning.word[name]
        steps = (*self._strides(x), x.data_ptr() // x.element_size())
        if any(step * x.element_size() * 8 % word for step in steps):
            return False
        if mode != CHANNEL.value and self.b * self.heights[i] * self.c <= self.tuning.small_matrix:
            tile = tile._replace(programs=2 * tile.programs)
        grid, constants = self._arrange(self.heights[i], self.b, tile)
        if not constants.pop("EVEN"):
            return False
        check_blocks(f"quantize.whole_columns[{name!r}]", tile, NONE.value, mode, word)
        del constants["STAGES"]
        constants |= {"MODE": mode, "WORD": word, "MX_UP": self.recipe.mx_rule == "up"} | _rounding(self.recipe)
        numbers = (r0, end, self.r, self.c, self.b, *self._strides(x), seed_of(self.recipe))
        launches.launch(columns_kernel, grid, (i, amax, *output), numbers, constants)
        return True

    def _row_ranges(self) -> list[tuple[int, int, int]]:
        """Each matrix of the group: its number, and its first and last rows among all."""
        ends = list(accumulate(self.heights))
        return [(i, end - height, end) for i, (end, height) in enumerate(zip(ends, self.heights, strict=True))]

    def _arrange(
        self, r: int, b: int, tile: Tile, *, strips: bool = False, square: int | None = None
    ) -> tuple[tuple[int], dict[str, Any]]:
        """The grid for a matrix of r rows, and the constants of the tile.

        `strips`: a program keeps to its columns. `square`: it walks over blocks of so many rows and columns.
        """
        c = self.c
        down, across = (tile.rows, tile.columns) if square is None else (square, square)
        count = b * -(-r // down) * -(-c // across)
        programs = tile.programs * multiprocessors(self.xs[0].device)
        constants = {
            "EVEN": r % down == 0 and c % across == 0,
            "TILE_R": tile.rows,
            "TILE_C": tile.columns,
            "STAGES": tile.stages,
            "num_warps": tile.warps,
        }
        if tile.registers is not None:
            constants["maxnreg"] = tile.registers
        return (
            programs_in_strips(b * -(-c // across), count, programs) if strips else min(count, programs),
        ), constants


def _rounding(recipe: OperandRecipe) -> dict[str, Any]:
    return {
        "FORMAT": recipe.format,
        "MARGIN": recipe.margin,
        "STOCHASTIC": recipe.rounding == "stochastic",
    }
