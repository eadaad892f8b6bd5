"""Launches of the few-token products in FP8: x in two halves, weights straight to the tensor cores.

`halves_kernels.py` has the kernels. They take weights in E4M3, x in BF16, and up to 64 tokens: with more, two halves
for each would be as many operations as one product in 16 bits.
"""

import torch
import triton
from torch import Tensor

from octavo.kernels.few_tokens import sides
from octavo.kernels.few_tokens.halves_kernels import PREFETCHES, halves_kernel, halves_products_kernel
from octavo.kernels.few_tokens.kernels import BLOCKS, CHANNEL, PARTS_OF_TILE, TENSOR
from octavo.kernels.few_tokens.sides import DOWN, GATED, Side
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.launch import Launches
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import HalvesTile
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import BLOCK, Quantized

MOST_TOKENS = 64


def takes(x: Tensor, *weights: Quantized) -> bool:
    """Whether products of x by these weights, which `can_multiply`, are of FP8."""
    formats = {weight.data.dtype for weight in weights}
    return x.dtype == torch.bfloat16 and x.shape[0] <= MOST_TOKENS and formats == {torch.float8_e4m3fn}


def given(data: Tensor) -> Tensor:
    """A weight as the kernels take it."""
    return data


def tile_of_tokens(tokens: int) -> int:
    return max(8, triton.next_power_of_2(tokens))


def _tile_of(x: Tensor, kind: str) -> HalvesTile:
    return sides.tuning_of(x).halves[kind][tile_of_tokens(x.shape[0])]


def _tiles_of(x: Tensor, side: Side, kind: str) -> int:
    """How many tiles of outputs there are."""
    return -(-side.weight.data.shape[0] // _tile_of(x, kind).n)


def _parts_of(x: Tensor, side: Side, kind: str) -> int:
    """How many programs share the columns of a tile."""
    tile, k = _tile_of(x, kind), side.weight.data.shape[1]
    slots = tile.programs * multiprocessors(x.device)
    parts = sides.parts_of(_tiles_of(x, side, kind), -(-k // BLOCK), x.shape[0], slots, sides.tuning_of(x))
    steps = -(-k // tile.step)
    return -(-steps // -(-steps // parts))  # none without a step


def counters_of(x: Tensor, side: Side, kind: str) -> int:
    return PARTS_OF_TILE + _tiles_of(x, side, kind)


def _padded(k: int, step: int) -> int:
    return -(-k // step) * step


def add_lay_out(
    launches: Launches, x: Tensor, norm: Norm | None, norm_at: int | None, counters: int, side: Side, kind: str
) -> tuple[tuple[int, int, int], int]:
    """Add the launch before the products; return the numbers of x, its halves, their factors, and the counters."""
    (m, k), rows = x.shape, tile_of_tokens(x.shape[0])
    n, tile, parts = side.weight.data.shape[0], _tile_of(x, kind), _parts_of(x, side, kind)
    across, part = _padded(k, tile.step), -(-k // tile.step // parts) * tile.step
    early = min(part, tile.early * tile.step)
    programs = rows + (-(-n * parts // PREFETCHES) if early and launches.overlaps else 0)
    normed = 0 if norm is None else launches.make((m, k), x.dtype)
    halves, factors = launches.make((2 * rows, across), torch.float8_e4m3fn), launches.make((2 * rows,), torch.float32)
    # Four columns for a thread at least: bytes are made two by two.
    zeros, width = launches.make((counters,), torch.int32), max(4 * BLOCK, triton.next_power_of_2(across))
    elements, warps = sides.tuning_of(x).lay_out
    eps, shifted = (0.0, False) if norm is None else (float(norm.eps), norm.shifted)
    constants = {
        "NORM": norm is not None, "SHIFTED": shifted, "K": k, "WIDTH": width,
        "COUNTERS": triton.next_power_of_2(counters), "num_warps": max(warps, min(16, width // elements)),
    }  # fmt: skip
    tensors = (0, 0 if norm_at is None else norm_at, normed, halves, factors, zeros, side.w)
    numbers = (m, across // 2, eps, counters, rows, n, parts, part, early)
    launches.launch(halves_kernel, (programs,), tensors, numbers, constants)
    return (normed, halves, factors), zeros


def add_products(
    launches: Launches, x: Tensor, laid_out: tuple[int, int, int], counters: tuple[int, int], side: Side, kind: str, *,
    activation: str | None = None, bias_at: int | None = None, residual_at: int | None = None,
) -> tuple[int, int, int]:  # fmt: skip
    """Add the launch of a product; return the number of y first, or, with an activation, those of h as it is laid out.

    `counters`: their number, and the first of them that is this launch's.
    """
    gated, (n, k), scale = kind == GATED, side.weight.data.shape, side.weight.scale
    m, rows, tile, tiles = x.shape[0], tile_of_tokens(x.shape[0]), _tile_of(x, kind), _tiles_of(x, side, kind)
    steps, factor = -(-k // tile.step), _tile_of(x, GATED).n // 2 if kind == DOWN else 0
    if gated and tile.n // 4 * rows < 64 * tile.warps:
        raise ValueError(
            f"few tokens: {tile.warps} warps for {tile.n} rows of gate and up and {rows} tokens have fewer than two "
            "pairs of features a thread, and bytes are made two by two: fewer warps in octavo/kernels/tuning.py"
        )
    parts = _parts_of(x, side, kind)
    t_steps = -(-k // BLOCK)
    t_parts = -(-t_steps // -(-t_steps // tile.adapter_parts)) if side.adapters else 1
    ranks = side.ranks or [1]
    t_sums = launches.make((len(ranks), t_parts, max(16, triton.next_power_of_2(max(ranks))), rows), torch.float32)
    t = launches.make((rows, sum(ranks)), x.dtype)
    sums = launches.make((tiles, parts, tile.n, rows) if parts > 1 else (1,), torch.float32)
    y = launches.make((m, n // 2 if gated else n), x.dtype)
    words, factors = y, sums
    if gated:
        words = launches.make((2 * rows, tiles * (tile.n // 2)), torch.float8_e4m3fn)
        factors = launches.make((tiles, 2 * rows), torch.float32)
    mode = TENSOR if scale.dim() == 0 else CHANNEL if scale.shape == (n, 1) else BLOCKS
    whole = (n // 2) % (tile.n // 2) == 0 if gated else n % tile.n == 0
    constants = {
        "MODE": mode.value, "ACTIVATION": None if activation is None else ACTIVATIONS[activation],
        "FACTOR": factor, "BIAS": bias_at is not None,
        "RESIDUAL": residual_at is not None, "SPLIT": parts > 1, "EVEN": whole and k % tile.step == 0,
        "TILE_M": rows, "TILE_N": tile.n, "STEP": tile.step, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if tile.registers is not None:
        constants["maxnreg"] = tile.registers
    beside = (y if bias_at is None else bias_at, y if residual_at is None else residual_at)
    tensors = (*laid_out, side.w, side.scale, *side.downs(), *side.ups(), t_sums, t, sums, counters[0], *beside, y)
    stride = scale.shape[1] if mode is BLOCKS else 0
    numbers = (m, n, k, steps, stride, counters[1], parts, t_parts, tile.prefetch, *side.spans)
    grid = (len(side.adapters) * t_parts + tiles * parts,)
    constants |= side.rank_constants
    launches.launch(halves_products_kernel, grid, (*tensors, words, factors), numbers, constants)
    return y, words, factors
