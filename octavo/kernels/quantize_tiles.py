"""Tiles of the quantising kernels."""

from octavo.kernels.tiles import BLOCK_1X128, BLOCK_128X128, CHANNEL, MX, NONE, TENSOR

Tile = tuple[int, int, int, int, int, int | None]

# Rows and columns of a tile, warps, loads in flight, programs per multiprocessor, and registers per thread: the best of
# some dozen each on an H200, at 8,192 × 4,096 and 28,672 × 4,096.
_TENSOR_TILE: Tile = (64, 64, 8, 3, 4, 64)
_TENSOR_TILE_BOTH: Tile = (64, 64, 4, 4, 2, 128)
_CHANNEL_TILE: Tile = (64, 64, 4, 1, 8, None)
_CHANNEL_TILE_BOTH: Tile = (64, 64, 8, 1, 4, None)
_BLOCK_TILE: Tile = (64, 128, 8, 1, 2, None)  # of a block of 128 × 128
_BLOCK_TILE_T: Tile = (64, 64, 8, 1, 3, 80)
_BLOCK_TILE_BOTH: Tile = (128, 64, 8, 1, 2, None)
_ROWS_TILE: Tile = (32, 128, 4, 3, 4, 128)  # as wide as a block
_ROWS_TILE_AMAX: Tile = (16, 128, 8, 4, 4, 64)  # and looking for the amax of columns
_COLUMNS_TILE: Tile = (128, 64, 8, 1, 4, 64)  # as high as a block
_MX_COLUMNS_TILE: Tile = (64, 64, 8, 1, 4, 64)
AMAX_TILE: Tile = (64, 64, 4, 3, 8, None)
CHANNEL_AMAX_TILE: Tile = (16, 256, 8, 3, 4, 64)  # a warp holds a row
# Tiles for columns without statistics, in whole tiles; and the bits of the words in which a thread loads them.
WHOLE_COLUMNS_TILES: dict[int, Tile] = {
    CHANNEL.value: (128, 64, 4, 1, 32, 96),
    BLOCK_1X128.value: (128, 64, 4, 1, 5, 96),
    MX.value: (128, 64, 8, 1, 4, 64),
}
WORDS = {CHANNEL.value: 64, BLOCK_1X128.value: 64, MX.value: 32}
SMALL_TILES = {NONE.value, TENSOR.value, CHANNEL.value}  # scales known before the tile


def tile_of(mode_r: int, mode_c: int, column_amax: bool) -> Tile:
    """The shape of tiles for one pass."""
    both = bool(mode_r and mode_c)
    if TENSOR.value in (mode_r, mode_c):
        return _TENSOR_TILE_BOTH if both else _TENSOR_TILE
    if BLOCK_128X128.value in (mode_r, mode_c):
        return _BLOCK_TILE_BOTH if both else _BLOCK_TILE if mode_r else _BLOCK_TILE_T
    if {mode_r, mode_c} <= SMALL_TILES:
        return _CHANNEL_TILE_BOTH if both else _CHANNEL_TILE
    if mode_r:
        return _ROWS_TILE_AMAX if column_amax else _ROWS_TILE
    return _MX_COLUMNS_TILE if mode_c == MX.value else _COLUMNS_TILE
