"""The backward kernels of a fused BDH layer. See `spec.py` for the equations.

    gate_backward        dz_BTHN and the saved s and t → dt_pre in FP8 as rows and columns, and z again as columns
    relu_rope_backward   dq_BHTN, dz_BTHN and the saved s and t → ds_pre in FP8 as rows and columns

Tiles are transposed in the dtype of the gradient, before the cast: transposing FP8 bytes takes more instructions, and
Triton miscompiles it next to another store (triton-lang/triton#11111).
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
    joined_start,
    launch_options,
    load,
    load_angles,
    offsets,
    passes,
    recipe_constants,
    record_amax,
    rotate,
    stacked_start,
    store,
    to_fp8,
)
from octavo.numerics.config import OperandRecipe
from octavo.numerics.quantize import Quantized

_GATE: Tile = (64, 64, 4, 2, 3)
_ROPE: Tile = (64, 32, 4, 2, 4)


@triton.jit
def _gate_tile(dz_ptr, s_ptr, t_ptr, s_scale, t_scale, tile_start, joined, inside, EVEN: tl.constexpr):
    """Return dt and z of one tile, rounded as they would be in memory."""
    dz = load(dz_ptr + tile_start, joined, inside, EVEN)
    s = load(s_ptr + tile_start, joined, inside, EVEN).to(tl.float32) * s_scale
    t = load(t_ptr + tile_start, joined, inside, EVEN).to(tl.float32) * t_scale
    dt = tl.where(t > 0.0, dz.to(tl.float32) * s, 0.0)
    return tiles.round_to(dt, dz.dtype), tiles.round_to(s * t, dz.dtype)


@triton.jit(do_not_specialize=["seed"])
def _gate_backward_kernel(
    dz_ptr,
    s_ptr,
    s_scale_ptr,
    t_ptr,
    t_scale_ptr,
    z_scale_ptr,
    state_ptr,
    amax_ptr,
    rows_ptr,
    columns_ptr,
    scale_ptr,
    z_ptr,
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
    Z_FORMAT: tl.constexpr,
    Z_STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Quantise dt in both layouts, and z transposed. `MEASURE`: only find the amax of dt, for a current scale."""
    if SCALING == delayed.AGAIN:
        if delayed.is_held(state_ptr, FORMAT, MARGIN):
            return
    scale, before = delayed.find_scale(state_ptr, amax_ptr, SCALING, FORMAT, MARGIN)
    inverse, inverse_before = tiles.reciprocal(scale), tiles.reciprocal(before)
    s_scale, t_scale = tl.load(s_scale_ptr), tl.load(t_scale_ptr)
    z_inverse = tiles.reciprocal(tl.load(z_scale_ptr))
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    across = tl.cdiv(N, TILE_N)
    each = tl.cdiv(T, TILE_T) * across
    M = B * T
    joined, stacked, transposed = offsets(H * N, TILE_T, TILE_N), offsets(N, TILE_T, TILE_N), offsets(M, TILE_N, TILE_T)
    top = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    lost = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    for tile in tl.range(tl.program_id(0), B * H * each, tl.num_programs(0), num_stages=STAGES):
        b, h = tile // each // H, tile // each % H
        t0, n0 = tile % each // across * TILE_T, tile % across * TILE_N
        inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 + tl.arange(0, TILE_N)[None, :] < N)
        inside_t = (n0 + tl.arange(0, TILE_N)[:, None] < N) & (t0 + tl.arange(0, TILE_T)[None, :] < T)
        tile_start = joined_start(b, h, t0, n0, H, T, N)
        rounded, z = _gate_tile(dz_ptr, s_ptr, t_ptr, s_scale, t_scale, tile_start, joined, inside, EVEN)
        dt = rounded.to(tl.float32)
        top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(dt)))
        if not MEASURE:
            rows_first = stacked_start(h, b, B, t0, n0, T, N)
            q, v = to_fp8(dt, inverse, seed, rows_first + stacked, dtype, rounded.dtype, FORMAT, STOCHASTIC)
            store(rows_ptr + rows_first, stacked, q, inside, EVEN)
            lost += delayed.lost_of_eight(
                dt, v, inverse_before, seed, rows_first + stacked, FORMAT, STOCHASTIC, SCALING
            )
            columns_first = (h * N + n0).to(tl.int64) * M + b * T + t0
            if STOCHASTIC:
                q_t = tiles.cast(tl.trans(v), dtype, tl.float32)  # the same random bits in both layouts
            else:
                x_t = tl.trans(rounded).to(tl.float32)
                q_t, _ = to_fp8(x_t, inverse, seed, 0, dtype, rounded.dtype, FORMAT, False)
            store(columns_ptr + columns_first, transposed, q_t, inside_t, EVEN)
            z_t, _ = to_fp8(
                tl.trans(z).to(tl.float32),
                z_inverse,
                seed + 1,
                columns_first + transposed,
                z_ptr.dtype.element_ty,
                z.dtype,
                Z_FORMAT,
                Z_STOCHASTIC,
            )
            store(z_ptr + columns_first, transposed, z_t, inside_t, EVEN)
    most, non_finite, beyond = check_top(
        top, float("inf") if MEASURE else delayed.largest_counted(scale, before, FORMAT, MARGIN, SCALING)
    )
    clipped = each * 0
    if beyond:
        most = 0.0
        for tile in tl.range(tl.program_id(0), B * H * each, tl.num_programs(0), num_stages=1):
            b, h = tile // each // H, tile // each % H
            t0, n0 = tile % each // across * TILE_T, tile % across * TILE_N
            inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 + tl.arange(0, TILE_N)[None, :] < N)
            tile_start = joined_start(b, h, t0, n0, H, T, N)
            rounded, _ = _gate_tile(dz_ptr, s_ptr, t_ptr, s_scale, t_scale, tile_start, joined, inside, EVEN)
            most = tl.maximum(most, tiles.largest(finite.magnitude(rounded.to(tl.float32))))
            clipped += delayed.clipped(rounded.to(tl.float32), scale, before, FORMAT, SCALING)
    if MEASURE:
        record_amax(amax_ptr, most)
    else:
        tiles.record(state_ptr, most, non_finite, tl.sum(tl.sum(lost, axis=1), axis=0), clipped, per_element)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            delayed.note_use(state_ptr, amax_ptr, scale, SCALING, FORMAT, MARGIN)


