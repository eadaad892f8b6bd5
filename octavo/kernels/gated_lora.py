"""The gated activation of a frozen MLP with adapters: h = act(gate) · up, where gate, up and the gradient of h get the
output of an adapter added on the way, so that nothing is read twice for it.

    forward    gate += s · t · Bᵀ, up likewise      h in high precision, gate and up in FP8 (1×128), to be kept
    backward   dh += u · A                          the gradients of gate and up, and h again, from what was kept

Shapes: M tokens, F hidden, R the rank of an adapter. A program stays in its 128 features, so the tiles of A and B that
it multiplies by are near.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.gated_tiles import activate
from octavo.kernels.launch import Plan, Plans, kind
from octavo.kernels.quantize_scaled import amax_of_rows, scale_rows
from octavo.kernels.tiles import BLOCK_1X128, multiprocessors, programs_in_strips
from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import BLOCK, Quantized

LARGEST_RANK = 128
_TILE_M, _WARPS, _PROGRAMS = 16, 8, 3  # eight elements for each thread: see `dequantize.py`
_MAXIMUM = tl.constexpr(E4M3.max)
_PLANS = Plans()


class Low(NamedTuple):
    """A product of low rank, to be added: `scaling · left[M, R] · right`, with right `[F, R]` or `[R, F]`."""

    left: Tensor
    right: Tensor
    scaling: float = 1.0


@triton.jit
def _added(x, left_ptr, stride, right_ptr, scaling, m, f, M, F, RANK: tl.constexpr, TURNED: tl.constexpr):
    """x, plus `scaling · left · right` of rank R (padded to what tensor cores take), rounded once."""
    PADDED: tl.constexpr = 16 if RANK <= 16 else 32 if RANK <= 32 else 64 if RANK <= 64 else 128
    k = tl.arange(0, PADDED)
    left = tl.load(
        left_ptr + m[:, None].to(tl.int64) * stride + k[None, :], mask=(m[:, None] < M) & (k < RANK), other=0.0
    )
    if TURNED:
        right = tl.trans(tl.load(right_ptr + f[:, None] * RANK + k[None, :], mask=k[None, :] < RANK, other=0.0))
    else:
        right = tl.load(right_ptr + k[:, None] * F + f[None, :], mask=k[:, None] < RANK, other=0.0)
    if tiles.INTERPRETED:  # whose own product of BF16 is not one
        product = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(left, right)
    return tiles.narrow(x.to(tl.float32) + scaling * product, x.dtype)


@triton.jit
def _forward_kernel(
    gate_up_ptr,
    gate_left_ptr,
    gate_right_ptr,
    up_left_ptr,
    up_right_ptr,
    h_ptr,
    kept_ptr,
    scale_ptr,
    M,
    F,
    gate_stride,
    up_stride,
    gate_scaling,
    up_scaling,
    GATE_RANK: tl.constexpr,
    UP_RANK: tl.constexpr,
    SILU: tl.constexpr,
    KEEP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):
    across = F // TILE_F
    j = tl.program_id(0) % across
    f = j * TILE_F + tl.arange(0, TILE_F)
    for i in range(tl.program_id(0) // across, tl.cdiv(M, TILE_M), tl.num_programs(0) // across):
        m = i * TILE_M + tl.arange(0, TILE_M)
        inside = m[:, None] < M
        where = m[:, None].to(tl.int64) * (2 * F) + f[None, :]
        gate = tl.load(gate_up_ptr + where, mask=inside, other=0.0)
        up = tl.load(gate_up_ptr + F + where, mask=inside, other=0.0)
        if GATE_RANK > 0:
            gate = _added(gate, gate_left_ptr, gate_stride, gate_right_ptr, gate_scaling, m, f, M, F, GATE_RANK, True)
        if UP_RANK > 0:
            up = _added(up, up_left_ptr, up_stride, up_right_ptr, up_scaling, m, f, M, F, UP_RANK, True)
        value, _ = activate(gate.to(tl.float32), SILU)
        h = tiles.narrow(value * up.to(tl.float32), gate.dtype)
        tl.store(h_ptr + m[:, None].to(tl.int64) * F + f[None, :], h, mask=inside)
        if KEEP:
            for half in tl.static_range(2):
                x = (gate if half == 0 else up).to(tl.float32)
                v, _, _ = scale_rows(
                    x, amax_of_rows(x, BLOCK_1X128), tl.cast(i, tl.int32), j + half * across, 0, M, M, 2 * F, scale_ptr,
                    scale_ptr, BLOCK_1X128, _MAXIMUM, 1.0, True, TILE_M, TILE_F,
                )  # fmt: skip
                q = tiles.cast(tiles.saturate(v, 0, 0, _MAXIMUM, False), kept_ptr.dtype.element_ty, tl.float32)
                tl.store(kept_ptr + half * F + where, q, mask=inside)


@triton.jit
def _kept(kept_ptr, scale_ptr, where, m, j, inside, M, per_row):
    scale = tl.load(scale_ptr + m * per_row + j, mask=m < M, other=0.0)
    return tl.load(kept_ptr + where, mask=inside, other=0.0).to(tl.float32) * scale[:, None]


@triton.jit
def _backward_kernel(
    dh_ptr,
    kept_ptr,
    scale_ptr,
    left_ptr,
    right_ptr,
    d_ptr,
    h_ptr,
    M,
    F,
    stride,
    scaling,
    RANK: tl.constexpr,
    SILU: tl.constexpr,
    H: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):
    across = F // TILE_F
    j = tl.program_id(0) % across
    f = j * TILE_F + tl.arange(0, TILE_F)
    for i in range(tl.program_id(0) // across, tl.cdiv(M, TILE_M), tl.num_programs(0) // across):
        m = i * TILE_M + tl.arange(0, TILE_M)
        inside = m[:, None] < M
        where = m[:, None].to(tl.int64) * (2 * F) + f[None, :]
        where_h = m[:, None].to(tl.int64) * F + f[None, :]
        narrow = tl.load(dh_ptr + where_h, mask=inside, other=0.0)
        if RANK > 0:
            narrow = _added(narrow, left_ptr, stride, right_ptr, scaling, m, f, M, F, RANK, False)
        dh = narrow.to(tl.float32)
        gate = _kept(kept_ptr, scale_ptr, where, m, j, inside, M, 2 * across)
        up = _kept(kept_ptr + F, scale_ptr, where, m, j + across, inside, M, 2 * across)
        value, slope = activate(gate, SILU)
        tl.store(d_ptr + where, tiles.narrow(dh * up * slope, narrow.dtype), mask=inside)
        tl.store(d_ptr + F + where, tiles.narrow(dh * value, narrow.dtype), mask=inside)
        if H:
            tl.store(h_ptr + where_h, tiles.narrow(value * up, narrow.dtype), mask=inside)


def can_gate(hidden: Tensor, features: int, *added: Low | None) -> bool:
    """Whether these kernels cover this: 16 bits, whole blocks, ranks that fit into a tile."""
    return (
        hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.numel() > 0
        and features % BLOCK == 0
        and all(low is None or low.left.shape[1] <= LARGEST_RANK for low in added)
    )


def gated(
    gate_up: Tensor, gate: Low | None, up: Low | None, activation: str, *, keep: bool
) -> tuple[Tensor, Quantized | None]:
    """h of `gate_up[M, 2F]` with these added to its halves, and the halves in FP8 if they are to be kept."""
    gate_up = gate_up.contiguous()
    given, ranks, strides, scalings = _operands(gate_up, gate, up)
    key = ("forward", activation, keep, ranks, scalings, kind(gate_up, *given))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = gate_up.shape[0], gate_up.shape[1] // 2
        plan = Plan(given=5)
        h = plan.make((m, f), gate_up.dtype)
        kept = plan.make((m, 2 * f) if keep else (1,), E4M3.dtype)
        scale = plan.make((m, 2 * f // BLOCK) if keep else (1,), torch.float32)
        grid, constants = _arrange(gate_up, m, f, activation)
        constants |= {"GATE_RANK": ranks[0], "UP_RANK": ranks[1], "KEEP": keep}
        numbers = (m, f, *strides, *scalings)
        plan.launch(_forward_kernel, grid, (0, 1, 2, 3, 4, h, kept, scale), numbers, constants)
        plan.results = (h, kept, scale) if keep else (h,)
        _PLANS[key] = plan
    found, *rest = plan.run(gate_up, *given)
    return found, Quantized(*rest) if keep else None


def gated_backward(
    dh: Tensor, kept: Quantized, added: Low | None, activation: str, *, h: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of gate and up `[M, 2F]`, and h if it is wanted, from `dh[M, F]` with this added."""
    dh = dh.contiguous()
    given, ranks, strides, scalings = _operands(dh, added)
    key = ("backward", activation, h, ranks, scalings, kind(dh, *kept, *given))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = dh.shape
        plan = Plan(given=5)
        gradient = plan.make((m, 2 * f), dh.dtype)
        hidden = plan.make((m, f) if h else (1,), dh.dtype)
        grid, constants = _arrange(dh, m, f, activation)
        constants |= {"RANK": ranks[0], "H": h}
        numbers = (m, f, *strides, *scalings)
        plan.launch(_backward_kernel, grid, (0, 1, 2, 3, 4, gradient, hidden), numbers, constants)
        plan.results = (gradient, hidden)
        _PLANS[key] = plan
    d, again = plan.run(dh, *kept, *given)
    return d, again if h else None


def _operands(like: Tensor, *added: Low | None) -> tuple[list[Tensor], tuple[int, ...], list[int], tuple[float, ...]]:
    """Left and right of each, their ranks (0: nothing to add), the steps between rows of left, and their factors."""
    given: list[Tensor] = []
    for low in added:
        given += (like, like) if low is None else (low.left, low.right.to(like.dtype).contiguous())
    ranks = tuple(0 if low is None else low.left.shape[1] for low in added)
    strides = [1 if low is None else low.left.stride(0) for low in added]
    return given, ranks, strides, tuple(1.0 if low is None else float(low.scaling) for low in added)


def _arrange(x: Tensor, m: int, f: int, activation: str) -> tuple[tuple[int], dict[str, Any]]:
    across = f // BLOCK
    programs = programs_in_strips(across, -(-m // _TILE_M) * across, _PROGRAMS * multiprocessors(x.device))
    return (programs,), {"SILU": activation == "silu", "TILE_M": _TILE_M, "TILE_F": BLOCK, "num_warps": _WARPS}
