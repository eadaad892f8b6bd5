"""Tiles of the few-token kernels (`octavo/kernels/few_tokens`), as measured on an H200; a part of `tuning.py`."""

from collections.abc import Mapping
from typing import NamedTuple


class ProductTile(NamedTuple):
    """Outputs of a tile, and how a kernel walks along its weights; `programs` that fit on a multiprocessor.

    `registers`: at most, for each thread. `prefetch`: steps of 128 columns that L2 is asked for before x is there.
    `adapter_parts`: parts of K for `x · Aᵀ`, for which others wait at their end. `tokens`: of a tile; None: all.
    """

    n: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None
    prefetch: int = 4
    adapter_parts: int = 16
    tokens: int | None = None


class FewTokenTiles(NamedTuple):
    """Tiles by their tokens, 16, 32, 64 or 128, of which there is one tile.

    They are at most 128 outputs, which have one scale for each block. Gate and up: 64 of each, always. `down` is of
    what follows them, which has factors for every step, and takes more registers.

    Measured for an 8B with adapters of rank 32 (`benchmarks/few_tokens.py`, H200, 2026-11-17, torch 2.11.0). A layer
    takes 89 µs at 1 token, 90 at 16 and 112 at 64; with all tiles as those of `products[16]`'s first guess, and 128
    outputs for 64 tokens, it took 97, 98 and 130. At 128 tokens (2026-11-18) 173, and 262 with all tokens of gate and
    up in one tile. Tiles of 32 tokens follow their neighbours, unmeasured.
    """

    products: Mapping[int, ProductTile] = {
        16: ProductTile(64, warps=4, stages=5, programs=4, prefetch=0),  # qkv 15.3 → 14.4 µs, o 12.4
        32: ProductTile(64, warps=4, stages=4, programs=3, prefetch=0),
        64: ProductTile(64, warps=4, stages=3, programs=3, prefetch=0),  # qkv 23.0 → 19.9, o 19.0 → 15.3
        128: ProductTile(64, warps=4, stages=3, programs=2, prefetch=0),
    }
    gated: Mapping[int, ProductTile] = {
        16: ProductTile(64, warps=4, stages=5, programs=2, prefetch=2, adapter_parts=4),  # 36.7
        32: ProductTile(64, warps=4, stages=4, programs=2, prefetch=2, adapter_parts=4),
        64: ProductTile(64, warps=4, stages=4, programs=2, prefetch=0, adapter_parts=4),  # 44.1 → 43.5
        128: ProductTile(64, warps=4, stages=3, programs=2, prefetch=0, adapter_parts=4, tokens=64),  # 167 → 77
    }
    down: Mapping[int, ProductTile] = {
        16: ProductTile(64, warps=4, stages=6, programs=3, prefetch=0, adapter_parts=8),  # 29.9 → 25.8, at 1 token
        32: ProductTile(64, warps=4, stages=4, programs=3, prefetch=0, adapter_parts=8),
        64: ProductTile(64, warps=4, stages=3, programs=2, prefetch=8, adapter_parts=8),  # 41.9 → 34.0
        128: ProductTile(64, warps=4, stages=3, programs=2, prefetch=8, adapter_parts=8),
    }
    most_parts: int = 16
    lay_out: tuple[int, int] = (512, 4)  # elements for each warp; so many warps, or more
    # Cost of a program's start and end, and of a part's sums for each 64 tokens, in steps of 128 columns.
    start: float = 3.0
    part: float = 0.25
    # Whether the first launch of a product begins before the kernel in front of it, whosever it is, has ended.
    begins_early: bool = False


class RowsTile(NamedTuple):
    """Rows of a weight, and columns of a step, of which several are on their way."""

    rows: int
    width: int
    warps: int
    stages: int


class OneTokenTiles(NamedTuple):
    """Tiles of a single token's products, by their kinds; of gate and up, `rows` of each.

    Measured for an 8B with adapters of rank 32 (`benchmarks/one_token.py`, H200, 2026-11-19, torch 2.11.0). A layer
    takes 69 µs; by the kernels for 16 tokens, 89. To ask for weights before x is there made it slower: of L2 72 to 85,
    in registers 73.
    """

    products: RowsTile = RowsTile(16, 1024, warps=8, stages=3)  # qkv 14.1 → 10.7 µs, o 12.1 → 8.0
    gated: RowsTile = RowsTile(16, 512, warps=4, stages=3)  # 36.3 → 32.3
    down: RowsTile = RowsTile(8, 2048, warps=4, stages=3)  # 25.8 → 17.9
    projected: int = 4096  # columns of x, without a norm, that a program multiplies by a row of A
    project_elements: int = 512  # for each warp
