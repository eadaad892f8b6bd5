"""Tiles and other figures that were measured, by architecture: the one file to edit for a new GPU.

`tuning_for(device)` gives the `Tuning` of the newest architecture in `ARCHITECTURES` that the device is at least. To
add a GPU: add a `Tuning`, time its kernels (`octavo bench --kernels`), and check that programs fit and nothing spills
(`benchmarks/registers.py`).

Most tiles decide the time alone. Those of kernels that find scales are part of the numerics, because a tile finds the
scale of its own block:

    quantize    rows, rows_and_amax          as wide as a block of 1×128, or (mx) whole groups of 32 columns
                columns, mx_columns,
                whole_columns                as high as a block, or whole groups
                block128…                    a block of 128×128 consists of whole tiles
                dequantize                   as wide as a block
    gated       rows, backward_rows…         as wide as a block
                backward_columns,
                whole_columns                as high as a block, or whole groups
                forward, low_rank            as wide as a block of 1×128, where gate and up are saved in FP8
                backward, low_rank_backward  within one such block
    adapters    down                         within one block of 1×128

A tile that does not fit is refused when launches are worked out (`check_tile`). Which bytes threads exchange depends on
tiles, too: after a change, run `tests/kernels/test_compiling.py` in both dtypes.

A comment says what each choice was measured to gain, on an H200, as docs/LOG.md has it: µs before → after, mostly for
the shapes of an 8B at 8,192 tokens (x: 8,192 × 4,096; g: 8,192 × 28,672; w: 28,672 × 4,096), or the share of a copy's
bandwidth. "Not measured separately": no figure is on record for this choice alone.

Imports no Triton: `import octavo` works without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from octavo.kernels.few_token_tiles import FewTokenTiles, OneTokenTiles


class Tile(NamedTuple):
    """Rows and columns of a tile, and how a kernel walks over tiles.

    `stages`: loads in flight. `programs`: for each multiprocessor; they share out the tiles, so one more than fit would
    begin when the others are done. `registers`: at most so many per thread, given where the count is near an edge.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1
    programs: int = 1
    registers: int | None = None


class RowTile(NamedTuple):
    """How a program holds a row of up to `widest` columns: in parts of `part` columns."""

    widest: int
    part: int
    warps: int
    programs: int


class RowTiles(NamedTuple):
    """Rows that are held whole. Up to 4,096 columns: one part, a warp for each 1,024, and so many warps together."""

    narrow: int
    wide: tuple[RowTile, ...]


