"""Tiles of gate, up, h and their gradients, rounded as they would be in memory: shared by the gated kernels."""

import triton
import triton.language as tl

from octavo.kernels import tiles
from octavo.kernels.quantize.tensor import load_tile, store_tile
from octavo.numerics.quantize import BLOCK

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def load_gate_up(gate_up_ptr, m0, f0, inner, M, F, TILE_M: tl.constexpr, TILE_F: tl.constexpr, EVEN: tl.constexpr):
    """A tile of gate and of up."""
    base = gate_up_ptr + m0.to(tl.int64) * (2 * F) + f0
    if EVEN:
        return tl.load(base + inner), tl.load(base + F + inner)
    inside = (m0 + tl.arange(0, TILE_M)[:, None] < M) & (f0 + tl.arange(0, TILE_F)[None, :] < F)
    return tl.load(base + inner, mask=inside, other=0.0), tl.load(base + F + inner, mask=inside, other=0.0)


@triton.jit
def save_half(
    x, saved_ptr, scale_ptr, i, j, inner, M, F, half: tl.constexpr, source: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_F: tl.constexpr,
):  # fmt: skip
    """Save a tile of gate or up, one block wide, like `activation.save_gate_up`. `source`: see `tiles.cast`."""
    FORMAT: tl.constexpr = tiles.format_of(saved_ptr.dtype.element_ty)
    exponent = tiles.mx_exponent(tl.max(tl.abs(x), axis=1), FORMAT, 1.0, True)
    m = i * TILE_M + tl.arange(0, TILE_M)
    across = F // TILE_F
    tl.store(scale_ptr + m * (2 * across) + half * across + j, exponent.to(tl.uint8), mask=m < M)
    # Infinities need no care here: h tells of them.
    v = tiles.saturate(x * tiles.mx_factor(254 - exponent)[:, None], 0, 0, FORMAT, False, False)
    q = tiles.cast(v, saved_ptr.dtype.element_ty, source)
    store_tile(saved_ptr + half * F, q, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)


@triton.jit
def load_saved_half(
    saved_ptr, scale_ptr, i, j, inner, M, F, half: tl.constexpr, EVEN: tl.constexpr, TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):  # fmt: skip
    """Load a saved tile of gate or up, in FP32."""
    m, across = i * TILE_M + tl.arange(0, TILE_M), F // _BLOCK
    where = m * (2 * across) + half * across + j * TILE_F // _BLOCK
    scale = tiles.mx_factor(tl.load(scale_ptr + where, mask=m < M, other=127).to(tl.int32))
    return (
        load_tile(saved_ptr + half * F, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F).to(tl.float32) * scale[:, None]
    )


@triton.jit
def gradients(
    dh_ptr, gate_up_ptr, saved_scale_ptr, i, j, inner, inner_h, M, F, ACTIVATION: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_F: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and of up, and h: one tile of each, rounded as they would be in memory.

    gate and up may be in FP8, as `save_half` saved them, with their scales.
    """
    dh_tile = load_tile(dh_ptr, i, j, inner_h, M, F, F, EVEN, TILE_M, TILE_F)
    if gate_up_ptr.dtype.element_ty.primitive_bitwidth == 8:
        gate = load_saved_half(gate_up_ptr, saved_scale_ptr, i, j, inner, M, F, 0, EVEN, TILE_M, TILE_F)
        up = load_saved_half(gate_up_ptr, saved_scale_ptr, i, j, inner, M, F, 1, EVEN, TILE_M, TILE_F)
    else:
        loaded, loaded_up = load_gate_up(gate_up_ptr, i * TILE_M, j * TILE_F, inner, M, F, TILE_M, TILE_F, EVEN)
        gate, up = loaded.to(tl.float32), loaded_up.to(tl.float32)
    dh = dh_tile.to(tl.float32)
    value, slope = ACTIVATION(gate)
    dgate, dup, h = dh * up * slope, dh * value, value * up
    return tiles.round_to(dgate, dh_tile.dtype), tiles.round_to(dup, dh_tile.dtype), tiles.round_to(h, dh_tile.dtype)
