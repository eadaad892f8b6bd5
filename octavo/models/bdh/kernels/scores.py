"""The causal mask on the scores, with its result in FP8. See `spec.py`.

    mask              scores_BHTS → tril(scores, -1) as `[B, H, T, S]`, and transposed as `[B, S, H, T]`
    mask, symmetric   scores_BHTS → tril(scores, -1) + tril(scores, -1)ᵀ

A program reads tile (i, j) of the lower half, stores it at (i, j), and stores its transpose at (j, i), of the second
output or of the same one. Tiles above the diagonal are never read; their zeros are stored as such.
"""

# Triton gives the parameters of a kernel their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import delayed, finite, tiles
from octavo.models.bdh.kernels.tiles import (
    Tile,
    amax_tensor,
    check_top,
    draw_seed,
    launch_options,
    load,
    offsets,
    passes,
    recipe_constants,
    record_amax,
    store,
    to_fp8,
)
from octavo.numerics.config import OperandRecipe

_TILE: Tile = (64, 64, 4, 2, 4)


@triton.jit
def _lower(scores_ptr, matrix, i, j, inner, T, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Load tile (i, j) of a matrix, with zeros on and above the diagonal."""
    r, c = i * TILE + tl.arange(0, TILE)[:, None], j * TILE + tl.arange(0, TILE)[None, :]
    x = load(scores_ptr + (matrix.to(tl.int64) * T + i * TILE) * T + j * TILE, inner, (r < T) & (c < T), EVEN)
    return tl.where(r > c, x, tl.zeros([TILE, TILE], x.dtype))


@triton.jit(do_not_specialize=["seed"])
def _mask_kernel(
    scores_ptr,
    state_ptr,
    amax_ptr,
    rows_ptr,
    transposed_ptr,
    scale_ptr,
    B,
    H,
    T,
    per_element,
    seed,
    SYMMETRIC: tl.constexpr,
    MEASURE: tl.constexpr,
    SCALING: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Mask and quantise. `MEASURE`: only find the amax, for a current scale. Tiles are square: TILE_N is TILE_T."""
    if SCALING == delayed.AGAIN:
        if delayed.is_held(state_ptr, FORMAT, MARGIN):
            return
    scale, before = delayed.find_scale(state_ptr, amax_ptr, SCALING, FORMAT, MARGIN)
    inverse, inverse_before = tiles.reciprocal(scale), tiles.reciprocal(before)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    side = tl.cdiv(T, TILE_T)
    count = B * H * side * side
    inner = offsets(T, TILE_T, TILE_N)
    # In `[B, S, H, T]`, one s and the next are the T positions of H heads apart.
    stride_t = T if SYMMETRIC else H * T
    inner_t = offsets(stride_t, TILE_T, TILE_N)
    top = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    lost = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=STAGES):
        matrix, i, j = tile // (side * side), tile // side % side, tile % side
        r, c = i * TILE_T + tl.arange(0, TILE_T), j * TILE_N + tl.arange(0, TILE_N)
        inside = (r[:, None] < T) & (c[None, :] < T)
        inside_t = (c[:, None] < T) & (r[None, :] < T)
        tile_start = (matrix.to(tl.int64) * T + i * TILE_T) * T + j * TILE_N
        if SYMMETRIC:
            first_t = (matrix.to(tl.int64) * T + j * TILE_N) * T + i * TILE_T
        else:
            first_t = ((matrix // H * T + j * TILE_N).to(tl.int64) * H + matrix % H) * T + i * TILE_T
        if i >= j:
            rounded = _lower(scores_ptr, matrix, i, j, inner, T, EVEN, TILE_T)
            if SYMMETRIC:
                if i == j:
                    rounded += tl.trans(rounded)  # exact: in each element one of the two is zero
            x = rounded.to(tl.float32)
            top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(x)))
            if not MEASURE:
                q, v = to_fp8(x, inverse, seed, tile_start + inner, dtype, rounded.dtype, FORMAT, STOCHASTIC)
                store(rows_ptr + tile_start, inner, q, inside, EVEN)
                if STOCHASTIC:
                    q_t = tiles.cast(tl.trans(v), dtype, tl.float32)
                else:
                    x_t = tl.trans(rounded).to(tl.float32)
                    q_t, _ = to_fp8(x_t, inverse, seed, 0, dtype, rounded.dtype, FORMAT, False)
                if SYMMETRIC:
                    if i > j:
                        store(transposed_ptr + first_t, inner_t, q_t, inside_t, EVEN)
                else:
                    store(transposed_ptr + first_t, inner_t, q_t, inside_t, EVEN)
                # An element below the diagonal of a symmetric matrix counts twice.
                underflow = delayed.lost_of_eight(
                    x, v, inverse_before, seed, tile_start + inner, FORMAT, STOCHASTIC, SCALING
                )
                lost += tl.where(i > j, underflow * 2, underflow) if SYMMETRIC else underflow
        elif not SYMMETRIC and not MEASURE:
            zeros = tl.zeros([TILE_T, TILE_N], tl.float32).to(dtype)
            store(rows_ptr + tile_start, inner, zeros, inside, EVEN)
            store(transposed_ptr + first_t, inner_t, tl.trans(zeros), inside_t, EVEN)
    most, non_finite, beyond = check_top(
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
        record_amax(amax_ptr, most)
    else:
        tiles.record(state_ptr, most, non_finite, tl.sum(tl.sum(lost, axis=1), axis=0), clipped, per_element)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            delayed.note_use(state_ptr, amax_ptr, scale, SCALING, FORMAT, MARGIN)


def mask(
    scores_BHTS: Tensor, state: Tensor, recipe: OperandRecipe, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tril(scores, -1) as `[B, H, T, S]`, its scale, and its transpose as `[B, S, H, T]`.

    `symmetric`: return tril(scores, -1) plus its transpose instead, and an empty tensor in the third place.
    """
    B, H, T, S = scores_BHTS.shape
    rows = scores_BHTS.new_empty(B, H, T, S, dtype=recipe.format.dtype)
    transposed = rows.new_empty(0) if symmetric else rows.new_empty(B, S, H, T)
    scale, amax = state.new_empty(()), amax_tensor(state, recipe)
    grid, launch = launch_options(scores_BHTS, B * H, T, T, _TILE)
    seed = draw_seed(recipe)
    for task in passes(recipe):
        _mask_kernel[grid](
            scores_BHTS.contiguous(),
            *(state, amax),
            *(rows, rows if symmetric else transposed, scale),
            *(B, H, T),
            1.0 / scores_BHTS.numel(),
            seed,
            SYMMETRIC=symmetric,
            **task,
            **recipe_constants(recipe),
            **launch,
        )
    return rows, scale, transposed