class GemmTile(NamedTuple):
    """`split`: the tile is so many, one above the other, of which registers hold one step's products at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    split: int = 1


class LinearTile(NamedTuple):
    """Elements of a program, and its warps, where shapes do not matter."""

    elements: int
    warps: int


class DecodeTile(NamedTuple):
    """How attention reads a cache: tiles of so many keys; parts enough for so many `programs` a multiprocessor.

    `least`: keys of a part, where there are as many; a multiple of `keys`. `rows`: of a product for the slots of a
    group, at most; more slots read the prompt again. `registers`: of a thread, at most; 0 for any.
    """

    keys: int
    warps: int
    stages: int
    programs: int
    least: int
    rows: int = 64
    registers: int = 0


class SamplingTile(NamedTuple):
    """Four logits for each of so many lanes at a time; parts enough for so many `programs` a multiprocessor."""

    lanes: int
    warps: int
    programs: int


class NormTile(NamedTuple):
    """Whole rows, one at least, in a program of `elements`, a warp for each `per_warp`; `programs` as in `Tile`."""

    elements: int
    per_warp: int
    programs: int = 1


_WIDEST_ROW = RowTile(32_768, 4096, 16, 1)
_WIDE_ROWS = (RowTile(8192, 1024, 4, 5), RowTile(16_384, 2048, 8, 2), _WIDEST_ROW)
_WIDE_FOLDED = (RowTile(8192, 1024, 4, 8), *_WIDE_ROWS[1:])
_WIDE_WITH_MAXIMA = (RowTile(8192, 2048, 8, 2), RowTile(16_384, 2048, 16, 1), _WIDEST_ROW)


class QuantizeTiles(NamedTuple):
    """The best of some dozen each, at x, g and w of an 8B."""

    tensor: Tile = Tile(64, 64, warps=8, stages=3, programs=4, registers=64)  # not measured separately
    tensor_both: Tile = Tile(64, 64, warps=4, stages=4, programs=2, registers=128)  # 77 → 84 % of a copy
    channel: Tile = Tile(64, 64, warps=4, programs=8)  # not measured separately
    channel_both: Tile = Tile(64, 64, warps=8, programs=4)  # not measured separately
    # A block of 128×128 in tiles, over which a program walks twice: 66 → 86 % of a copy (rows). Whole, it spilled.
    block128: Tile = Tile(64, 128, warps=8, programs=2)
    block128_columns: Tile = Tile(64, 64, warps=8, programs=3, registers=80)  # not measured separately
    block128_both: Tile = Tile(128, 64, warps=8, programs=2)  # not measured separately
    rows: Tile = Tile(32, 128, warps=4, stages=3, programs=4, registers=128)  # as wide as a block of 1×128; g 200 → 184
    rows_and_amax: Tile = Tile(16, 128, warps=8, stages=4, programs=4, registers=64)  # not measured separately
    columns: Tile = Tile(128, 64, warps=8, programs=4, registers=64)  # with 70 registers 3 of 4 programs fitted
    mx_columns: Tile = Tile(64, 64, warps=8, programs=4, registers=64)  # as the one above
    amax: Tile = Tile(64, 64, warps=4, stages=3, programs=8)  # not measured separately
    channel_amax: Tile = Tile(16, 256, warps=8, stages=3, programs=4, registers=64)  # a warp holds a row
    # Columns without statistics, in whole tiles, by granularity; and the bits of the words that a thread loads.
    # In words instead of transposed tiles: mx 29 → 77 to 81 % of a copy, 1×128 55 to 60 → 77 to 79. Words of 64 bits:
    # channel g 357 → 322, block g 222 → 214; mx slower, 229 → 236.
    whole_columns: Mapping[str, Tile] = {
        "channel": Tile(128, 64, warps=4, programs=32, registers=96),
        "block": Tile(128, 64, warps=4, programs=5, registers=96),
        "mx": Tile(128, 64, warps=8, programs=4, registers=64),
    }
    word: Mapping[str, int] = {"channel": 64, "block": 64, "mx": 32}
    # Elements: up to here twice as many programs share the columns of blocks. x 33 → 29.5.
    small_matrix: int = 2**26
    # Rows of tiles that are written as columns at the same time. g as columns 212 → 188, both 297 → 267; 2 and 8 alike.
    band: int = 4
    # Elements: passes over more, if they overlap, get in each other's way. Block g both 391 → 421; x both 58.8 → 55.2.
    largest_to_overlap: int = 2**27
    # The best of some six each, 4,096 to 28,672 columns: 85 to 90 % of a copy (two passes: 44 to 52); folded, 60 to 75
    # Where a thread holds the maxima of its columns, too, they are fewer; 4 warps at 4,096 columns: w 217 → 207.
    whole_rows: Mapping[str, RowTiles] = {
        "plain": RowTiles(28, _WIDE_ROWS),
        "folded": RowTiles(16, _WIDE_FOLDED),
        "maxima": RowTiles(20, _WIDE_WITH_MAXIMA),
    }
    transpose: Tile = Tile(128, 32, warps=4)  # columns are pairs of bytes; not measured separately
    # Eight elements for each thread, neither more nor less: then no FP8 bytes change hands (see `tiles.cast`).
    dequantize: Tile = Tile(16, 128, warps=8)


class GatedTiles(NamedTuple):
    """Tokens and features of a tile: `rows` and `columns`."""

    forward: Tile = Tile(16, 128, warps=4, programs=8, registers=64)  # not measured separately
    backward: Tile = Tile(64, 64, warps=8, programs=2, registers=128)  # not measured separately
    # Tiles by granularity along a row. SwiGLU to mx with 4 warps: 203 → 161.
    rows: Mapping[str, Tile] = {
        "block": Tile(32, 128, warps=8, programs=4),
        "mx": Tile(32, 128, warps=4, programs=4),
    }
    # With 87 and 127 registers 2 of 3 and 4 of 6 programs fitted; 80 do.
    backward_rows: Tile = Tile(16, 128, warps=4, programs=6, registers=80)
    backward_rows_and_amax: Tile = Tile(8, 128, warps=4, programs=8)  # not measured separately
    # Tiles at edges, by granularity along a column.
    backward_columns: Mapping[str, Tile] = {
        "channel": Tile(64, 64, warps=4, programs=4),
        "block": Tile(128, 32, warps=8, programs=3, registers=80),
        "mx": Tile(64, 64, warps=8, programs=3, registers=80),
    }
    # The same in whole tiles, by words: both passes mx 1,166 → 570, block 918 → 636. For blocks 8 warps with 128
    # registers spill 72 bytes (690); 4 with 168 do not.
    whole_columns: Mapping[str, Tile] = {
        "channel": Tile(128, 64, warps=8, programs=2, registers=128),
        "block": Tile(128, 32, warps=4, programs=3, registers=168),
        "mx": Tile(128, 64, warps=8, programs=2, registers=128),
    }
    band: int = 16  # rows of tiles at the same time; bands gained nothing here that could be measured
    # With adapters: 547 → 342 in all; tiles of 32 and 64 tokens are slower. Eight elements for each thread in backward,
    # so that no FP8 bytes change hands.
    low_rank: Tile = Tile(16, 128, warps=4, programs=6, registers=80)
    low_rank_backward: Tile = Tile(16, 128, warps=8, programs=4, registers=64)


class AdapterTiles(NamedTuple):
    """Tokens and outputs (or inputs) of a tile: `rows` and `columns`."""

    # Against torch's products and additions: o and residual 104 → 59, q, k and v 95 → 60 (4,096 tokens).
    outputs: Tile = Tile(32, 128, warps=4, programs=4)
    outputs_of_large_rank: Tile = Tile(64, 128, warps=4, programs=4)  # above 64; not measured separately
    # Against torch's four products: gate and up 126 → 89, q, k and v 70 → 40, o 37 → 27 (4,096 tokens).
    gradients: Tile = Tile(64, 128, warps=8, stages=3, programs=2)
    # dA from FP8: 54 → 33 and 26 → 15. One stage: else FP8 bytes would lie in shared memory.
    down: Tile = Tile(64, 128, warps=8, stages=1, programs=2)
    # Cost of starting and ending a program, in tiles: fewer, longer programs are better than full waves.
    start: int = 8


class GemmTiles(NamedTuple):
    """Tiles of the Triton kernel by shape, not by trial: trials at run time cost more than they gain.

    They are the largest whose sums fit into registers; times are not on record tile by tile.
    """

    small: GemmTile = GemmTile(64, 64, 128, warps=4, stages=4)  # up to 64 rows or columns
    fast: GemmTile = GemmTile(128, 256, 128, warps=8, stages=4)  # sum in the tensor core: 192 KB of 227, 207 registers
    # Sum in FP32, or scaled by row: 236 and 254 registers; in one piece it would spill.
    tall: GemmTile = GemmTile(256, 128, 128, warps=8, stages=4, split=2)
    other: GemmTile = GemmTile(128, 128, 128, warps=8, stages=5)  # with a scale for every row and column, 255 registers
    group: int = 8  # tiles of rows that share the columns of b while these are in L2; not measured separately
    # Tiles of 128 × 256 from which on one matrix fills the GPU, so that a batch goes to cuBLASLt one by one. Of 132
    # multiprocessors; not measured separately.
    full_gpu: int = 100
    cublas_blocks: bool = True  # cuBLASLt takes scales per block of 1×128 and 128×128


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU, per second.

    Fitted to 66 linears timed on an H200 (`benchmarks/linears.py`, 2026-11-15). Five of them come out on the wrong
    side, where FP8 is 0.97x to 1.2x as fast.
    """

    bf16_flops: float = 750e12
    fp8_flops: float = 1430e12
    bytes: float = 3.25e12
    launch: float = 2e-6
    start_of_gemm: float = 4.7e-6


