"""Kernels of a gated activation with one scale per tensor, forward and backward."""

import triton
import triton.language as tl

from octavo.kernels import delayed, finite, tiles
from octavo.kernels.gated.tiles import gradients, load_gate_up, save_half
from octavo.kernels.quantize.tensor import offsets, store_tile

MEASURE = tl.constexpr(0)  # only find the amax, for a current scale
QUANTIZE = tl.constexpr(1)
PLAIN = tl.constexpr(2)  # no FP8


@triton.jit(do_not_specialize=["seed"])
def gated_kernel(
    gate_up_ptr,
    state_ptr,
    amax_ptr,
    out_ptr,
    scale_ptr,
    saved_ptr,
    saved_scale_ptr,
    M,
    F,
    per_element,
    seed,
    SAVE: tl.constexpr,
    TASK: tl.constexpr,
    SCALING: tl.constexpr,
    RECORD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`SAVE`: gate and up are saved in FP8 for backward."""
    if SCALING == delayed.AGAIN:
        if delayed.is_held(state_ptr, FORMAT, MARGIN):
            return
    if TASK == QUANTIZE:
        scale, before = delayed.find_scale(state_ptr, amax_ptr, SCALING, FORMAT, MARGIN)
        inverse, inverse_before = tiles.reciprocal(scale), tiles.reciprocal(before)
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
        value, _ = ACTIVATION(gate.to(tl.float32))
        h_tile = tiles.round_to(value * up.to(tl.float32), gate.dtype)
        h = h_tile.to(tl.float32)
        if SAVE and TASK == QUANTIZE and SCALING != delayed.AGAIN:
            for half in tl.static_range(2):
                x = (gate if half == 0 else up).to(tl.float32)
                save_half(x, saved_ptr, saved_scale_ptr, i, j, inner, M, F, half, gate.dtype, EVEN, TILE_M, TILE_F)
        if TASK == MEASURE or RECORD:
            top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(h)))
        if TASK == PLAIN:
            store_tile(out_ptr, h_tile, i, j, inner_out, M, F, F, EVEN, TILE_M, TILE_F)
        elif TASK == QUANTIZE:
            where = i.to(tl.int64) * TILE_M * F + j * TILE_F + inner_out if STOCHASTIC else 0
            v = tiles.scaled(h, inverse, STOCHASTIC or not RECORD)
            v = tiles.saturate(v, seed, where, FORMAT, STOCHASTIC, False)
            q = tiles.cast(v, out_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else gate.dtype)
            store_tile(out_ptr, q, i, j, inner_out, M, F, F, EVEN, TILE_M, TILE_F)
            if RECORD:
                if tiles.is_sampled(tile, step):
                    lost += delayed.lost_of_eight(h, v, inverse_before, seed, where, FORMAT, STOCHASTIC, SCALING)
    if TASK == MEASURE or RECORD:
        top_bits = tiles.largest(top)
        finite_top = top_bits.to(tl.float32, bitcast=True)
        non_finite = top_bits >= tiles.INFINITY_BITS
        clipped = top_bits * 0
        beyond = non_finite
        if TASK == QUANTIZE:
            beyond = tiles.needs_care(top_bits, delayed.largest_counted(scale, before, FORMAT, MARGIN, SCALING))
        if beyond:
            finite_top = 0.0
            for tile in range(tl.program_id(0), count, tl.num_programs(0)):
                i, j = tile // across, tile % across
                gate, up = load_gate_up(gate_up_ptr, i * TILE_M, j * TILE_F, inner, M, F, TILE_M, TILE_F, EVEN)
                value, _ = ACTIVATION(gate.to(tl.float32))
                h = tiles.round_to(value * up.to(tl.float32), gate.dtype).to(tl.float32)
                finite_top = tl.maximum(finite_top, tiles.largest(finite.magnitude(h)))
                if TASK == QUANTIZE:
                    clipped += delayed.clipped(h, scale, before, FORMAT, SCALING)
                    if not STOCHASTIC:
                        v = tiles.saturate(tiles.scaled(h, inverse), 0, 0, FORMAT, False, False)
                        q = tiles.cast(v, out_ptr.dtype.element_ty, gate.dtype)
                        store_tile(out_ptr, q, i, j, inner_out, M, F, F, EVEN, TILE_M, TILE_F)
        if TASK == MEASURE:
            if finite_top > 0:
                tl.atomic_max(amax_ptr, finite_top, sem="relaxed")
        else:
            all_lost = tiles.from_sample(lost, count, step)
            tiles.record(state_ptr, finite_top, non_finite, all_lost, clipped, per_element)
    if TASK == QUANTIZE:
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            if RECORD:
                delayed.note_use(state_ptr, amax_ptr, scale, SCALING, FORMAT, MARGIN)


@triton.jit(do_not_specialize=["seed"])
def gated_backward_kernel(
    dh_ptr,
    gate_up_ptr,
    saved_scale_ptr,
    state_ptr,
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
    SCALING: tl.constexpr,
    RECORD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    H_FORMAT: tl.constexpr,
    H_STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    if SCALING == delayed.AGAIN:
        if delayed.is_held(state_ptr, FORMAT, MARGIN):
            return
    if TASK == QUANTIZE:
        scale, before = delayed.find_scale(state_ptr, amax_ptr, SCALING, FORMAT, MARGIN)
        inverse, inverse_before = tiles.reciprocal(scale), tiles.reciprocal(before)
        h_inverse = tiles.reciprocal(tl.load(h_scale_ptr))
    down, across = tl.cdiv(M, TILE_M), tl.cdiv(F, TILE_F)
    count = down * across
    BACKWARDS: tl.constexpr = TASK == QUANTIZE and SCALING == delayed.CURRENT
    inner = offsets(2 * F, TILE_M, TILE_F)
    inner_h = offsets(F, TILE_M, TILE_F)
    inner_t = offsets(M, TILE_F, TILE_M)
    top = tl.zeros([TILE_M, TILE_F // 8], tl.int32)
    lost = tl.zeros([TILE_M, TILE_F // 8], tl.int32)
    step = tiles.sample_step(count)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=STAGES):
        i, j = tiles.place(tile, down, across, 1, BACKWARDS)
        dgate, dup, h = gradients(
            dh_ptr, gate_up_ptr, saved_scale_ptr, i, j, inner, inner_h, M, F, ACTIVATION, EVEN, TILE_M, TILE_F
        )
        if TASK == PLAIN:
            store_tile(h_ptr, h, i, j, inner_h, M, F, F, EVEN, TILE_M, TILE_F)
        for half in tl.static_range(2):
            if half == 0:
                d = dgate
            else:
                d = dup
            d_fp32 = d.to(tl.float32)
            if TASK == MEASURE or RECORD:
                top = tl.maximum(top, tiles.largest_of_eight(tiles.magnitude_bits(d_fp32)))
            if TASK == PLAIN:
                store_tile(rows_ptr + half * F, d, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
            elif TASK == QUANTIZE:
                where = i.to(tl.int64) * TILE_M * 2 * F + j * TILE_F + half * F + inner if STOCHASTIC else 0
                v = tiles.scaled(d_fp32, inverse, STOCHASTIC or not RECORD)
                v = tiles.saturate(v, seed, where, FORMAT, STOCHASTIC, False)
                q = tiles.cast(v, rows_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else d.dtype)
                store_tile(rows_ptr + half * F, q, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
                if RECORD:
                    if tiles.is_sampled(tile, step):
                        lost += delayed.lost_of_eight(
                            d_fp32, v, inverse_before, seed, where, FORMAT, STOCHASTIC, SCALING
                        )
                if STOCHASTIC:
                    q_t = tiles.cast(tl.trans(v), columns_ptr.dtype.element_ty, tl.float32)
                else:
                    v_t = tiles.scaled(tl.trans(d).to(tl.float32), inverse, not RECORD)
                    v_t = tiles.saturate(v_t, 0, 0, FORMAT, False, False)
                    q_t = tiles.cast(v_t, columns_ptr.dtype.element_ty, d.dtype)
                half_t = columns_ptr + half * tl.cast(F, tl.int64) * M
                store_tile(half_t, q_t, j, i, inner_t, F, M, M, EVEN, TILE_F, TILE_M)
        if TASK == QUANTIZE and SCALING != delayed.AGAIN:  # h has its own scale, from forward
            where = j.to(tl.int64) * TILE_F * M + i * TILE_M + inner_t if H_STOCHASTIC else 0
            h_v = tiles.scaled(tl.trans(h).to(tl.float32), h_inverse)
            h_v = tiles.saturate(h_v, seed + 1, where, H_FORMAT, H_STOCHASTIC, False)
            h_q = tiles.cast(h_v, h_ptr.dtype.element_ty, tl.float32 if H_STOCHASTIC else h.dtype)
            store_tile(h_ptr, h_q, j, i, inner_t, F, M, M, EVEN, TILE_F, TILE_M)
    if TASK == MEASURE or RECORD:
        top_bits = tiles.largest(top)
        finite_top = top_bits.to(tl.float32, bitcast=True)
        non_finite = top_bits >= tiles.INFINITY_BITS
        clipped = top_bits * 0
        beyond = non_finite
        if TASK == QUANTIZE:
            beyond = tiles.needs_care(top_bits, delayed.largest_counted(scale, before, FORMAT, MARGIN, SCALING))
        if beyond:
            finite_top = 0.0
            for tile in range(tl.program_id(0), count, tl.num_programs(0)):
                i, j = tiles.place(tile, down, across, 1, BACKWARDS)
                dgate, dup, _ = gradients(
                    dh_ptr, gate_up_ptr, saved_scale_ptr, i, j, inner, inner_h, M, F, ACTIVATION, EVEN, TILE_M, TILE_F
                )
                for half in tl.static_range(2):
                    if half == 0:
                        d = dgate.to(tl.float32)
                    else:
                        d = dup.to(tl.float32)
                    finite_top = tl.maximum(finite_top, tiles.largest(finite.magnitude(d)))
                    if TASK == QUANTIZE:
                        clipped += delayed.clipped(d, scale, before, FORMAT, SCALING)
                        if not STOCHASTIC:
                            v = tiles.saturate(tiles.scaled(d, inverse), 0, 0, FORMAT, False, False)
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
            tiles.record(state_ptr, finite_top, non_finite, all_lost, clipped, per_element)
    if TASK == QUANTIZE:
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            tl.store(scale_t_ptr, scale)
            if RECORD:
                delayed.note_use(state_ptr, amax_ptr, scale, SCALING, FORMAT, MARGIN)
