"""Launches of the few-token products in FP16: weights are read as words of two bytes, and converted in registers.

`kernels.py` has the kernels. They take both FP8 formats, x in BF16 and FP16, and up to 128 tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.few_tokens import sides
from octavo.kernels.few_tokens.kernels import (
    BLOCKS,
    CHANNEL,
    PARTS_OF_TILE,
    TENSOR,
    lay_out_kernel,
    products_kernel,
)
from octavo.kernels.few_tokens.sides import DOWN, GATED, Side
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.launch import Launches
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import ProductTile
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import BLOCK

FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def tile_of_tokens(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


def _tile_of(x: Tensor, kind: str) -> ProductTile:
    """The tile of a kind of product, a field of `FewTokenTiles`."""
    return getattr(sides.tuning_of(x), kind)[tile_of_tokens(x.shape[0])]


def _tiles_of(x: Tensor, side: Side, kind: str) -> int:
    """How many tiles of outputs there are. Of gate and up, two for 128 features, which may be fewer."""
    n = side.weight.data.shape[0]
    return -(-n // 2 // BLOCK) * 2 if kind == GATED else -(-n // _tile_of(x, kind).n)


def counters_of(x: Tensor, side: Side, kind: str) -> int:
    return PARTS_OF_TILE + _tiles_of(x, side, kind)


def add_lay_out(
    launches: Launches, x: Tensor, norm: Norm | None, norm_at: int | None, counters: int, *_of_halves: object
) -> tuple[tuple[int, int], int]:
    """Add the launch before the products, and return the numbers of x', its factors, and the counters."""
    m, k = x.shape
    rows, across = tile_of_tokens(m), -(-k // BLOCK) * BLOCK
    out, factors = launches.make((rows, across), torch.float16), launches.make((rows,), torch.float32)
    zeros, width = launches.make((counters,), torch.int32), max(BLOCK, triton.next_power_of_2(across))
    elements, warps = sides.tuning_of(x).lay_out
    eps, shifted = (0.0, False) if norm is None else (float(norm.eps), norm.shifted)
    constants = {
        "NORM": norm is not None, "SHIFTED": shifted, "K": k, "WIDTH": width,
        "COUNTERS": triton.next_power_of_2(counters), "num_warps": max(warps, min(16, width // elements)),
    }  # fmt: skip
    tensors = (0, 0 if norm_at is None else norm_at, out, factors, zeros)
    launches.launch(lay_out_kernel, (rows,), tensors, (m, across, eps, counters), constants)
    return (out, factors), zeros


def add_products(
    launches: Launches, x: Tensor, laid_out: tuple[int, int], counters: tuple[int, int], side: Side, kind: str, *,
    activation: str | None = None, bias_at: int | None = None, residual_at: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Add the launch of a product, and return the numbers of y; or, with an activation, of h and its factors.

    `counters`: their number, and the first of them that is this launch's.
    """
    gated, (n, k), scale = kind == GATED, side.weight.data.shape, side.weight.scale
    m, rows, steps, tuning = x.shape[0], tile_of_tokens(x.shape[0]), -(-k // BLOCK), sides.tuning_of(x)
    tile, tiles = _tile_of(x, kind), _tiles_of(x, side, kind)
    parts = sides.parts_of(tiles, steps, m, tile.programs * multiprocessors(x.device), tuning)
    parts = -(-steps // -(-steps // parts))  # none without a step
    t_parts = -(-steps // -(-steps // tile.adapter_parts)) if side.adapters else 1
    ranks = side.ranks or [1]
    t_sums = launches.make((len(ranks), t_parts, max(16, triton.next_power_of_2(max(ranks))), rows), torch.float32)
    t = launches.make((rows, sum(ranks)), x.dtype)
    size = (tiles, parts, 2 if gated else 1, tile.n, rows) if parts > 1 else (1,)
    sums = launches.make(size, torch.float32)
    if gated:
        y, factors = launches.make((rows, tiles * tile.n), torch.float16), launches.make((tiles, rows), torch.float32)
    else:
        y = launches.make((m, n), x.dtype)
        factors = sums
    mode = TENSOR if scale.dim() == 0 else CHANNEL if scale.shape == (n, 1) else BLOCKS
    whole = (n // 2) % BLOCK == 0 if gated else n % tile.n == 0
    constants = {
        "FORMAT": FORMATS[side.weight.data.dtype], "MODE": mode.value, "STEPPED": kind == DOWN,
        "ACTIVATION": None if activation is None else ACTIVATIONS[activation],
        "BIAS": bias_at is not None, "RESIDUAL": residual_at is not None, "SPLIT": parts > 1,
        "EVEN": whole and k % BLOCK == 0, "TILE_M": rows, "TILE_N": tile.n,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if tile.registers is not None:
        constants["maxnreg"] = tile.registers
    beside = (y if bias_at is None else bias_at, y if residual_at is None else residual_at)
    tensors = (*laid_out, side.w, side.scale, *side.downs(), *side.ups(), t_sums, t, sums, counters[0], *beside, y)
    stride = scale.shape[1] if mode is BLOCKS else 0
    numbers = (m, n, k, steps, stride, counters[1], parts, t_parts, tile.prefetch, *side.spans)
    grid = (len(side.adapters) * t_parts + tiles * parts,)
    launches.launch(products_kernel, grid, (*tensors, factors), numbers, constants | side.rank_constants)
    return y, factors


def given(data: Tensor) -> Tensor:
    return data.view(torch.int16)
