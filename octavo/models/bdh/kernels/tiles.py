"""Helpers that the kernels of a BDH layer share: tensor layouts, RoPE on a tile, scales and launches.

A tile is TILE_T positions by TILE_N neurons of one sequence and head. Its tensors have one of three layouts:

    joined       [B, T, H, N]                    the heads of a position side by side; rows are H · N apart
    stacked      [B, H, T, N] or [H, B, T, N]    the rows of a head are N apart
    transposed   [.., N, T] or [H, N, B · T]     for products that sum over positions
"""

# Triton gives the parameters of a kernel their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import delayed, tiles
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2

# Positions and neurons of a tile, warps, pipeline stages, and programs per multiprocessor.
Tile = tuple[int, int, int, int, int]
TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def offsets(stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a tile's elements from its first, for rows that are `stride` apart."""
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load(ptr, inner, inside, EVEN: tl.constexpr):
    """Load a tile; unless all tiles are full (`EVEN`), elements outside the tensor read as zero."""
    if EVEN:
        return tl.load(ptr + inner)
    return tl.load(ptr + inner, mask=inside, other=0.0)


@triton.jit
def store(ptr, inner, value, inside, EVEN: tl.constexpr):
    """Store a tile; unless all tiles are full (`EVEN`), elements outside the tensor are left out."""
    if EVEN:
        tl.store(ptr + inner, value)
    else:
        tl.store(ptr + inner, value, mask=inside)


@triton.jit
def relu(x):
    """ReLU that propagates NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rotate(x, cos, sin):
    """Apply RoPE: rotate the neighbouring pairs of each row."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    rotated = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(rotated, [x.shape[0], x.shape[1]])


@triton.jit
def load_angles(cos_ptr, sin_ptr, t0, n0, T, N, EVEN: tl.constexpr, TILE_T: tl.constexpr, TILE_N: tl.constexpr):
    """Load the cosines and sines of a tile: one pair for every two neurons."""
    half: tl.constexpr = TILE_N // 2
    tile_start = t0.to(tl.int64) * (N // 2) + n0 // 2
    inner = offsets(N // 2, TILE_T, half)
    inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 // 2 + tl.arange(0, half)[None, :] < N // 2)
    return load(cos_ptr + tile_start, inner, inside, EVEN), load(sin_ptr + tile_start, inner, inside, EVEN)


@triton.jit
def joined_start(b, h, t0, n0, H, T, N):
    """Offset of a tile's first element in `[B, T, H, N]`."""
    return ((b * T + t0).to(tl.int64) * H + h) * N + n0


@triton.jit
def stacked_start(outer, inner, inners, t0, n0, T, N):
    """Offset of a tile's first element in `[outer, inner, T, N]`: `[B, H, T, N]` or `[H, B, T, N]`."""
    return ((outer * inners + inner).to(tl.int64) * T + t0) * N + n0


@triton.jit
def to_fp8(
    x, inverse, seed, where, dtype: tl.constexpr, source: tl.constexpr, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Return a tile in FP8, and its scaled and clipped values before the cast. `source`: the dtype its values have."""
    v = tiles.saturate(tiles.scaled(x, inverse), seed, where, FORMAT, STOCHASTIC, False)
    return tiles.cast(v, dtype, tl.float32 if STOCHASTIC else source), v


@triton.jit
def check_top(top, limit):
    """Return the amax of a program's bit patterns, whether it is non-finite, and whether a second pass must count."""
    bits = tiles.largest(top)
    value = bits.to(tl.float32, bitcast=True)
    non_finite = bits >= tiles.INFINITY_BITS
    return value, non_finite, non_finite | (value > limit)


@triton.jit
def record_amax(amax_ptr, top):
    """Raise the measured amax of the tensor to this program's."""
    if top > 0:
        tl.atomic_max(amax_ptr, top, sem="relaxed")


def can_fuse(x: Tensor, *recipes: OperandRecipe) -> bool:
    """Return True if these kernels cover the recipes: one scale per tensor, NVIDIA's formats, no percentile."""
    plain = all(r.granularity == "tensor" and r.percentile is None and r.format in (E4M3, E5M2) for r in recipes)
    return plain and x.dtype in TL_DTYPES and x.numel() > 0


def amax_tensor(state: Tensor, recipe: OperandRecipe) -> Tensor:
    """Return where a first launch measures the amax for a current scale; a delayed one needs no such launch."""
    return state if recipe.delayed else state.new_zeros(1)


def passes(recipe: OperandRecipe) -> list[dict[str, object]]:
    """Return the constants that differ between the launches of a kernel, in order."""
    if recipe.delayed:
        return [{"MEASURE": False, "SCALING": scaling.value} for scaling in delayed.passes(True)]
    return [{"MEASURE": measure, "SCALING": delayed.CURRENT.value} for measure in (True, False)]


def launch_options(x: Tensor, batches: int, t: int, n: int, tile: Tile) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and the constants of a launch over `batches` matrices of t by n."""
    tile_t, tile_n, warps, stages, programs = tile
    count = batches * -(-t // tile_t) * -(-n // tile_n)
    grid = (min(count, programs * tiles.multiprocessors(x.device)),)
    even = t % tile_t == 0 and n % tile_n == 0
    return grid, {"EVEN": even, "TILE_T": tile_t, "TILE_N": tile_n, "STAGES": stages, "num_warps": warps}


def recipe_constants(recipe: OperandRecipe) -> dict[str, object]:
    """Return the constants that a kernel takes from a recipe."""
    return {
        "FORMAT": recipe.format,
        "MARGIN": recipe.margin,
        "STOCHASTIC": recipe.rounding == "stochastic",
    }


def draw_seed(recipe: OperandRecipe) -> int:
    """Draw a seed from torch's CPU generator where rounding is stochastic; else return 0."""
    return int(torch.randint(2**31 - 2, (), device="cpu")) if recipe.rounding == "stochastic" else 0
