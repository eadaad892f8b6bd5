"""The forward kernels of a fused BDH layer: relu and RoPE to FP8, and s · t to FP8. See `spec.py`.

    relu_rope            s_pre_BTHN → q_BHTN in FP8, and relu(s_pre) in FP8 for backward
    rope_columns         the saved s → q again, transposed, q_BHNT, with the scale of forward
    gate                 s_pre_BTHN, t_pre_HBTN → z_BTHN in FP8, and relu(t_pre) in FP8 for backward

A tile is TILE_T positions by TILE_N neurons of one sequence and head. The angles of RoPE are the same for every
sequence and head, so a program loads one tile of angles and loops over all of them with it in registers: the tables are
read once in each pass, not B · H times.

The largest bit pattern stays in registers, and only a program that met values beyond the format's range loops over its
tiles a second time to count them.
"""

# Triton gives the parameters of a kernel their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import delayed, finite, tiles
from octavo.models.bdh.kernels.tiles import (
    TL_DTYPES,
    Tile,
    amax_tensor,
    check_top,
    draw_seed,
    joined_start,
    launch_options,
    load,
    load_angles,
    offsets,
    passes,
    recipe_constants,
    record_amax,
    relu,
    rotate,
    stacked_start,
    store,
    to_fp8,
)
from octavo.numerics.config import OperandRecipe
from octavo.numerics.quantize import Quantized

_ROWS: Tile = (16, 256, 4, 3, 4)
_COLUMNS: Tile = (64, 64, 4, 2, 4)


