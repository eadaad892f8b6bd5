"""SwiGLU (or GELU) straight to FP8, and back: the kernels behind `numerics.activation` with one scale per tensor.

Forward reads gate and up and writes h as FP8 rows. Backward reads gate, up and the gradient of h, and writes what the
three GEMMs after it want: the gradient of gate and up in both layouts, and h again, transposed, for the gradient of the
down projection. So h is never kept: recomputing it costs nothing but the write, which was due anyway.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.tiles import multiprocessors
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantize import Quantized
from octavo.numerics.scaling import AMAX

# Tokens and features of a tile, warps, loads in flight, and programs per multiprocessor.
_FORWARD = (32, 128, 4, 3, 4)
_BACKWARD = (64, 32, 4, 2, 4)


@triton.jit
def _activate(gate, SILU: tl.constexpr):
    """act(gate) and its derivative."""
    if SILU:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
    slope = 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)
    return 0.5 * gate * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * slope


@triton.jit(do_not_specialize=["seed"])
def _gated_kernel(
    gate_up_ptr,
    row_ptr,
    amax_ptr,
    out_ptr,
    scale_ptr,
    M,
    F,
    per_element,
    seed,
    MEASURE: tl.constexpr,
    DELAYED: tl.constexpr,
    RECORD: tl.constexpr,
    SILU: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`MEASURE`: only find the amax, and only if there is no scale yet."""
    if MEASURE and DELAYED:
        if tl.load(row_ptr + tiles.SCALE) > 0:
            return
    if not MEASURE:
        scale = tiles.tensor_scale(row_ptr, amax_ptr, DELAYED, MAXIMUM, MARGIN)
        inverse = tiles.reciprocal(scale)
    across = tl.cdiv(F, TILE_F)
    top, lost, clipped = 0.0, 0.0, 0.0
    non_finite = top > 1.0
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, TILE_M) * across, tl.num_programs(0), num_stages=STAGES):
        m = (tile // across * TILE_M + tl.arange(0, TILE_M))[:, None]
        f = (tile % across * TILE_F + tl.arange(0, TILE_F))[None, :]
        inside = (m < M) & (f < F)
        where = gate_up_ptr + m.to(tl.int64) * (2 * F) + f
        gate = tl.load(where, mask=inside, other=0.0)
        up = tl.load(where + F, mask=inside, other=0.0)
        value, _ = _activate(gate.to(tl.float32), SILU)
        h = tiles.narrow(value * up.to(tl.float32), gate.dtype).to(tl.float32)
        tile_top, tile_bad = tiles.top_of(h)
        top, non_finite = tl.maximum(top, tile_top), non_finite | tile_bad
        if not MEASURE:
            offset = m.to(tl.int64) * F + f
            unusual = tile_bad | (tile_top * inverse > 1e38)
            v = tiles.saturate(h * inverse, unusual, seed, offset, MAXIMUM, STOCHASTIC)
            tl.store(out_ptr + offset, tiles.cast(v, out_ptr.dtype.element_ty), mask=inside)
            if RECORD:
                lost += tiles.count_lost(h, v, MAXIMUM)
                if tile_top > scale * MAXIMUM:
                    clipped += tiles.count_clipped(h, scale, MAXIMUM)
    if MEASURE:
        if top > 0:
            tl.atomic_max(amax_ptr, top, sem="relaxed")
    else:
        if RECORD:
            tiles.record(row_ptr, top, non_finite, lost, clipped, per_element)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            if RECORD:
                tiles.record_scale(row_ptr, scale, tl.load(amax_ptr))
                tiles.record_use(row_ptr)


@triton.jit(do_not_specialize=["seed"])
def _gated_backward_kernel(
    dh_ptr,
    gate_up_ptr,
    row_ptr,
    amax_ptr,
    h_scale_ptr,
    rows_ptr,
    columns_ptr,
    scale_ptr,
    scale_t_ptr,
    h_columns_ptr,
    M,
    F,
    per_element,
    seed,
    MEASURE: tl.constexpr,
    DELAYED: tl.constexpr,
    RECORD: tl.constexpr,
    SILU: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    H_MAXIMUM: tl.constexpr,
    H_STOCHASTIC: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    if MEASURE and DELAYED:
        if tl.load(row_ptr + tiles.SCALE) > 0:
            return
    if not MEASURE:
        scale = tiles.tensor_scale(row_ptr, amax_ptr, DELAYED, MAXIMUM, MARGIN)
        inverse = tiles.reciprocal(scale)
        h_inverse = tiles.reciprocal(tl.load(h_scale_ptr))
    dtype = rows_ptr.dtype.element_ty
    across = tl.cdiv(F, TILE_F)
    top, lost, clipped = 0.0, 0.0, 0.0
    non_finite = top > 1.0
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, TILE_M) * across, tl.num_programs(0), num_stages=STAGES):
        m = tile // across * TILE_M + tl.arange(0, TILE_M)
        f = tile % across * TILE_F + tl.arange(0, TILE_F)
        inside = (m[:, None] < M) & (f[None, :] < F)
        where = gate_up_ptr + m[:, None].to(tl.int64) * (2 * F) + f[None, :]
        gate = tl.load(where, mask=inside, other=0.0)
        up = tl.load(where + F, mask=inside, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + m[:, None].to(tl.int64) * F + f[None, :], mask=inside, other=0.0).to(tl.float32)
        value, slope = _activate(gate.to(tl.float32), SILU)
        h = tiles.narrow(value * up, gate.dtype)
        for half in tl.static_range(2):
            if half == 0:
                d = tiles.narrow(dh * up * slope, gate.dtype)
            else:
                d = tiles.narrow(dh * value, gate.dtype)
            wide = d.to(tl.float32)
            tile_top, tile_bad = tiles.top_of(wide)
            top, non_finite = tl.maximum(top, tile_top), non_finite | tile_bad
            if not MEASURE:
                unusual = tile_bad | (tile_top * inverse > 1e38)
                offset = m[:, None].to(tl.int64) * (2 * F) + f[None, :] + half * F
                v = tiles.saturate(wide * inverse, unusual, seed, offset, MAXIMUM, STOCHASTIC)
                tl.store(rows_ptr + offset, tiles.cast(v, dtype), mask=inside)
                if STOCHASTIC:
                    v_t = tl.trans(v)
                else:
                    v_t = tiles.saturate(tl.trans(d).to(tl.float32) * inverse, unusual, seed, 0, MAXIMUM, False)
                offset_t = (f[:, None] + half * F).to(tl.int64) * M + m[None, :]
                inside_t = (f[:, None] < F) & (m[None, :] < M)
                tl.store(columns_ptr + offset_t, tiles.cast(v_t, dtype), mask=inside_t)
                if RECORD:
                    lost += tiles.count_lost(wide, v, MAXIMUM)
                    if tile_top > scale * MAXIMUM:
                        clipped += tiles.count_clipped(wide, scale, MAXIMUM)
        if not MEASURE:
            h_offset = f[:, None].to(tl.int64) * M + m[None, :]
            h_v = tl.trans(h).to(tl.float32) * h_inverse
            h_v = tiles.saturate(h_v, True, seed + 1, h_offset, H_MAXIMUM, H_STOCHASTIC)
            h_q = tiles.cast(h_v, h_columns_ptr.dtype.element_ty)
            tl.store(h_columns_ptr + h_offset, h_q, mask=(f[:, None] < F) & (m[None, :] < M))
    if MEASURE:
        if top > 0:
            tl.atomic_max(amax_ptr, top, sem="relaxed")
    else:
        if RECORD:
            tiles.record(row_ptr, top, non_finite, lost, clipped, per_element)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            tl.store(scale_t_ptr, scale)
            if RECORD:
                tiles.record_scale(row_ptr, scale, tl.load(amax_ptr))
                tiles.record_use(row_ptr)