@triton.jit
def _relu_rope_tile(
    dq_ptr, dz_ptr, s_ptr, t_ptr, t_scale, cos, sin, bh, t0, n0, joined, stacked, inside, H, T, N, EVEN: tl.constexpr
):
    """Return ds of one tile, rounded as it would be in memory."""
    tile_start = joined_start(bh // H, bh % H, t0, n0, H, T, N)
    dq = load(dq_ptr + stacked_start(bh // H, bh % H, H, t0, n0, T, N), stacked, inside, EVEN).to(tl.float32)
    dz = load(dz_ptr + tile_start, joined, inside, EVEN)
    s = load(s_ptr + tile_start, joined, inside, EVEN).to(tl.float32)
    t = load(t_ptr + tile_start, joined, inside, EVEN).to(tl.float32) * t_scale
    ds = rotate(dq, cos, sin) + dz.to(tl.float32) * t
    return tiles.round_to(tl.where(s > 0.0, ds, 0.0), dz.dtype)


@triton.jit(do_not_specialize=["seed"])
def _relu_rope_backward_kernel(
    dq_ptr,
    dz_ptr,
    s_ptr,
    t_ptr,
    t_scale_ptr,
    cos_ptr,
    sin_ptr,
    state_ptr,
    amax_ptr,
    rows_ptr,
    columns_ptr,
    scale_ptr,
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
    """Quantise ds in both layouts. `MEASURE`: only find its amax, for a current scale."""
    if SCALING == delayed.AGAIN:
        if delayed.is_held(state_ptr, FORMAT, MARGIN):
            return
    scale, before = delayed.find_scale(state_ptr, amax_ptr, SCALING, FORMAT, MARGIN)
    inverse, inverse_before = tiles.reciprocal(scale), tiles.reciprocal(before)
    t_scale = tl.load(t_scale_ptr)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    across = tl.cdiv(N, TILE_N)
    count = tl.cdiv(T, TILE_T) * across
    M = B * T
    joined, stacked, transposed = offsets(H * N, TILE_T, TILE_N), offsets(N, TILE_T, TILE_N), offsets(M, TILE_N, TILE_T)
    top = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    lost = tl.zeros([TILE_T, TILE_N // 8], tl.int32)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
        t0, n0 = tile // across * TILE_T, tile % across * TILE_N
        inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 + tl.arange(0, TILE_N)[None, :] < N)
        inside_t = (n0 + tl.arange(0, TILE_N)[:, None] < N) & (t0 + tl.arange(0, TILE_T)[None, :] < T)
        cos, sin = load_angles(cos_ptr, sin_ptr, t0, n0, T, N, EVEN, TILE_T, TILE_N)
        inverse_sin = -sin
        for bh in tl.range(0, B * H, num_stages=STAGES):
            rounded = _relu_rope_tile(
                dq_ptr,
                dz_ptr,
                s_ptr,
                t_ptr,
                t_scale,
                cos,
                inverse_sin,
                bh,
                t0,
                n0,
                joined,
                stacked,
                inside,
                H,
                T,
                N,
                EVEN,
            )
            ds = rounded.to(tl.float32)
            top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(ds)))
            if not MEASURE:
                tile_start = joined_start(bh // H, bh % H, t0, n0, H, T, N)
                q, v = to_fp8(ds, inverse, seed, tile_start + joined, dtype, rounded.dtype, FORMAT, STOCHASTIC)
                store(rows_ptr + tile_start, joined, q, inside, EVEN)
                lost += delayed.lost_of_eight(
                    ds, v, inverse_before, seed, tile_start + joined, FORMAT, STOCHASTIC, SCALING
                )
                if STOCHASTIC:
                    q_t = tiles.cast(tl.trans(v), dtype, tl.float32)
                else:
                    x_t = tl.trans(rounded).to(tl.float32)
                    q_t, _ = to_fp8(x_t, inverse, seed, 0, dtype, rounded.dtype, FORMAT, False)
                columns_first = (bh % H * N + n0).to(tl.int64) * M + bh // H * T + t0
                store(columns_ptr + columns_first, transposed, q_t, inside_t, EVEN)
    most, non_finite, beyond = check_top(
        top, float("inf") if MEASURE else delayed.largest_counted(scale, before, FORMAT, MARGIN, SCALING)
    )
    clipped = count * 0
    if beyond:
        most = 0.0
        for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
            t0, n0 = tile // across * TILE_T, tile % across * TILE_N
            inside = (t0 + tl.arange(0, TILE_T)[:, None] < T) & (n0 + tl.arange(0, TILE_N)[None, :] < N)
            cos, sin = load_angles(cos_ptr, sin_ptr, t0, n0, T, N, EVEN, TILE_T, TILE_N)
            for bh in tl.range(0, B * H, num_stages=1):
                rounded = _relu_rope_tile(
                    dq_ptr, dz_ptr, s_ptr, t_ptr, t_scale, cos, -sin, bh, t0, n0, joined, stacked, inside, H, T, N, EVEN
                )
                most = tl.maximum(most, tiles.largest(finite.magnitude(rounded.to(tl.float32))))
                clipped += delayed.clipped(rounded.to(tl.float32), scale, before, FORMAT, SCALING)
    if MEASURE:
        record_amax(amax_ptr, most)
    else:
        tiles.record(state_ptr, most, non_finite, tl.sum(tl.sum(lost, axis=1), axis=0), clipped, per_element)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            delayed.note_use(state_ptr, amax_ptr, scale, SCALING, FORMAT, MARGIN)


def gate_backward(
    dz_BTHN: Tensor,
    s: Quantized,
    t: Quantized,
    z_scale: Tensor,
    state: Tensor,
    recipe: OperandRecipe,
    recipe_z: OperandRecipe,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dt as `[H, M, N]`, its scale, dt as `[H, N, M]`, and z as `[H, N, M]`."""
    B, T, H, N = dz_BTHN.shape
    amax = amax_tensor(state, recipe)
    rows = dz_BTHN.new_empty(H, B * T, N, dtype=recipe.format.dtype)
    columns = dz_BTHN.new_empty(H, N, B * T, dtype=recipe.format.dtype)
    z = dz_BTHN.new_empty(H, N, B * T, dtype=recipe_z.format.dtype)
    scale = state.new_empty(())
    grid, launch = launch_options(dz_BTHN, B * H, T, N, _GATE)
    seed = draw_seed(recipe) or draw_seed(recipe_z)
    for task in passes(recipe):
        _gate_backward_kernel[grid](
            dz_BTHN.contiguous(),
            *(*s, *t),
            z_scale,
            *(state, amax),
            *(rows, columns, scale, z),
            *(B, H, T, N),
            1.0 / dz_BTHN.numel(),
            seed,
            Z_FORMAT=recipe_z.format,
            Z_STOCHASTIC=recipe_z.rounding == "stochastic",
            **task,
            **recipe_constants(recipe),
            **launch,
        )
    return rows, scale, columns, z


def relu_rope_backward(
    dq_BHTN: Tensor,
    dz_BTHN: Tensor,
    s_BTHN: Tensor,
    t: Quantized,
    cos: Tensor,
    sin: Tensor,
    state: Tensor,
    recipe: OperandRecipe,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ds as `[B, T, H, N]`, its scale, and ds as `[H, N, M]`. Only the sign of s counts: it needs no scale."""
    B, T, H, N = dz_BTHN.shape
    amax = amax_tensor(state, recipe)
    rows = dz_BTHN.new_empty(B, T, H, N, dtype=recipe.format.dtype)
    columns = dz_BTHN.new_empty(H, N, B * T, dtype=recipe.format.dtype)
    scale = state.new_empty(())
    grid, launch = launch_options(dz_BTHN, 1, T, N, _ROPE)
    seed = draw_seed(recipe)
    for task in passes(recipe):
        _relu_rope_backward_kernel[grid](
            dq_BHTN.contiguous(),
            dz_BTHN.contiguous(),
            s_BTHN,
            *t,
            *(cos, sin),
            *(state, amax),
            *(rows, columns, scale),
            *(B, H, T, N),
            1.0 / dz_BTHN.numel(),
            seed,
            **task,
            **recipe_constants(recipe),
            **launch,
        )
    return rows, scale, columns
