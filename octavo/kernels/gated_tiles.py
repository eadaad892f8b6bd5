"""What the kernels of gated activations share: tiles of gate, up, h and their gradients, rounded as memory would."""

import triton
import triton.language as tl

from octavo.kernels import tiles
from octavo.kernels.quantize_tensor import load_tile


@triton.jit
def activate(gate, SILU: tl.constexpr):
    """act(gate) and its derivative."""
    if SILU:
        sigmoid = tiles.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    sigmoid = tiles.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    inner = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid) * inner)


@triton.jit
def load_gate_up(gate_up_ptr, m0, f0, inner, M, F, TILE_M: tl.constexpr, TILE_F: tl.constexpr, EVEN: tl.constexpr):
    """A tile of gate and of up."""
    base = gate_up_ptr + m0.to(tl.int64) * (2 * F) + f0
    if EVEN:
        return tl.load(base + inner), tl.load(base + F + inner)
    inside = (m0 + tl.arange(0, TILE_M)[:, None] < M) & (f0 + tl.arange(0, TILE_F)[None, :] < F)
    return tl.load(base + inner, mask=inside, other=0.0), tl.load(base + F + inner, mask=inside, other=0.0)


@triton.jit
def gradients(
    dh_ptr, gate_up_ptr, i, j, inner, inner_h, M, F, SILU: tl.constexpr, EVEN: tl.constexpr, TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and of up, and h: one tile of each, rounded as they would be in memory."""
    gate, up = load_gate_up(gate_up_ptr, i * TILE_M, j * TILE_F, inner, M, F, TILE_M, TILE_F, EVEN)
    dh = load_tile(dh_ptr, i, j, inner_h, M, F, F, EVEN, TILE_M, TILE_F).to(tl.float32)
    wide = up.to(tl.float32)
    value, slope = activate(gate.to(tl.float32), SILU)
    dgate = tiles.narrow(dh * wide * slope, gate.dtype)
    return dgate, tiles.narrow(dh * value, gate.dtype), tiles.narrow(value * wide, gate.dtype)
