"""How kernels scale each layout of an operand (its mode), in which passes, and by which tiles.

A granularity is known here to the kernels: its mode in `tiles.py`, and what a launch makes for its scales.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from octavo.kernels.launch import Launches
from octavo.kernels.tiles import BLOCK_1X128, BLOCK_128X128, CHANNEL, MX, NONE, TENSOR
from octavo.kernels.tuning import QuantizeTiles, Tile
from octavo.numerics.config import OperandRecipe
from octavo.numerics.quantize import BLOCK, packed_scale_dtype, scale_shape

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
# Names in `tuning.py` of the modes that have kernels for columns alone.
NAMES = {mode.value: _OF_MODE[mode.value][0] for mode in (CHANNEL, BLOCK_1X128, MX)}


@cache
def modes_of(recipe: OperandRecipe, layout: str) -> tuple[int, int]:
    """Modes of the rows and of the columns."""

    def mode(granularity: str) -> int:
        return _MODES[granularity, recipe.block if granularity == "block" else None].value

    rows = mode(recipe.granularity) if layout != "columns" else NONE.value
    columns = mode(recipe.columns or recipe.granularity) if layout != "rows" else NONE.value
    return rows, columns


def make_scale(launches: Launches, mode: int, shape: Sequence[int]) -> int:
    """Room for the scales of a matrix, or a batch of them, of this shape."""
    granularity, block = _OF_MODE[mode]
    return launches.make(scale_shape(shape, granularity, block or (1, BLOCK)), packed_scale_dtype(granularity))


def passes(mode_r: int, mode_c: int) -> list[tuple[int, int]]:
    """Both layouts at once, or one after the other where each wants tiles of another shape for its own blocks."""
    in_one_tile = {mode_r, mode_c} <= _KNOWN_BEFORE or mode_r == mode_c == BLOCK_128X128.value
    if mode_r and mode_c and not in_one_tile:
        return [(mode_r, NONE.value), (NONE.value, mode_c)]
    return [(mode_r, mode_c)]


def tile_of(tuning: QuantizeTiles, mode_r: int, mode_c: int, column_amax: bool) -> Tile:
    """The shape of tiles for one pass."""
    both = bool(mode_r and mode_c)
    if TENSOR.value in (mode_r, mode_c):
        return tuning.tensor_both if both else tuning.tensor
    if BLOCK_128X128.value in (mode_r, mode_c):
        return tuning.block128_both if both else tuning.block128 if mode_r else tuning.block128_columns
    if {mode_r, mode_c} <= _KNOWN_BEFORE:
        return tuning.channel_both if both else tuning.channel
    if mode_r:
        return tuning.rows_and_amax if column_amax else tuning.rows
    return tuning.mx_columns if mode_c == MX.value else tuning.columns
