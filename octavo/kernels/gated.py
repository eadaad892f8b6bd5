"""SwiGLU (or GELU) straight to FP8, and back: the kernels behind `numerics.activation` with one scale per tensor.

Forward reads gate and up and writes h as FP8 rows. Backward reads gate, up and the gradient of h, and writes what the
three GEMMs after it want: the gradient of gate and up in both layouts, and h again, transposed, for the gradient of the
down projection. So h is never kept: recomputing it costs nothing but the write, which was due anyway.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.gated_tiles import activate, gradients, load_gate_up
from octavo.kernels.launch import Plan, Plans, kind, seed_of
from octavo.kernels.quantize_tensor import offsets, store_tile
from octavo.kernels.tiles import multiprocessors
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantize import Quantized

Tile = tuple[int, int, int, int, int, int | None]

MEASURE = tl.constexpr(0)  # only find the amax, and only if there is no scale yet
QUANTIZE = tl.constexpr(1)
PLAIN = tl.constexpr(2)  # no FP8

# Tokens and features of a tile, warps, loads in flight, programs per multiprocessor, and registers per thread.
_FORWARD: Tile = (16, 128, 4, 1, 8, 64)
_BACKWARD: Tile = (64, 64, 8, 1, 2, 128)


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
    TASK: tl.constexpr,
    DELAYED: tl.constexpr,
    RECORD: tl.constexpr,
    SILU: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    if TASK == MEASURE and DELAYED:
        if tl.load(row_ptr + tiles.SCALE) > 0:
            return
    amax_ptr += tiles.AMAX if DELAYED else 0
    if TASK == QUANTIZE:
        scale = tiles.tensor_scale(row_ptr, amax_ptr, DELAYED, MAXIMUM, MARGIN)
        inverse = tiles.reciprocal(scale)
    across = tl.cdiv(F, TILE_F)
    count = tl.cdiv(M, TILE_M) * across
    inner = offsets(2 * F, TILE_M, TILE_F)
    inner_out = offsets(F, TILE_M, TILE_F)
    top = tl.zeros([TILE_M, TILE_F // 8], tl.int32)
    lost = tl.zeros([TILE_M, TILE_F // 8], tl.int32)
    step = tiles.sample_step(count)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=STAGES):
        i, j = tile // across, tile % across
        gate, up = load_gate_up(gate_up_ptr, i * TILE_M, j * TILE_F, inner, M, F, TILE_M, TILE_F, EVEN)
        value, _ = activate(gate.to(tl.float32), SILU)
        narrow = tiles.narrow(value * up.to(tl.float32), gate.dtype)
        h = narrow.to(tl.float32)
        if TASK == MEASURE or RECORD:
            top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(h)))
        if TASK == PLAIN:
            store_tile(out_ptr, narrow, i, j, inner_out, M, F, F, EVEN, TILE_M, TILE_F)
        elif TASK == QUANTIZE:
            where = i.to(tl.int64) * TILE_M * F + j * TILE_F + inner_out if STOCHASTIC else 0
            v = tiles.saturate(h * inverse, seed, where, MAXIMUM, STOCHASTIC, not RECORD)
            q = tiles.cast(v, out_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else gate.dtype)
            store_tile(out_ptr, q, i, j, inner_out, M, F, F, EVEN, TILE_M, TILE_F)
            if RECORD:
                if tiles.is_sampled(tile, step):
                    lost += tiles.count_of_eight(tiles.is_lost(h, v, MAXIMUM))
    if TASK == MEASURE or RECORD:
        top_bits = tiles.largest(top)
        finite_top = top_bits.to(tl.float32, bitcast=True)
        non_finite = top_bits >= tiles.INFINITY_BITS
        clipped = top_bits * 0
        beyond = non_finite
        if TASK == QUANTIZE:
            beyond = tiles.needs_care(top_bits, scale, MAXIMUM)
        if beyond:
            finite_top = 0.0
            for tile in range(tl.program_id(0), count, tl.num_programs(0)):
                i, j = tile // across, tile % across
                gate, up = load_gate_up(gate_up_ptr, i * TILE_M, j * TILE_F, inner, M, F, TILE_M, TILE_F, EVEN)
                value, _ = activate(gate.to(tl.float32), SILU)
                h = tiles.narrow(value * up.to(tl.float32), gate.dtype).to(tl.float32)
                finite_top = tl.maximum(finite_top, tiles.largest(tiles.finite_magnitude(h)))
                if TASK == QUANTIZE:
                    clipped += tiles.count(tiles.is_clipped(h, scale, MAXIMUM))
                    if not STOCHASTIC:
                        v = tiles.saturate(h * inverse, 0, 0, MAXIMUM, False)
                        q = tiles.cast(v, out_ptr.dtype.element_ty, gate.dtype)
                        store_tile(out_ptr, q, i, j, inner_out, M, F, F, EVEN, TILE_M, TILE_F)
        if TASK == MEASURE:
            if finite_top > 0:
                tl.atomic_max(amax_ptr, finite_top, sem="relaxed")
        else:
            all_lost = tiles.from_sample(lost, count, step)
            tiles.record(row_ptr, finite_top, non_finite, all_lost, clipped, per_element)
    if TASK == QUANTIZE:
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
    h_ptr,
    M,
    F,
    per_element,
    seed,
    TASK: tl.constexpr,
    DELAYED: tl.constexpr,
    RECORD: tl.constexpr,
    SILU: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    H_MAXIMUM: tl.constexpr,
    H_STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    if TASK == MEASURE and DELAYED:
        if tl.load(row_ptr + tiles.SCALE) > 0:
            return
    amax_ptr += tiles.AMAX if DELAYED else 0
    if TASK == QUANTIZE:
        scale = tiles.tensor_scale(row_ptr, amax_ptr, DELAYED, MAXIMUM, MARGIN)
        inverse = tiles.reciprocal(scale)
        h_inverse = tiles.reciprocal(tl.load(h_scale_ptr))
    across = tl.cdiv(F, TILE_F)
    count = tl.cdiv(M, TILE_M) * across
    inner = offsets(2 * F, TILE_M, TILE_F)
    inner_h = offsets(F, TILE_M, TILE_F)
    inner_t = offsets(M, TILE_F, TILE_M)
    top = tl.zeros([TILE_M, TILE_F // 8], tl.int32)
    lost = tl.zeros([TILE_M, TILE_F // 8], tl.int32)
    step = tiles.sample_step(count)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=STAGES):
        i, j = tile // across, tile % across
        dgate, dup, h = gradients(dh_ptr, gate_up_ptr, i, j, inner, inner_h, M, F, SILU, EVEN, TILE_M, TILE_F)
        if TASK == PLAIN:
            store_tile(h_ptr, h, i, j, inner_h, M, F, F, EVEN, TILE_M, TILE_F)
        for half in tl.static_range(2):
            if half == 0:
                d = dgate
            else:
                d = dup
            wide = d.to(tl.float32)
            if TASK == MEASURE or RECORD:
                top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(wide)))
            if TASK == PLAIN:
                store_tile(rows_ptr + half * F, d, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
            elif TASK == QUANTIZE:
                where = i.to(tl.int64) * TILE_M * 2 * F + j * TILE_F + half * F + inner if STOCHASTIC else 0
                v = tiles.saturate(wide * inverse, seed, where, MAXIMUM, STOCHASTIC, False)
                q = tiles.cast(v, rows_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else d.dtype)
                store_tile(rows_ptr + half * F, q, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
                if RECORD:
                    if tiles.is_sampled(tile, step):
                        lost += tiles.count_of_eight(tiles.is_lost(wide, v, MAXIMUM))
                if STOCHASTIC:
                    q_t = tiles.cast(tl.trans(v), columns_ptr.dtype.element_ty, tl.float32)
                else:
                    v_t = tiles.saturate(tl.trans(d).to(tl.float32) * inverse, 0, 0, MAXIMUM, False, False)
                    q_t = tiles.cast(v_t, columns_ptr.dtype.element_ty, d.dtype)
                half_t = columns_ptr + half * tl.cast(F, tl.int64) * M
                store_tile(half_t, q_t, j, i, inner_t, F, M, M, EVEN, TILE_F, TILE_M)
        if TASK == QUANTIZE:
            where = j.to(tl.int64) * TILE_F * M + i * TILE_M + inner_t if H_STOCHASTIC else 0
            h_v = tl.trans(h).to(tl.float32) * h_inverse
            h_v = tiles.saturate(h_v, seed + 1, where, H_MAXIMUM, H_STOCHASTIC)
            h_q = tiles.cast(h_v, h_ptr.dtype.element_ty, tl.float32 if H_STOCHASTIC else h.dtype)
            store_tile(h_ptr, h_q, j, i, inner_t, F, M, M, EVEN, TILE_F, TILE_M)
    if TASK == MEASURE or RECORD:
        top_bits = tiles.largest(top)
        finite_top = top_bits.to(tl.float32, bitcast=True)
        non_finite = top_bits >= tiles.INFINITY_BITS
        clipped = top_bits * 0
        beyond = non_finite
        if TASK == QUANTIZE:
            beyond = tiles.needs_care(top_bits, scale, MAXIMUM)
        if beyond:
            finite_top = 0.0
            for tile in range(tl.program_id(0), count, tl.num_programs(0)):
                i, j = tile // across, tile % across
                dgate, dup, _ = gradients(dh_ptr, gate_up_ptr, i, j, inner, inner_h, M, F, SILU, EVEN, TILE_M, TILE_F)
                for half in tl.static_range(2):
                    if half == 0:
                        d = dgate.to(tl.float32)
                    else:
                        d = dup.to(tl.float32)
                    finite_top = tl.maximum(finite_top, tiles.largest(tiles.finite_magnitude(d)))
                    if TASK == QUANTIZE:
                        clipped += tiles.count(tiles.is_clipped(d, scale, MAXIMUM))
                        if not STOCHASTIC:
                            v = tiles.saturate(d * inverse, 0, 0, MAXIMUM, False)
                            q = tiles.cast(v, rows_ptr.dtype.element_ty, dgate.dtype)
                            store_tile(rows_ptr + half * F, q, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
                            q_t = tiles.cast(tl.trans(v), columns_ptr.dtype.element_ty, dgate.dtype)
                            half_t = columns_ptr + half * tl.cast(F, tl.int64) * M
                            store_tile(half_t, q_t, j, i, inner_t, F, M, M, EVEN, TILE_F, TILE_M)
        if TASK == MEASURE:
            if finite_top > 0:
                tl.atomic_max(amax_ptr, finite_top, sem="relaxed")
        else:
            all_lost = tiles.from_sample(lost, count, step)
            tiles.record(row_ptr, finite_top, non_finite, all_lost, clipped, per_element)
    if TASK == QUANTIZE:
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            tl.store(scale_t_ptr, scale)
            if RECORD:
                tiles.record_scale(row_ptr, scale, tl.load(amax_ptr))
                tiles.record_use(row_ptr)


_PLANS = Plans()


def can_quantize(gate_up: Tensor, *recipes: OperandRecipe) -> bool:
    """Whether these kernels quantise on the way: one scale per tensor. Other granularities quantise after."""
    return can_gate(gate_up) and all(_has_kernel(recipe) for recipe in recipes)


@cache
def _has_kernel(recipe: OperandRecipe) -> bool:
    return recipe.granularity == "tensor" and recipe.percentile is None and recipe.format in (E4M3, E5M2)


def can_gate(gate_up: Tensor) -> bool:
    return gate_up.dtype in (torch.bfloat16, torch.float16, torch.float32) and gate_up.numel() > 0


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """As `numerics.activation.gated`, of `gate_up[M, 2F]`."""
    gate_up = gate_up.contiguous()
    key = ("gated", activation, kind(gate_up))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = gate_up.shape[0], gate_up.shape[1] // 2
        plan = Plan(given=1)
        out, none = plan.make((m, f), gate_up.dtype), plan.make((1,), torch.float32)
        grid, constants = _arrange(gate_up, m, f, _FORWARD, None, activation, PLAIN, False)
        plan.launch(_gated_kernel, grid, (0, none, none, out, none), (m, f, 0.0, 0), constants)
        plan.results = (out,)
        _PLANS[key] = plan
    return plan.run(gate_up)[0]


def gated_backward(dh: Tensor, gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """As `numerics.activation.gated_backward`, and h again."""
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    key = ("gated_backward", activation, kind(dh, gate_up))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = dh.shape
        plan = Plan(given=2)
        out, h = plan.make((m, 2 * f), gate_up.dtype), plan.make((m, f), dh.dtype)
        none = plan.make((1,), torch.float32)
        grid, constants = _arrange(gate_up, m, f, _FORWARD, None, activation, PLAIN, False)
        constants |= {"H_MAXIMUM": 1.0, "H_STOCHASTIC": False}
        tensors = (0, 1, none, none, none, out, out, none, none, h)
        plan.launch(_gated_backward_kernel, grid, tensors, (m, f, 0.0, 0), constants)
        plan.results = (out, h)
        _PLANS[key] = plan
    out_h = plan.run(dh, gate_up)
    return out_h[0], out_h[1]


def gated_quantize(gate_up: Tensor, row: Tensor, recipe: OperandRecipe, activation: str, *, record: bool) -> Quantized:
    """`gated(gate_up[M, 2F])`, quantised."""
    gate_up = gate_up.contiguous()
    row = row if record or not recipe.delayed else row.clone()
    key = ("gated_quantize", recipe, activation, record, kind(gate_up, row))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = gate_up.shape[0], gate_up.shape[1] // 2
        plan = Plan(given=2)
        amax = 1 if recipe.delayed else plan.make((1,), torch.float32, zeros=True)
        out, scale = plan.make((m, f), recipe.format.dtype), plan.make((), torch.float32)
        for task in (MEASURE, QUANTIZE):
            grid, constants = _arrange(gate_up, m, f, _FORWARD, recipe, activation, task, record)
            numbers = (m, f, 1.0 / (m * f), seed_of(recipe))
            plan.launch(_gated_kernel, grid, (0, 1, amax, out, scale), numbers, constants)
        plan.results = (out, scale)
        _PLANS[key] = plan
    return Quantized(*plan.run(gate_up, row))


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
    key = ("gated_quantize_backward", recipe, recipe_h, activation, kind(dh, gate_up, h_scale, row))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = dh.shape
        plan = Plan(given=4)
        amax = 3 if recipe.delayed else plan.make((1,), torch.float32, zeros=True)
        rows, columns = plan.make((m, 2 * f), recipe.format.dtype), plan.make((2 * f, m), recipe.format.dtype)
        scale, scale_t = plan.make((), torch.float32), plan.make((), torch.float32)
        h = plan.make((f, m), recipe_h.format.dtype)
        for task in (MEASURE, QUANTIZE):
            grid, constants = _arrange(gate_up, m, f, _BACKWARD, recipe, activation, task, True)
            constants |= {"H_MAXIMUM": recipe_h.format.max, "H_STOCHASTIC": recipe_h.rounding == "stochastic"}
            numbers = (m, f, 0.5 / (m * f), seed_of(recipe, recipe_h))
            tensors = (0, 1, 3, amax, 2, rows, columns, scale, scale_t, h)
            plan.launch(_gated_backward_kernel, grid, tensors, numbers, constants)
        plan.results = (rows, scale, columns, scale_t, h)
        _PLANS[key] = plan
    *found, turned = plan.run(dh, gate_up, h_scale, row)
    return Quantized(*found[:2]), Quantized(*found[2:]), Quantized(turned, h_scale.clone())


def _arrange(
    x: Tensor, m: int, f: int, tile: Tile, recipe: OperandRecipe | None, activation: str, task: Any, record: bool
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and everything constant. Without a recipe: no FP8."""
    tile_m, tile_f, warps, stages, programs, registers = tile
    constants = {
        "TASK": task.value,
        "DELAYED": recipe is not None and recipe.delayed,
        "RECORD": record and task.value == QUANTIZE.value,
        "SILU": activation == "silu",
        "MAXIMUM": 448.0 if recipe is None else recipe.format.max,
        "MARGIN": 1.0 if recipe is None else recipe.margin,
        "STOCHASTIC": recipe is not None and recipe.rounding == "stochastic",
        "EVEN": m % tile_m == 0 and f % tile_f == 0,
        "TILE_M": tile_m,
        "TILE_F": tile_f,
        "STAGES": stages,
        "num_warps": warps,
    }
    if registers is not None:
        constants["maxnreg"] = registers
    count = -(-m // tile_m) * -(-f // tile_f)
    return (min(count, programs * multiprocessors(x.device)),), constants