@triton.jit
def _relu_rope_tile(s_pre_ptr, cos, sin, bh, t0, n0, joined, inside, H, T, N, EVEN: tl.constexpr):
    """Return q and s of one tile, rounded as they would be in memory."""
    x = load(s_pre_ptr + joined_start(bh // H, bh % H, t0, n0, H, T, N), joined, inside, EVEN)
    s = relu(x.to(tl.float32))
    return tiles.round_to(rotate(s, cos, sin), x.dtype).to(tl.float32), s


@triton.jit(do_not_specialize=["seed"])
def _relu_rope_kernel(
    s_pre_ptr,
    cos_ptr,
    sin_ptr,
    q_state_ptr,
    q_amax_ptr,
    s_state_ptr,
    s_amax_ptr,
    q_ptr,
    q_scale_ptr,
    s_ptr,
    s_scale_ptr,
    B,
    H,
    T,
    N,
    per_element,
    seed,
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
    """Quantise q and s. `MEASURE`: only find their amax, for current scales."""
    if SCALING == delayed.AGAIN:
        if delayed.is_held(q_state_ptr, FORMAT, MARGIN) & delayed.is_held(s_state_ptr, FORMAT, MARGIN):
            return
    q_scale, q_before = delayed.find_scale(q_state_ptr, q_amax_ptr, SCALING, FORMAT, MARGIN)
    s_scale, s_before = delayed.find_scale(s_state_ptr, s_amax_ptr, SCALING, FORMAT, MARGIN)
    q_inverse, s_inverse = tiles.reciprocal(q_scale), tiles.reciprocal(s_scale)
    inverse_before = tiles.reciprocal(q_before)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    source: tl.constexpr = s_pre_ptr.dtype.element_ty
    across = tl.cdiv(N, TILE_N)
    count = tl.cdiv(T, TILE_T) * across
    joined, stacked = offsets(H * N, TILE_T, TILE_N), offsets(N, TILE_T, TILE_N)
    q_top = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    s_top = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    lost = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
        t0, n0 = tile // across * TILE_T, tile % across * TILE_N
        inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 + tl.arange(0, TILE_N)[None, :] < N)
        cos, sin = load_angles(cos_ptr, sin_ptr, t0, n0, T, N, EVEN, TILE_T, TILE_N)
        for bh in tl.range(0, B * H, num_stages=STAGES):
            q, s = _relu_rope_tile(s_pre_ptr, cos, sin, bh, t0, n0, joined, inside, H, T, N, EVEN)
            q_top = tl.maximum(q_top, tiles.largest_of_eight(tiles.magnitude_bits(q)))
            s_top = tl.maximum(s_top, tiles.largest_of_eight(tiles.magnitude_bits(s)))
            if not MEASURE:
                q_first = stacked_start(bh // H, bh % H, H, t0, n0, T, N)
                s_first = joined_start(bh // H, bh % H, t0, n0, H, T, N)
                q8, v = to_fp8(q, q_inverse, seed, q_first + stacked, dtype, source, FORMAT, STOCHASTIC)
                s8, _ = to_fp8(s, s_inverse, seed + 1, s_first + joined, dtype, source, FORMAT, STOCHASTIC)
                store(q_ptr + q_first, stacked, q8, inside, EVEN)
                store(s_ptr + s_first, joined, s8, inside, EVEN)
                lost += delayed.lost_of_eight(
                    q, v, inverse_before, seed, q_first + stacked, FORMAT, STOCHASTIC, SCALING
                )
    infinity = float("inf")
    q_limit = delayed.largest_counted(q_scale, q_before, FORMAT, MARGIN, SCALING)
    q_most, q_non_finite, q_beyond = check_top(q_top, infinity if MEASURE else q_limit)
    s_limit = delayed.largest_counted(s_scale, s_before, FORMAT, MARGIN, SCALING)
    s_most, s_non_finite, s_beyond = check_top(s_top, infinity if MEASURE else s_limit)
    q_clipped, s_clipped = count * 0, count * 0
    if q_beyond | s_beyond:
        q_most, s_most = 0.0, 0.0
        for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
            t0, n0 = tile // across * TILE_T, tile % across * TILE_N
            inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 + tl.arange(0, TILE_N)[None, :] < N)
            cos, sin = load_angles(cos_ptr, sin_ptr, t0, n0, T, N, EVEN, TILE_T, TILE_N)
            for bh in tl.range(0, B * H, num_stages=1):
                q, s = _relu_rope_tile(s_pre_ptr, cos, sin, bh, t0, n0, joined, inside, H, T, N, EVEN)
                q_most = tl.maximum(q_most, tiles.largest(finite.magnitude(q)))
                s_most = tl.maximum(s_most, tiles.largest(finite.magnitude(s)))
                q_clipped += delayed.clipped(q, q_scale, q_before, FORMAT, SCALING)
                s_clipped += delayed.clipped(s, s_scale, s_before, FORMAT, SCALING)
    if MEASURE:
        record_amax(q_amax_ptr, q_most)
        record_amax(s_amax_ptr, s_most)
    else:
        all_lost = tl.sum(tl.sum(lost, axis=1), axis=0)
        tiles.record(q_state_ptr, q_most, q_non_finite, all_lost, q_clipped, per_element)
        tiles.record(s_state_ptr, s_most, s_non_finite, all_lost * 0, s_clipped, per_element)
        if tl.program_id(0) == 0:
            tl.store(q_scale_ptr, q_scale)
            tl.store(s_scale_ptr, s_scale)
            delayed.note_use(q_state_ptr, q_amax_ptr, q_scale, SCALING, FORMAT, MARGIN)
            delayed.note_use(s_state_ptr, s_amax_ptr, s_scale, SCALING, FORMAT, MARGIN)


@triton.jit(do_not_specialize=["seed"])
def _rope_columns_kernel(
    s_ptr,
    s_scale_ptr,
    cos_ptr,
    sin_ptr,
    q_scale_ptr,
    columns_ptr,
    B,
    H,
    T,
    N,
    seed,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Quantise q, recomputed from the saved s, transposed."""
    s_scale, q_inverse = tl.load(s_scale_ptr), tiles.reciprocal(tl.load(q_scale_ptr))
    across = tl.cdiv(N, TILE_N)
    joined, transposed = offsets(H * N, TILE_T, TILE_N), offsets(T, TILE_N, TILE_T)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, TILE_T) * across, tl.num_programs(0), num_stages=1):
        t0, n0 = tile // across * TILE_T, tile % across * TILE_N
        inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 + tl.arange(0, TILE_N)[None, :] < N)
        inside_t = (n0 + tl.arange(0, TILE_N)[:, None] < N) & (t0 + tl.arange(0, TILE_T)[None, :] < T)
        cos, sin = load_angles(cos_ptr, sin_ptr, t0, n0, T, N, EVEN, TILE_T, TILE_N)
        for bh in tl.range(0, B * H, num_stages=STAGES):
            s = (
                load(s_ptr + joined_start(bh // H, bh % H, t0, n0, H, T, N), joined, inside, EVEN).to(tl.float32)
                * s_scale
            )
            q = tl.trans(tiles.round_to(rotate(s, cos, sin), DTYPE)).to(tl.float32)
            tile_start = (bh * N + n0).to(tl.int64) * T + t0
            dtype: tl.constexpr = columns_ptr.dtype.element_ty
            q8, _ = to_fp8(q, q_inverse, seed, tile_start + transposed, dtype, DTYPE, FORMAT, STOCHASTIC)
            store(columns_ptr + tile_start, transposed, q8, inside_t, EVEN)


@triton.jit
def _gate_tile(s_pre_ptr, t_pre_ptr, s_first, t_first, joined, stacked, inside, EVEN: tl.constexpr):
    """Return z and t of one tile, rounded as they would be in memory."""
    s_pre = load(s_pre_ptr + s_first, joined, inside, EVEN)
    t = relu(load(t_pre_ptr + t_first, stacked, inside, EVEN).to(tl.float32))
    return tiles.round_to(relu(s_pre.to(tl.float32)) * t, s_pre.dtype).to(tl.float32), t


@triton.jit(do_not_specialize=["seed"])
def _gate_kernel(
    s_pre_ptr,
    t_pre_ptr,
    z_state_ptr,
    z_amax_ptr,
    t_state_ptr,
    t_amax_ptr,
    z_ptr,
    z_scale_ptr,
    t_ptr,
    t_scale_ptr,
    B,
    H,
    T,
    N,
    per_element,
    seed,
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
    """Quantise z and t. `MEASURE`: only find their amax, for current scales."""
    if SCALING == delayed.AGAIN:
        if delayed.is_held(z_state_ptr, FORMAT, MARGIN) & delayed.is_held(t_state_ptr, FORMAT, MARGIN):
            return
    z_scale, z_before = delayed.find_scale(z_state_ptr, z_amax_ptr, SCALING, FORMAT, MARGIN)
    t_scale, t_before = delayed.find_scale(t_state_ptr, t_amax_ptr, SCALING, FORMAT, MARGIN)
    z_inverse, t_inverse = tiles.reciprocal(z_scale), tiles.reciprocal(t_scale)
    inverse_before = tiles.reciprocal(z_before)
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    source: tl.constexpr = s_pre_ptr.dtype.element_ty
    across = tl.cdiv(N, TILE_N)
    each = tl.cdiv(T, TILE_T) * across
    joined, stacked = offsets(H * N, TILE_T, TILE_N), offsets(N, TILE_T, TILE_N)
    z_top = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    t_top = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    lost = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    for tile in tl.range(tl.program_id(0), B * H * each, tl.num_programs(0), num_stages=STAGES):
        b, h = tile // each // H, tile // each % H
        t0, n0 = tile % each // across * TILE_T, tile % across * TILE_N
        inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 + tl.arange(0, TILE_N)[None, :] < N)
        tile_start = joined_start(b, h, t0, n0, H, T, N)
        z, t = _gate_tile(
            s_pre_ptr, t_pre_ptr, tile_start, stacked_start(h, b, B, t0, n0, T, N), joined, stacked, inside, EVEN
        )
        z_top = tl.maximum(z_top, tiles.largest_of_eight(tiles.magnitude_bits(z)))
        t_top = tl.maximum(t_top, tiles.largest_of_eight(tiles.magnitude_bits(t)))
        if not MEASURE:
            z8, v = to_fp8(z, z_inverse, seed, tile_start + joined, dtype, source, FORMAT, STOCHASTIC)
            t8, _ = to_fp8(t, t_inverse, seed + 1, tile_start + joined, dtype, source, FORMAT, STOCHASTIC)
            store(z_ptr + tile_start, joined, z8, inside, EVEN)
            store(t_ptr + tile_start, joined, t8, inside, EVEN)
            lost += delayed.lost_of_eight(z, v, inverse_before, seed, tile_start + joined, FORMAT, STOCHASTIC, SCALING)
    infinity = float("inf")
    z_limit = delayed.largest_counted(z_scale, z_before, FORMAT, MARGIN, SCALING)
    z_most, z_non_finite, z_beyond = check_top(z_top, infinity if MEASURE else z_limit)
    t_limit = delayed.largest_counted(t_scale, t_before, FORMAT, MARGIN, SCALING)
    t_most, t_non_finite, t_beyond = check_top(t_top, infinity if MEASURE else t_limit)
    z_clipped, t_clipped = each * 0, each * 0
    if z_beyond | t_beyond:
        z_most, t_most = 0.0, 0.0
        for tile in tl.range(tl.program_id(0), B * H * each, tl.num_programs(0), num_stages=1):
            b, h = tile // each // H, tile // each % H
            t0, n0 = tile % each // across * TILE_T, tile % across * TILE_N
            inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 + tl.arange(0, TILE_N)[None, :] < N)
            tile_start = joined_start(b, h, t0, n0, H, T, N)
            z, t = _gate_tile(
                s_pre_ptr, t_pre_ptr, tile_start, stacked_start(h, b, B, t0, n0, T, N), joined, stacked, inside, EVEN
            )
            z_most = tl.maximum(z_most, tiles.largest(finite.magnitude(z)))
            t_most = tl.maximum(t_most, tiles.largest(finite.magnitude(t)))
            z_clipped += delayed.clipped(z, z_scale, z_before, FORMAT, SCALING)
            t_clipped += delayed.clipped(t, t_scale, t_before, FORMAT, SCALING)
    if MEASURE:
        record_amax(z_amax_ptr, z_most)
        record_amax(t_amax_ptr, t_most)
    else:
        all_lost = tl.sum(tl.sum(lost, axis=1), axis=0)
        tiles.record(z_state_ptr, z_most, z_non_finite, all_lost, z_clipped, per_element)
        tiles.record(t_state_ptr, t_most, t_non_finite, all_lost * 0, t_clipped, per_element)
        if tl.program_id(0) == 0:
            tl.store(z_scale_ptr, z_scale)
            tl.store(t_scale_ptr, t_scale)
            delayed.note_use(z_state_ptr, z_amax_ptr, z_scale, SCALING, FORMAT, MARGIN)
            delayed.note_use(t_state_ptr, t_amax_ptr, t_scale, SCALING, FORMAT, MARGIN)


def relu_rope(
    s_pre_BTHN: Tensor, cos: Tensor, sin: Tensor, q_state: Tensor, s_state: Tensor, recipe: OperandRecipe
) -> tuple[Quantized, Quantized]:
    """Return q as `[B, H, T, N]` and s as `[B, T, H, N]`."""
    B, T, H, N = s_pre_BTHN.shape
    q = Quantized(s_pre_BTHN.new_empty(B, H, T, N, dtype=recipe.format.dtype), q_state.new_empty(()))
    s = Quantized(s_pre_BTHN.new_empty(B, T, H, N, dtype=recipe.format.dtype), s_state.new_empty(()))
    grid, launch = launch_options(s_pre_BTHN, 1, T, N, _ROWS)
    q_amax, s_amax = amax_tensor(q_state, recipe), amax_tensor(s_state, recipe)
    seed = draw_seed(recipe)
    for task in passes(recipe):
        _relu_rope_kernel[grid](
            s_pre_BTHN.contiguous(),
            *(cos, sin),
            *(q_state, q_amax, s_state, s_amax),
            *(*q, *s),
            *(B, H, T, N),
            1.0 / s_pre_BTHN.numel(),
            seed,
            **task,
            **recipe_constants(recipe),
            **launch,
        )
    return q, s


def rope_columns(
    s: Quantized, cos: Tensor, sin: Tensor, q_scale: Tensor, recipe: OperandRecipe, dtype: torch.dtype
) -> Tensor:
    """Return q as `[B, H, N, T]`, from the s that forward saved."""
    B, T, H, N = s.data.shape
    columns = s.data.new_empty(B, H, N, T, dtype=recipe.format.dtype)
    grid, launch = launch_options(s.data, 1, T, N, _COLUMNS)
    _rope_columns_kernel[grid](
        *s,
        *(cos, sin),
        q_scale,
        columns,
        *(B, H, T, N),
        draw_seed(recipe),
        DTYPE=TL_DTYPES[dtype],
        FORMAT=recipe.format,
        STOCHASTIC=recipe.rounding == "stochastic",
        **launch,
    )
    return columns


def gate(
    s_pre_BTHN: Tensor, t_pre_HBTN: Tensor, z_state: Tensor, t_state: Tensor, recipe: OperandRecipe
) -> tuple[Quantized, Quantized]:
    """Return z and t, both as `[B, T, H, N]`."""
    B, T, H, N = s_pre_BTHN.shape
    z, t = (
        Quantized(s_pre_BTHN.new_empty(B, T, H, N, dtype=recipe.format.dtype), z_state.new_empty(())) for _ in range(2)
    )
    grid, launch = launch_options(s_pre_BTHN, B * H, T, N, _ROWS)
    z_amax, t_amax = amax_tensor(z_state, recipe), amax_tensor(t_state, recipe)
    seed = draw_seed(recipe)
    for task in passes(recipe):
        _gate_kernel[grid](
            s_pre_BTHN.contiguous(),
            t_pre_HBTN.contiguous(),
            *(z_state, z_amax, t_state, t_amax),
            *(*z, *t),
            *(B, H, T, N),
            1.0 / s_pre_BTHN.numel(),
            seed,
            **task,
            **recipe_constants(recipe),
            **launch,
        )
    return z, t