class Tuning(NamedTuple):
    """All that was measured for one architecture; the defaults are those of an H200."""

    quantize: QuantizeTiles = QuantizeTiles()
    gated: GatedTiles = GatedTiles()
    adapters: AdapterTiles = AdapterTiles()
    gemm: GemmTiles = GemmTiles()
    few_tokens: FewTokenTiles = FewTokenTiles()
    one_token: OneTokenTiles = OneTokenTiles()
    # A program walks over one token's logits; then tiles of tokens by logits. Not measured separately.
    cross_entropy: LinearTile = LinearTile(2048, 4)
    cross_entropy_gradient: Tile = Tile(128, 64, warps=4)
    # RMS norm, the sum of its weight's gradient, and q, k and v with their rotation. Not measured separately.
    norm: NormTile = NormTile(2048, 1024)
    norm_backward: NormTile = NormTile(2048, 512, programs=2)
    norm_sum: Tile = Tile(32, 64, warps=4)
    rotary: LinearTile = LinearTile(4096, 4)
    rotary_programs: int = 8  # with norms of heads, for each multiprocessor
    # Attention of tokens that are generated, over a cache in 16 bits or in bytes, and what stores into it: heads of an
    # 8B, 64 slots, suffixes of up to 512 (`benchmarks/decode_attention.py`, H200, 2026-11-17, torch 2.11.0). Tiles of
    # 64 keys with 4 warps: 28.6 instead of 27.5 µs and, in bytes, 29.7 instead of 23.2. At 256 slots all programs and
    # parts are within 1 %.
    decode: DecodeTile = DecodeTile(32, warps=2, stages=4, programs=6, least=128)
    decode_bytes: DecodeTile = DecodeTile(64, warps=2, stages=3, programs=4, least=256)
    # Programs and the fewest keys of a part, where slots times heads of k are fewer than multiprocessors: one slot
    # 7.0 → 5.9, in bytes 7.7 → 6.2.
    decode_few: tuple[int, int] = (8, 64)
    decode_merge_warps: int = 1
    decode_store: LinearTile = LinearTile(1024, 2)
    sampling: SamplingTile = SamplingTile(256, warps=4, programs=8)  # not timed yet
    rescale: LinearTile = LinearTile(4096, 8)
    rescale_programs: int = 1056  # 8 for each of 132 multiprocessors
    adamw: LinearTile = LinearTile(1024, 4)  # 512 in 2 warps and 2,048 in 4 or 8 are up to 5 % slower
    split: LinearTile = LinearTile(2048, 4)  # not measured separately
    # Programmatic dependent launch (Hopper): channel x columns 54.8 → 53.6, block x both 58.8 → 55.2, mx w both
    # 194 → 189.5. Per tensor it is slower (current x both 61.8 → 86.7), so `quantize` does not ask for it there.
    overlaps: bool = True
    shared_memory: int = 232_448  # bytes that a program may have; of decode attention, which makes its tiles fit
    rates: Rates = Rates()
    # The mean width of a model from which on FP8 products by frozen weights pay: BF16 is 9 and 17 % faster (channel and
    # block) at 419, 0 and 8 % at 698, as fast at 808; FP8 16 and 8 % faster at 1,605 (`benchmarks/frozen_products.py`).
    frozen_width: int = 750


