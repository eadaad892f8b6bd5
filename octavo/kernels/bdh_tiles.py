"""What the kernels of a BDH layer share: where its tensors lie, RoPE on a tile, and the bookkeeping of scales.

A tile is TILE_T positions by TILE_N neurons of one sequence and head.
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

# Positions and neurons of a tile, warps, loads in flight, and programs per multiprocessor.
Tile = tuple[int, int, int, int, int]
TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def offsets(stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load(ptr, inner, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + inner)
    return tl.load(ptr + inner, mask=inside, other=0.0)


@triton.jit
def store(ptr, inner, value, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr + inner, value)
    else:
        tl.store(ptr + inner, value, mask=inside)


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def turn(x, cos, sin):
    """RoPE on the pairs of neighbours in a row."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, [x.shape[0], x.shape[1]])


@triton.jit
def load_angles(cos_ptr, sin_ptr, t0, n0, T, N, EVEN: tl.constexpr, TILE_T: tl.constexpr, TILE_N: tl.constexpr):
    half: tl.constexpr = TILE_N // 2
    first = t0.to(tl.int64) * (N // 2) + n0 // 2
    inner = offsets(N // 2, TILE_T, half)
    inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 // 2 + tl.arange(0, half)[None, :] < N // 2)
    return load(cos_ptr + first, inner, inside, EVEN), load(sin_ptr + first, inner, inside, EVEN)


@triton.jit
def joined(b, h, t0, n0, H, T, N):
    """Where a tile starts in `[B, T, H, N]`; its rows are H · N apart."""
    return ((b * T + t0).to(tl.int64) * H + h) * N + n0


@triton.jit
def stacked(outer, inner, inners, t0, n0, T, N):
    """Where a tile starts in `[outer, inner, T, N]`: `[B, H, T, N]` or `[H, B, T, N]`; its rows are N apart."""
    return ((outer * inners + inner).to(tl.int64) * T + t0) * N + n0


@triton.jit
def to_fp8(
    x, inverse, seed, where, dtype: tl.constexpr, source: tl.constexpr, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """A tile made of `source` in FP8, and what went into the cast."""
    v = tiles.saturate(tiles.scaled(x, inverse), seed, where, FORMAT, STOCHASTIC, False)
    return tiles.cast(v, dtype, tl.float32 if STOCHASTIC else source), v


@triton.jit
def look_at(top, limit):
    """What a program's bit patterns say: the largest, whether it is finite, whether to walk over the tiles again."""
    bits = tiles.largest(top)
    value = bits.to(tl.float32, bitcast=True)
    non_finite = bits >= tiles.INFINITY_BITS
    return value, non_finite, non_finite | (value > limit)


@triton.jit
def note_amax(amax_ptr, top):
    if top > 0:
        tl.atomic_max(amax_ptr, top, sem="relaxed")


def can_fuse(x: Tensor, *recipes: OperandRecipe) -> bool:
    """Whether these kernels cover it: one scale per tensor, formats that NVIDIA has, no percentile."""
    plain = all(r.granularity == "tensor" and r.percentile is None and r.format in (E4M3, E5M2) for r in recipes)
    return plain and x.dtype in TL_DTYPES and x.numel() > 0


def state(row: Tensor, recipe: OperandRecipe, record: bool) -> tuple[Tensor, Tensor]:
    """The row a kernel may write to, and where it notes the amax it measures for a current scale."""
    if recipe.delayed:
        row = delayed.writable(row, record)
        return row, row
    return row, row.new_zeros(1)


def tasks(recipe: OperandRecipe) -> list[dict[str, object]]:
    """The launches of a kernel, by what differs between them."""
    if recipe.delayed:
        return [{"MEASURE": False, "SCALING": scaling.value} for scaling in delayed.passes(True)]
    return [{"MEASURE": measure, "SCALING": delayed.CURRENT.value} for measure in (True, False)]


def arrange(x: Tensor, batches: int, t: int, n: int, tile: Tile) -> tuple[tuple[int], dict[str, int]]:
    tile_t, tile_n, warps, stages, programs = tile
    count = batches * -(-t // tile_t) * -(-n // tile_n)
    grid = (min(count, programs * tiles.multiprocessors(x.device)),)
    even = t % tile_t == 0 and n % tile_n == 0
    return grid, {"EVEN": even, "TILE_T": tile_t, "TILE_N": tile_n, "STAGES": stages, "num_warps": warps}


def constants(recipe: OperandRecipe) -> dict[str, object]:
    return {
        "FORMAT": recipe.format,
        "MARGIN": recipe.margin,
        "STOCHASTIC": recipe.rounding == "stochastic",
    }


def seed_of(recipe: OperandRecipe) -> int:
    return int(torch.randint(2**31 - 2, (), device="cpu")) if recipe.rounding == "stochastic" else 0