def can_gate(gate_up: Tensor, *recipes: OperandRecipe) -> bool:
    """Whether these kernels cover it: one scale per tensor; other granularities quantise after."""
    plain = all(r.granularity == "tensor" and r.percentile is None and r.format in (E4M3, E5M2) for r in recipes)
    return plain and gate_up.dtype in (torch.bfloat16, torch.float16, torch.float32) and gate_up.numel() > 0


def gated_quantize(gate_up: Tensor, row: Tensor, recipe: OperandRecipe, activation: str, *, record: bool) -> Quantized:
    """`gated(gate_up[M, 2F])`, quantised."""
    gate_up = gate_up.contiguous()
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    row = row if record or not recipe.delayed else row.clone()
    amax = row[AMAX:] if recipe.delayed else row.new_zeros(1)
    out, scale = gate_up.new_empty(m, f, dtype=recipe.format.dtype), row.new_empty(())
    grid, launch = _launch(gate_up, m, f, _FORWARD)
    for measure in (True, False):
        _gated_kernel[grid](
            gate_up,
            row,
            amax,
            out,
            scale,
            m,
            f,
            1.0 / (m * f),
            _seed(recipe),
            MEASURE=measure,
            RECORD=record,
            **launch,
            **_constants(recipe, activation),
        )
    return Quantized(out, scale)


