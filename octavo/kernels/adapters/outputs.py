"""Adding the outputs of adapters in one pass, in place, rounded once.

    forward    yᵢ += sᵢ · tᵢ · Bᵢᵀ      plus the residual that the layer would add next, if there is one
    backward   dx += u · [A₁; A₂; …]

Shapes: M tokens, N outputs (or inputs), R the rank, equal for all adapters i, each of which has some of the outputs.
A program stays with its outputs: it loads their part of B, or A, once.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.adapters.tiles import (
    MOST,
    Span,
    are_even,
    choose,
    in_dtype,
    numbers_of,
    padded,
    product,
    select,
    tiles_of,
)
from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.quantize.tensor import load_tile, offsets, store_tile
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import tuning_for

LARGEST_RANK = 256
_LAUNCHES = LaunchCache()


@triton.jit
def add_kernel(
    y_ptr,
    t_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    residual_ptr,
    M,
    N,
    stride_t,
    first0,
    first1,
    first2,
    size0,
    size1,
    size2,
    scaling0,
    scaling1,
    scaling2,
    RANK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Programs: tiles of outputs of one adapter after the other, by parts of tokens. `TRANSPOSED`: B is `[n, R]`."""
    i, j, first, size, scaling, _ = select(
        tl.program_id(0), first0, first1, first2, size0, size1, size2, scaling0, scaling1, scaling2, TILE_N
    )
    b_ptr = choose(i, b0_ptr, b1_ptr, b2_ptr)
    PADDED: tl.constexpr = padded(RANK)
    n, k = j * TILE_N + tl.arange(0, TILE_N), tl.arange(0, PADDED)
    if TRANSPOSED:
        where_b, inside = n[:, None] * RANK + k[None, :], (n[:, None] < size) & (k[None, :] < RANK)
        b = tl.trans(tl.load(b_ptr + where_b, mask=inside, other=0.0))
    else:
        where_b, inside = k[:, None] * size + n[None, :], (k[:, None] < RANK) & (n[None, :] < size)
        b = tl.load(b_ptr + where_b, mask=inside, other=0.0)
    inner = offsets(N, TILE_M, TILE_N)
    y_ptr, residual_ptr = y_ptr + first, residual_ptr + first
    for tile in range(tl.program_id(1), tl.cdiv(M, TILE_M), tl.num_programs(1)):
        row = tl.cast(tile, tl.int32)
        m = row * TILE_M + tl.arange(0, TILE_M)
        where_t = m[:, None] * stride_t + (i * RANK + k)[None, :]
        t = tl.load(t_ptr + where_t, mask=(m[:, None] < M) & (k[None, :] < RANK), other=0.0)
        y = load_tile(y_ptr, row, j, inner, M, size, N, EVEN, TILE_M, TILE_N)
        total = y.to(tl.float32) + product(t.to(b.dtype), b) * scaling
        if RESIDUAL:
            total += load_tile(residual_ptr, row, j, inner, M, size, N, EVEN, TILE_M, TILE_N).to(tl.float32)
        store_tile(y_ptr, tiles.round_to(total, y.dtype), row, j, inner, M, size, N, EVEN, TILE_M, TILE_N)


def can_add(
    y: Tensor, matrices: Sequence[Tensor], spans: Sequence[Span], residual: Tensor | None, *, transposed: bool
) -> bool:
    """Whether `add_outputs` covers this: 16 bits, at most three adapters of one rank, none sharing outputs.

    With a residual, a single adapter over all outputs.
    """
    which = 1 if transposed else 0
    ranks = {matrix.shape[which] for matrix in matrices}
    return (
        y.dtype in (torch.bfloat16, torch.float16)
        and 0 < len(matrices) <= MOST
        and y.numel() > 0
        and y.is_contiguous()
        and len(ranks) == 1
        and max(ranks) <= LARGEST_RANK
        and _are_apart(spans)
        and (residual is None or (_is_alike(residual, y) and spans[0][1] == y.shape[1] and len(spans) == 1))
    )


def _are_apart(spans: Sequence[Span]) -> bool:
    """Whether no two adapters add to the same outputs: their programs would overwrite each other's sums."""
    if len(spans) == 1:
        return True
    ordered = sorted(spans)
    return all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(ordered))


def _is_alike(residual: Tensor, y: Tensor) -> bool:
    return residual.dtype == y.dtype and residual.shape == y.shape and residual.is_contiguous()


def add_outputs(
    y: Tensor,
    t: Tensor,
    matrices: Sequence[Tensor],
    spans: Sequence[Span],
    residual: Tensor | None,
    *,
    transposed: bool,
) -> None:
    """Add `s · t · matrixᵀ` of each adapter to its columns of `y[M, N]`, and the residual.

    `transposed`: matrices are B, `[size, R]`; else A, `[R, size]`. t: `[M, ΣR]`, of y's dtype or in FP32.
    """
    matrices = in_dtype(matrices, y.dtype)
    added = () if residual is None else (residual,)
    key = (tuple(spans), transposed, kind(y, t, *matrices, *added))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(y, t, matrices, spans, residual is not None, transposed))
    launches.run(y, t, *matrices, *(matrices[0],) * (MOST - len(matrices)), *(added or (y,)))


def _build(
    y: Tensor, t: Tensor, matrices: Sequence[Tensor], spans: Sequence[Span], residual: bool, transposed: bool
) -> Launches:
    m, n = y.shape
    rank = matrices[0].shape[1 if transposed else 0]
    tuning = tuning_for(y.device).adapters
    tile_m, tile_n, warps, _, programs, _ = tuning.outputs if rank <= 64 else tuning.outputs_of_large_rank
    across = tiles_of(spans, tile_n)
    splits = max(1, min(-(-m // tile_m), programs * multiprocessors(y.device) // across))
    constants = {
        "RANK": rank,
        "TRANSPOSED": transposed,
        "RESIDUAL": residual,
        "EVEN": m % tile_m == 0 and are_even(spans, tile_n),
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "num_warps": warps,
    }
    launches = Launches(given=6)
    launches.launch(add_kernel, (across, splits), range(6), (m, n, t.stride(0), *numbers_of(spans)), constants)
    return launches
