"""How kernels scale each layout of an operand (its mode), in which passes, and by which tiles.

A granularity is known here to the kernels: its mode in `tiles.py`, and what a launch makes for its scales.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from octavo.kernels.launch import Launches
from octavo.kernels.tiles import BLOCK_1X128, BLOCK_128X128, CHANNEL, MX, NONE, TENSOR
from octavo.kernels.tuning import QuantizeTiles, Tile, check_tile
from octavo.numerics.config import OperandRecipe
from octavo.numerics.quantize import BLOCK, granularity_of, packed_scale_dtype, scale_shape

# The mode of a recipe, by its granularity and block.
_MODES = {
    ("tensor", None): TENSOR,
    ("channel", None): CHANNEL,
    ("block", (1, BLOCK)): BLOCK_1X128,
    ("block", (BLOCK, BLOCK)): BLOCK_128X128,
    ("mx", None): MX,
}
_OF_MODE: dict[int, tuple[str, Any]] = {mode.value: of for of, mode in _MODES.items()}
_KNOWN_BEFORE = {NONE.value, TENSOR.value, CHANNEL.value}  # scales that do not come from the tile itself
_GROUPS = {mode: granularity_of(name, block or (1, BLOCK)) for mode, (name, block) in _OF_MODE.items()}
# Modes of square blocks, and how many rows and columns these have.
SQUARES = {mode: group.rows for mode, group in _GROUPS.items() if group.rows is not None and group.rows > 1}
# Names in `tuning.py` of the modes whose scales lie along a row: these may have kernels for columns alone.
NAMES = {mode: _OF_MODE[mode][0] for mode, group in _GROUPS.items() if group.rows == 1}


def has_modes(recipe: OperandRecipe) -> bool:
    """Whether kernels know the granularities of the rows and of the columns."""
    return all(_key(recipe, name) in _MODES for name in (recipe.granularity, recipe.columns or recipe.granularity))


@cache
def modes_of(recipe: OperandRecipe, layout: str) -> tuple[int, int]:
    """Modes of the rows and of the columns."""
    rows, columns = recipe.granularity, recipe.columns or recipe.granularity
    return (
        _MODES[_key(recipe, rows)].value if layout != "columns" else NONE.value,
        _MODES[_key(recipe, columns)].value if layout != "rows" else NONE.value,
    )


def _key(recipe: OperandRecipe, granularity: str) -> tuple[str, Any]:
    return granularity, recipe.block if granularity == "block" else None


def make_scale(launches: Launches, mode: int, shape: Sequence[int]) -> int:
    """Room for the scales of a matrix, or a batch of them, of this shape."""
    granularity, block = _OF_MODE[mode]
    return launches.make(scale_shape(shape, granularity, block or (1, BLOCK)), packed_scale_dtype(granularity))


def passes(mode_r: int, mode_c: int) -> list[tuple[int, int]]:
    """Both layouts at once, or one after the other where each wants tiles of another shape for its own blocks."""
    in_one_tile = {mode_r, mode_c} <= _KNOWN_BEFORE or (mode_r == mode_c and mode_r in SQUARES)
    if mode_r and mode_c and not in_one_tile:
        return [(mode_r, NONE.value), (NONE.value, mode_c)]
    return [(mode_r, mode_c)]


def tile_of(tuning: QuantizeTiles, mode_r: int, mode_c: int, column_amax: bool) -> Tile:
    """The shape of tiles for one pass."""
    field = _tile_field(mode_r, mode_c, column_amax)
    tile: Tile = getattr(tuning, field)
    check_blocks(f"quantize.{field}", tile, mode_r, mode_c)
    if TENSOR.value not in (mode_r, mode_c):
        # A scale is found by the number of its tile, counted from the first matrix of a group.
        needed = f"matrices of a group begin at multiples of {BLOCK} rows; take a power of two up to {BLOCK}"
        check_tile(f"quantize.{field}", tile, BLOCK % tile.rows == 0, needed)
    return tile


def _tile_field(mode_r: int, mode_c: int, column_amax: bool) -> str:
    """The name in `QuantizeTiles` of the tile for one pass."""
    both = bool(mode_r and mode_c)
    if TENSOR.value in (mode_r, mode_c):
        return "tensor_both" if both else "tensor"
    if BLOCK_128X128.value in (mode_r, mode_c):
        return "block128_both" if both else "block128" if mode_r else "block128_columns"
    if {mode_r, mode_c} <= _KNOWN_BEFORE:
        return "channel_both" if both else "channel"
    if mode_r:
        return "rows_and_amax" if column_amax else "rows"
    return "mx_columns" if mode_c == MX.value else "columns"


def check_blocks(field: str, tile: Tile, mode_r: int, mode_c: int, word: int | None = None) -> None:
    """Raise if blocks of these modes do not fit the tile that a field of `tuning.py` has.

    Kernels find one scale in each row of a tile, or in each column where they write columns: it is as long as a block.
    With mx they find one for each group: it has whole groups. A square block consists of whole tiles.
    `word`: columns in whole tiles (`columns.py`), where the threads of a column hold as many rows as a word has bits.
    If a block has as many, a tile has whole blocks.
    """
    for mode, length, side in ((mode_r, tile.columns, "columns"), (mode_c, tile.rows, "rows")):
        if mode in _KNOWN_BEFORE:
            continue
        group = _GROUPS[mode].columns
        assert group is not None
        if mode in SQUARES:
            fits = group % tile.rows == 0 and group % tile.columns == 0
            needed = f"a block of {group}×{group} consists of whole tiles; both must divide {group}"
        elif word == group or (word is None and mode == MX.value):
            fits = length % group == 0
            needed = f"a tile has whole blocks of 1×{group}; its {side} must be a multiple of {group}"
        else:
            fits = length == group
            needed = f"a tile is as long as a block of 1×{group}; it needs {group} {side}"
        check_tile(field, tile, fits, needed)