HOPPER = Tuning()
# Written to fit, and never timed: of shared memory, Ada and small Blackwells have 99 KB, of which this takes 48.
_FITS_ALL = GemmTile(128, 128, 64, warps=8, stages=3)
_UNTIMED_GEMM = HOPPER.gemm._replace(
    small=_FITS_ALL, fast=_FITS_ALL, tall=_FITS_ALL, other=_FITS_ALL, cublas_blocks=False
)
BLACKWELL = HOPPER._replace(gemm=_UNTIMED_GEMM, shared_memory=101_376)
ADA = BLACKWELL._replace(overlaps=False)
# Tunings by their lowest compute capability, newest first. Ampere has no FP8, but steps optimisers.
ARCHITECTURES = (((10, 0), BLACKWELL), ((9, 0), HOPPER), ((8, 0), ADA))


def tuning_of(capability: tuple[int, int]) -> Tuning:
    """The figures for a compute capability: those of the newest architecture that it is at least."""
    return next((tuning for lowest, tuning in ARCHITECTURES if capability >= lowest), ADA)


@cache
def tuning_for(device: torch.device) -> Tuning:
    """The figures for a device. On a CPU kernels are interpreted, and on `meta` compiled: as for Hopper."""
    if device.type != "cuda":
        return HOPPER
    return tuning_of(torch.cuda.get_device_capability(device))


def check_tile(field: str, tile: Tile, fits: bool, needed: str) -> None:
    """Raise if a tile does not fit the blocks that its kernel scales: scales would be wrong, or beyond their buffer."""
    if not fits:
        raise ValueError(f"{field}: a tile of {tile.rows}×{tile.columns} in octavo/kernels/tuning.py, but {needed}")


def may_overlap(device: torch.device) -> bool:
    """Whether launches may begin before the last one ends; interpreted ones do not."""
    return device.type != "cpu" and tuning_for(device).overlaps


@cache
def is_known_gpu(device: torch.device, *, fp8: bool) -> bool:
    """Whether kernels with instructions of NVIDIA's run there: from Ampere on; those for FP8 come later."""
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= ((8, 9) if fp8 else (8, 0))
