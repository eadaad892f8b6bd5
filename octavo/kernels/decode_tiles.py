"""Tiles and parts of decode attention: those of `tuning.py`, made to fit the shared memory that there is."""

import torch
from torch import Tensor

from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import DecodeTile, tuning_for

FEWEST_KEYS = 16  # of a product
MOST_PARTS = 64


def most_rows(dtype: torch.dtype) -> int:
    """Rows of a product at most: FP32 does without tensor cores, and in registers."""
    return 16 if dtype == torch.float32 else 64


def needed(tile: DecodeTile, width: int, rows: int, dtype: torch.dtype, *, as_bytes: bool) -> int:
    """Bytes of shared memory, at most: keys and values in flight, q, and scores that change hands.

    A Hopper's own products keep as many tiles as there are stages, others one less. `tests/kernels/test_tuning.py` has
    what Triton took.
    """
    of_cache, of_products = 1 if as_bytes else dtype.itemsize, dtype.itemsize
    elements = tile.keys * width
    one_by_one = tile.stages == 1 and dtype == torch.float32  # keys, then values
    in_flight = elements * of_cache * (1 if one_by_one else 2 * tile.stages)
    in_fp32 = elements * of_products if as_bytes and dtype == torch.float32 else 0
    scales = 2 * tile.keys * 4 * tile.stages if as_bytes else 0
    return in_flight + in_fp32 + scales + rows * width * of_products + rows * tile.keys * 4 + 512


def widened(width: int) -> int:
    """How wide a product is, for heads of this width."""
    return max(32, 1 << (width - 1).bit_length())


def fitting(tile: DecodeTile, q: Tensor, rows: int, *, as_bytes: bool) -> DecodeTile | None:
    """The tile, with fewer stages, then fewer keys, if the device has no room for it; None: for no tile."""
    width, dtype, limit = widened(q.shape[2]), q.dtype, tuning_for(q.device).shared_memory
    while needed(tile, width, rows, dtype, as_bytes=as_bytes) > limit:
        if tile.stages > 2:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.keys > FEWEST_KEYS:
            tile = tile._replace(keys=tile.keys // 2)
        elif tile.stages > 1:
            tile = tile._replace(stages=1)
        else:
            return None
    return tile


def tile_for(slots: int, heads: int, *, as_bytes: bool, device: torch.device) -> DecodeTile:
    """Return the tile that was measured for so many slots and heads of k."""
    tuning = tuning_for(device)
    tile = tuning.decode_bytes if as_bytes else tuning.decode
    if slots * heads < multiprocessors(device):
        programs, least = tuning.decode_few
        return tile._replace(programs=programs, least=max(least, tile.keys))
    return tile


def parts_of(units: int, heads: int, positions: int, tile: DecodeTile, device: torch.device) -> int:
    """How many parts to make of each unit (a slot, or a group with its rows): enough to fill the GPU, none too small.

    A grid cannot know lengths, so this looks at how many positions there may be.
    """
    enough = -(-tile.programs * multiprocessors(device) // (units * heads))
    return max(1, min(enough, -(-positions // tile.least), MOST_PARTS))
