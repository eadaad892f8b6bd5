"""The gated activation of a frozen MLP with adapters: h = act(gate) · up, where gate, up and the gradient of h get the
output of an adapter added on the way, so that nothing is read twice for it.

    forward    gate += s · t · Bᵀ, up likewise      h in high precision, gate and up in FP8, saved for backward
    backward   dh += u · A                          the gradients of gate and up as saved, and h again

Shapes: M tokens, F hidden, R the rank of an adapter. A program stays in its 128 features: it loads A and B once.
(Multiplying h by u here, too, for the gradient of A, takes as many instructions as all the rest.)

The saved gate and up have a scale for every 128 features of a token, a power of two, in one byte.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.adapters.tiles import in_dtype, padded, product
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.gated.tiles import load_saved_half, save_half
from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.quantize.tensor import load_tile, offsets, store_tile
from octavo.kernels.tiles import multiprocessors, programs_in_strips
from octavo.kernels.tuning import Tile, check_tile, tuning_for
from octavo.numerics.quantize import BLOCK, Quantized

LARGEST_RANK = 128
_LAUNCHES = LaunchCache()


class Low(NamedTuple):
    """A product of low rank, to be added: `scaling · left[M, R] · right`, with right `[F, R]` or `[R, F]`."""

    left: Tensor
    right: Tensor
    scaling: float = 1.0


@triton.jit
def _right(right_ptr, f, F, RANK: tl.constexpr, PADDED: tl.constexpr, TRANSPOSED: tl.constexpr):
    """These features of `right`, as `[R, f]`."""
    k = tl.arange(0, PADDED)
    if TRANSPOSED:
        return tl.trans(tl.load(right_ptr + f[:, None] * RANK + k[None, :], mask=k[None, :] < RANK, other=0.0))
    return tl.load(right_ptr + k[:, None] * F + f[None, :], mask=k[:, None] < RANK, other=0.0)


@triton.jit
def _added(
    x, left_ptr, stride, right, scaling, m0, M, RANK: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
):  # fmt: skip
    """x, plus `scaling · left · right`, rounded once."""
    m, k = m0 + tl.arange(0, TILE_M), tl.arange(0, PADDED)
    where = left_ptr + m[:, None] * stride + k[None, :]
    if EVEN and RANK == PADDED:
        left = tl.load(where)
    else:
        left = tl.load(where, mask=(m[:, None] < M) & (k[None, :] < RANK), other=0.0)
    return tiles.round_to(x.to(tl.float32) + scaling * product(left.to(right.dtype), right), x.dtype)


@triton.jit
def _forward_kernel(
    gate_up_ptr,
    gate_left_ptr,
    gate_right_ptr,
    up_left_ptr,
    up_right_ptr,
    h_ptr,
    saved_ptr,
    scale_ptr,
    M,
    F,
    gate_stride,
    up_stride,
    gate_scaling,
    up_scaling,
    GATE_RANK: tl.constexpr,
    UP_RANK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):
    across = F // TILE_F
    j = tl.program_id(0) % across
    f = j * TILE_F + tl.arange(0, TILE_F)
    GATE_PADDED: tl.constexpr = padded(GATE_RANK)
    UP_PADDED: tl.constexpr = padded(UP_RANK)
    if GATE_RANK > 0:
        gate_right = _right(gate_right_ptr, f, F, GATE_RANK, GATE_PADDED, True)
    if UP_RANK > 0:
        up_right = _right(up_right_ptr, f, F, UP_RANK, UP_PADDED, True)
    inner, inner_h = offsets(2 * F, TILE_M, TILE_F), offsets(F, TILE_M, TILE_F)
    down = tl.cdiv(M, TILE_M)
    for tile in range(tl.program_id(0) // across, down, tl.num_programs(0) // across):
        i = tl.cast(tile, tl.int32)
        m0 = i * TILE_M
        gate = load_tile(gate_up_ptr, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
        up = load_tile(gate_up_ptr + F, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
        if GATE_RANK > 0:
            gate = _added(
                gate, gate_left_ptr, gate_stride, gate_right, gate_scaling, m0, M, GATE_RANK, GATE_PADDED, EVEN, TILE_M
            )
        if UP_RANK > 0:
            up = _added(up, up_left_ptr, up_stride, up_right, up_scaling, m0, M, UP_RANK, UP_PADDED, EVEN, TILE_M)
        value, _ = ACTIVATION(gate.to(tl.float32))
        h = tiles.round_to(value * up.to(tl.float32), gate.dtype)
        store_tile(h_ptr, h, i, j, inner_h, M, F, F, EVEN, TILE_M, TILE_F)
        if SAVE:
            source: tl.constexpr = tl.float32 if GATE_RANK + UP_RANK > 0 else gate.dtype
            for half in tl.static_range(2):
                x = (gate if half == 0 else up).to(tl.float32)
                save_half(x, saved_ptr, scale_ptr, i, j, inner, M, F, half, source, EVEN, TILE_M, TILE_F)


@triton.jit
def _backward_kernel(
    dh_ptr,
    saved_ptr,
    scale_ptr,
    left_ptr,
    right_ptr,
    factor_ptr,
    d_ptr,
    M,
    F,
    stride,
    scaling,
    RANK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FOLD: tl.constexpr,
    H: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):
    across = F // TILE_F
    j = tl.program_id(0) % across
    f = j * TILE_F + tl.arange(0, TILE_F)
    PADDED: tl.constexpr = padded(RANK)
    if RANK > 0:
        right = _right(right_ptr, f, F, RANK, PADDED, False)
    if FOLD:
        gate_factor = tl.load(factor_ptr + f)[None, :]
        up_factor = tl.load(factor_ptr + F + f)[None, :]
    inner, inner_h = offsets(2 * F, TILE_M, TILE_F), offsets(F, TILE_M, TILE_F)
    down = tl.cdiv(M, TILE_M)
    for tile in range(tl.program_id(0) // across, down, tl.num_programs(0) // across):
        i = tl.cast(tile, tl.int32)
        dh_tile = load_tile(dh_ptr, i, j, inner_h, M, F, F, EVEN, TILE_M, TILE_F)
        if RANK > 0:
            dh_tile = _added(dh_tile, left_ptr, stride, right, scaling, i * TILE_M, M, RANK, PADDED, EVEN, TILE_M)
        dh = dh_tile.to(tl.float32)
        gate = load_saved_half(saved_ptr, scale_ptr, i, j, inner, M, F, 0, EVEN, TILE_M, TILE_F)
        up = load_saved_half(saved_ptr, scale_ptr, i, j, inner, M, F, 1, EVEN, TILE_M, TILE_F)
        value, slope = ACTIVATION(gate)
        dgate, dup = dh * up * slope, dh * value
        if FOLD:
            dgate, dup = dgate * gate_factor, dup * up_factor
        store_tile(d_ptr, tiles.round_to(dgate, dh_tile.dtype), i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
        store_tile(d_ptr + F, tiles.round_to(dup, dh_tile.dtype), i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
        if H:
            h = tiles.round_to(value * up, dh_tile.dtype)
            store_tile(dh_ptr, h, i, j, inner_h, M, F, F, EVEN, TILE_M, TILE_F)


def can_gate(hidden: Tensor, features: int, *added: Low | None) -> bool:
    """Whether these kernels cover this: 16 bits, whole blocks, ranks that fit into a tile."""
    return (
        hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.numel() > 0
        and hidden.is_contiguous()
        and features % BLOCK == 0
        and all(low is None or low.left.shape[1] <= LARGEST_RANK for low in added)
    )


def gated(gate_up: Tensor, gate: Low | None, up: Low | None, activation: str, into: Quantized | None) -> Tensor:
    """h of `gate_up[M, 2F]` with these added to its halves, which go `into` FP8 with bytes for scales, if wanted."""
    given, ranks, strides, scalings = _operands(gate_up, gate, up)
    save = into is not None
    given += into if into is not None else (gate_up, gate_up)
    key = ("forward", activation, save, ranks, scalings, kind(gate_up, *given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(
        key, _build_forward(gate_up, ranks, (*strides, *scalings), activation, save)
    )
    return launches.run(gate_up, *given)[0]


def _build_forward(
    gate_up: Tensor, ranks: tuple[int, ...], numbers: tuple[float, ...], activation: str, save: bool
) -> Launches:
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    launches = Launches(given=7)
    h = launches.make((m, f), gate_up.dtype)
    tile = tuning_for(gate_up.device).gated.low_rank
    fits = tile.columns == BLOCK if save else BLOCK % tile.columns == 0
    check_tile("gated.low_rank", tile, fits, f"gate and up are saved in blocks of 1×{BLOCK}")
    grid, constants = _arrange(gate_up, m, f, tile, activation)
    constants |= {"GATE_RANK": ranks[0], "UP_RANK": ranks[1], "SAVE": save}
    launches.launch(_forward_kernel, grid, (0, 1, 2, 3, 4, h, 5, 6), (m, f, *numbers), constants)
    launches.results = (h,)
    return launches


def gated_backward(
    dh: Tensor, saved: Quantized, added: Low | None, activation: str, *, factor: Tensor | None, h: bool
) -> Tensor:
    """The gradient of gate and up `[M, 2F]`, from `dh[M, F]` with `added`; h takes the place of dh, if it is wanted.

    `factor[2F]`: what the gradient is multiplied by before it is rounded. The scales of `saved` are bytes.
    """
    given, ranks, strides, scalings = _operands(dh, added)
    given.append(dh if factor is None else factor.contiguous())
    fold = factor is not None
    key = ("backward", activation, h, fold, ranks, scalings, kind(dh, *saved, *given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(
        key, _build_backward(dh, ranks[0], (*strides, *scalings), activation, fold, h)
    )
    return launches.run(dh, *saved, *given)[0]


def _build_backward(
    dh: Tensor, rank: int, numbers: tuple[float, ...], activation: str, fold: bool, h: bool
) -> Launches:
    m, f = dh.shape
    launches = Launches(given=6)
    gradient = launches.make((m, 2 * f), dh.dtype)
    tile = tuning_for(dh.device).gated.low_rank_backward
    fits = BLOCK % tile.columns == 0
    check_tile("gated.low_rank_backward", tile, fits, f"gate and up were saved in blocks of 1×{BLOCK}")
    grid, constants = _arrange(dh, m, f, tile, activation)
    constants |= {"RANK": rank, "FOLD": fold, "H": h}
    launches.launch(_backward_kernel, grid, (0, 1, 2, 3, 4, 5, gradient), (m, f, *numbers), constants)
    launches.results = (gradient,)
    return launches


def _operands(like: Tensor, *added: Low | None) -> tuple[list[Tensor], tuple[int, ...], list[int], tuple[float, ...]]:
    """Left and right of each, their ranks (0: nothing to add), the steps between rows of left, and their factors."""
    given: list[Tensor] = []
    for low in added:
        given += (like, like) if low is None else (low.left, *in_dtype([low.right], like.dtype))
    ranks = tuple(0 if low is None else low.left.shape[1] for low in added)
    strides = [1 if low is None else low.left.stride(0) for low in added]
    return given, ranks, strides, tuple(1.0 if low is None else float(low.scaling) for low in added)


def _arrange(x: Tensor, m: int, f: int, tile: Tile, activation: str) -> tuple[tuple[int], Any]:
    across, down = f // tile.columns, -(-m // tile.rows)
    programs = programs_in_strips(across, down * across, tile.programs * multiprocessors(x.device))
    constants = {"EVEN": m % tile.rows == 0, "TILE_M": tile.rows, "TILE_F": tile.columns, "num_warps": tile.warps}
    constants |= {"ACTIVATION": ACTIVATIONS[activation]}
    constants |= {} if tile.registers is None else {"maxnreg": tile.registers}
    return (programs,), constants
