"""The causal mask on squares of scores, straight to FP8. See `numerics.bdh`.

    causal_quantize      scores_BHTS → tril(scores, -1) as `[B, H, T, S]`, and turned as `[B, S, H, T]`
    symmetric_quantize   scores_BHTS → tril(scores, -1) + tril(scores, -1)ᵀ

A program reads tile (i, j) of the lower half, writes it there, and writes it turned to (j, i): of the other matrix, or
of the same one. Tiles above the diagonal are never read; what is zero is stored as zeros.
"""

# Triton gives the parameters of a kernel their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import delayed, finite, tiles
from octavo.kernels.bdh_tiles import (
    Tile,
    arrange,
    constants,
    load,
    look_at,
    note_amax,
    offsets,
    seed_of,
    state,
    store,
    tasks,
    to_fp8,
)
from octavo.numerics.config import OperandRecipe

_TILE: Tile = (64, 64, 4, 2, 4)


@triton.jit
def _lower(scores_ptr, matrix, i, j, inner, T, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Tile (i, j) of a matrix, zero on the diagonal and above."""
    r, c = i * TILE + tl.arange(0, TILE)[:, None], j * TILE + tl.arange(0, TILE)[None, :]
    x = load(scores_ptr + (matrix.to(tl.int64) * T + i * TILE) * T + j * TILE, inner, (r < T) & (c < T), EVEN)
    return tl.where(r > c, x, tl.zeros([TILE, TILE], x.dtype))


@triton.jit(do_not_specialize=["seed"])
def _causal_kernel(
    scores_ptr,
    row_ptr,
    amax_ptr,
    rows_ptr,
    turned_ptr,
    scale_ptr,
    B,
    H,
    T,
    per_element,
    seed,
    SYMMETRIC: tl.constexpr,
    MEASURE: tl.constexpr,
    SCALING: tl.constexpr,
    RECORD: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`MEASURE`: only find the amax, for a current scale. Tiles are square: TILE_N is TILE_T."""
    if SCALING == delayed.AGAIN:
        if delayed.is_held(row_ptr, FORMAT, MARGIN):
            return
    scale, before = delayed.find_scale(row_ptr, amax_ptr, SCALING, FORMAT, MARGIN)
    inverse, inverse_before = tiles.reciprocal(scale), tiles.reciprocal(before)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    side = tl.cdiv(T, TILE_T)
    count = B * H * side * side
    inner = offsets(T, TILE_T, TILE_N)
    # `[B, S, H, T]`: from one s to the next lie the T positions of H heads.
    stride_t = T if SYMMETRIC else H * T
    inner_t = offsets(stride_t, TILE_T, TILE_N)
    top = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    lost = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=STAGES):
        matrix, i, j = tile // (side * side), tile // side % side, tile % side
        r, c = i * TILE_T + tl.arange(0, TILE_T), j * TILE_N + tl.arange(0, TILE_N)
        inside = (r[:, None] < T) & (c[None, :] < T)
        inside_t = (c[:, None] < T) & (r[None, :] < T)
        first = (matrix.to(tl.int64) * T + i * TILE_T) * T + j * TILE_N
        if SYMMETRIC:
            first_t = (matrix.to(tl.int64) * T + j * TILE_N) * T + i * TILE_T
        else:
            first_t = ((matrix // H * T + j * TILE_N).to(tl.int64) * H + matrix % H) * T + i * TILE_T
        if i >= j:
            narrow = _lower(scores_ptr, matrix, i, j, inner, T, EVEN, TILE_T)
            if SYMMETRIC:
                if i == j:
                    narrow += tl.trans(narrow)  # of each pair one is zero
            x = narrow.to(tl.float32)
            top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(x)))
            if not MEASURE:
                q, v = to_fp8(x, inverse, seed, first + inner, dtype, narrow.dtype, FORMAT, STOCHASTIC)
                store(rows_ptr + first, inner, q, inside, EVEN)
                if STOCHASTIC:
                    q_t = tiles.cast(tl.trans(v), dtype, tl.float32)
                else:
                    x_t = tl.trans(narrow).to(tl.float32)
                    q_t, _ = to_fp8(x_t, inverse, seed, 0, dtype, narrow.dtype, FORMAT, False)
                if SYMMETRIC:
                    if i > j:
                        store(turned_ptr + first_t, inner_t, q_t, inside_t, EVEN)
                else:
                    store(turned_ptr + first_t, inner_t, q_t, inside_t, EVEN)
                if RECORD:
                    # Below the diagonal of a symmetric matrix, an element stands for two.
                    gone = delayed.lost_of_eight(x, v, inverse_before, seed, first + inner, FORMAT, STOCHASTIC, SCALING)
                    lost += tl.where(i > j, gone * 2, gone) if SYMMETRIC else gone
        elif not SYMMETRIC and not MEASURE:
            zeros = tl.zeros([TILE_T, TILE_N], tl.float32).to(dtype)
            store(rows_ptr + first, inner, zeros, inside, EVEN)
            store(turned_ptr + first_t, inner_t, tl.trans(zeros), inside_t, EVEN)
    most, bad, beyond = look_at(
        top, float("inf") if MEASURE else delayed.largest_counted(scale, before, FORMAT, MARGIN, SCALING)
    )
    clipped = side * 0
    if beyond:
        most = 0.0
        for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
            matrix, i, j = tile // (side * side), tile // side % side, tile % side
            if i >= j:
                x = _lower(scores_ptr, matrix, i, j, inner, T, EVEN, TILE_T).to(tl.float32)
                most = tl.maximum(most, tiles.largest(finite.magnitude(x)))
                clipped += delayed.clipped(x, scale, before, FORMAT, SCALING) * (2 if SYMMETRIC else 1)
    if MEASURE:
        note_amax(amax_ptr, most)
    else:
        if RECORD:
            tiles.record(row_ptr, most, bad, tl.sum(tl.sum(lost, axis=1), axis=0), clipped, per_element)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            if RECORD:
                delayed.note_use(row_ptr, amax_ptr, scale, SCALING, FORMAT, MARGIN)


def causal_quantize(
    scores_BHTS: Tensor, row: Tensor, recipe: OperandRecipe, *, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, H, T, S]`, the scale, and `[B, S, H, T]`."""
    B, H, T, S = scores_BHTS.shape
    columns = scores_BHTS.new_empty(B, S, H, T, dtype=recipe.format.dtype)
    return *_run(scores_BHTS, columns, row, recipe, symmetric=False, record=record), columns


def symmetric_quantize(scores_BHTS: Tensor, row: Tensor, recipe: OperandRecipe) -> tuple[Tensor, Tensor]:
    """`[B, H, T, S]` and the scale."""
    return _run(scores_BHTS, None, row, recipe, symmetric=True, record=True)


def _run(
    scores: Tensor, turned: Tensor | None, row: Tensor, recipe: OperandRecipe, *, symmetric: bool, record: bool
) -> tuple[Tensor, Tensor]:
    B, H, T, _ = scores.shape
    row, amax = state(row, recipe, record)
    rows, scale = scores.new_empty(scores.shape, dtype=recipe.format.dtype), row.new_empty(())
    grid, launch = arrange(scores, B * H, T, T, _TILE)
    seed = seed_of(recipe)
    for task in tasks(recipe):
        _causal_kernel[grid](
            scores.contiguous(),
            *(row, amax),
            *(rows, rows if turned is None else turned, scale),
            *(B, H, T),
            1.0 / scores.numel(),
            seed,
            SYMMETRIC=symmetric,
            RECORD=record or recipe.delayed,
            **task,
            **constants(recipe),
            **launch,
        )
    return rows, scale