def gated_quantize_backward(
    dh: Tensor,
    gate_up: Tensor,
    h_scale: Tensor,
    row: Tensor,
    recipe: OperandRecipe,
    recipe_h: OperandRecipe,
    activation: str,
) -> tuple[Quantized, Quantized, Quantized]:
    """The gradient of gate and up as rows and as columns, and h as columns."""
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    m, f = dh.shape
    amax = row[AMAX:] if recipe.delayed else row.new_zeros(1)
    rows = Quantized(dh.new_empty(m, 2 * f, dtype=recipe.format.dtype), row.new_empty(()))
    columns = Quantized(dh.new_empty(2 * f, m, dtype=recipe.format.dtype), row.new_empty(()))
    h_columns = Quantized(dh.new_empty(f, m, dtype=recipe_h.format.dtype), h_scale.clone())
    grid, launch = _launch(gate_up, m, f, _BACKWARD)
    for measure in (True, False):
        _gated_backward_kernel[grid](
            dh,
            gate_up,
            row,
            amax,
            h_scale,
            rows.data,
            columns.data,
            rows.scale,
            columns.scale,
            h_columns.data,
            m,
            f,
            1.0 / (2 * m * f),
            _seed(recipe),
            MEASURE=measure,
            RECORD=True,
            H_MAXIMUM=recipe_h.format.max,
            H_STOCHASTIC=recipe_h.rounding == "stochastic",
            **launch,
            **_constants(recipe, activation),
        )
    return rows, columns, h_columns


def _launch(x: Tensor, m: int, f: int, tile: tuple[int, int, int, int, int]) -> tuple[tuple[int], dict[str, int]]:
    tile_m, tile_f, warps, stages, programs = tile
    grid = (min(triton.cdiv(m, tile_m) * triton.cdiv(f, tile_f), programs * multiprocessors(x.device)),)
    return grid, {"TILE_M": tile_m, "TILE_F": tile_f, "STAGES": stages, "num_warps": warps}


def _constants(recipe: OperandRecipe, activation: str) -> dict[str, object]:
    return {
        "DELAYED": recipe.delayed,
        "SILU": activation == "silu",
        "MAXIMUM": recipe.format.max,
        "MARGIN": recipe.margin,
        "STOCHASTIC": recipe.rounding == "stochastic",
    }


def _seed(recipe: OperandRecipe) -> int:
    return int(torch.randint(2**31 - 2, ())) if recipe.rounding == "stochastic" else 0
