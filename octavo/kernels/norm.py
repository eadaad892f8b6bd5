"""RMS norm of whole rows, after an addition if there is one, and its gradients: the kernels behind `numerics.norm`.

forward    a program holds a few rows: reads h (and y), writes h + y, x, and 1 / rms
backward   a program walks over rows, and writes dh; it adds up its part of the weight's gradient as it goes, which
           a second launch sums, always in the same order
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.tiles import INTERPRETED, multiprocessors, reciprocal, round_to
from octavo.kernels.tuning import NormTile, tuning_for
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import BLOCK, Quantized

WIDEST = 16_384  # columns
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = tl.constexpr(BLOCK)
_LAUNCHES = LaunchCache()


@triton.jit
def inverse_rms(squares, eps, K: tl.constexpr):
    """1 / rms from sums of squares."""
    return tl.rsqrt(tl.div_rn(squares, tl.full(squares.shape, K, tl.float32)) + eps)


@triton.jit
def weighted(h_fp32, inverse, weight, SHIFTED: tl.constexpr, dtype: tl.constexpr):
    """x of a norm: rounded as transformers does it, for Llama or, shifted, for Gemma."""
    if SHIFTED:
        return round_to(h_fp32 * inverse * (1.0 + weight), dtype)
    return round_to(round_to(h_fp32 * inverse, dtype).to(tl.float32) * weight, dtype)


@triton.jit
def norm_kernel(
    h_ptr, y_ptr, weight_ptr, sum_ptr, x_ptr, inverse_ptr, M, eps,
    ADDS: tl.constexpr, SHIFTED: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    where = r[:, None].to(tl.int64) * K + c[None, :]
    inside = (r[:, None] < M) & (c[None, :] < K)
    h = tl.load(h_ptr + where, mask=inside, other=0.0)
    dtype = h.dtype
    if ADDS:
        y = tl.load(y_ptr + where, mask=inside, other=0.0)
        h = round_to(h.to(tl.float32) + y.to(tl.float32), dtype)
        tl.store(sum_ptr + where, h, mask=inside)
    h_fp32 = h.to(tl.float32)
    inverse = inverse_rms(tl.sum(h_fp32 * h_fp32, axis=1), eps, K)
    tl.store(inverse_ptr + r, inverse, mask=r < M)
    weight = tl.load(weight_ptr + c, mask=c < K, other=0.0).to(tl.float32)
    tl.store(x_ptr + where, weighted(h_fp32, inverse[:, None], weight[None, :], SHIFTED, dtype), mask=inside)


@triton.jit
def quotient(x, weight, inverse):
    """x / weight, correctly rounded (see `tiles.divide`), and zero where the weight is; `inverse` is 1 / weight."""
    if INTERPRETED:
        ratio = tl.div_rn(x, tl.broadcast_to(weight, x.shape))
    else:
        first = x * inverse
        ratio = tl.fma(tl.fma(-first, weight, x), inverse, first)
    return tl.where(weight == 0.0, 0.0, ratio)


@triton.jit
def norm_backward_kernel(
    g_ptr, saved_ptr, scale_ptr, weight_ptr, inverse_ptr, residual_ptr, dh_ptr, parts_ptr, M, stride_scale,
    FP8: tl.constexpr, BLOCKS: tl.constexpr, SHIFTED: tl.constexpr, ADDS: tl.constexpr, NEEDS_H: tl.constexpr,
    NEEDS_W: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`FP8`: x was saved, with a scale for every 128 columns (`BLOCKS`), every row, or all (`stride_scale`); else h."""
    c = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + c, mask=c < K, other=1.0).to(tl.float32)[None, :]
    if SHIFTED:
        weight += 1.0
    if FP8:
        one_over_weight = reciprocal(weight)
    dweight = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        where = r[:, None].to(tl.int64) * K + c[None, :]
        inside = (r[:, None] < M) & (c[None, :] < K)
        g = tl.load(g_ptr + where, mask=inside, other=0.0)
        saved = tl.load(saved_ptr + where, mask=inside, other=0.0)
        if ADDS:
            residual = tl.load(residual_ptr + where, mask=inside, other=0.0)
        inverse = tl.load(inverse_ptr + r, mask=r < M, other=0.0)[:, None]
        g_fp32 = g.to(tl.float32)
        if FP8:
            if BLOCKS:
                # Loaded one by one and repeated: loads of all columns would have FP8 bytes change hands (`tiles.cast`).
                block = tl.arange(0, WIDTH // _BLOCK)[None, :]
                present = (r[:, None] < M) & (block < stride_scale)
                few = tl.load(scale_ptr + r[:, None] * stride_scale + block, mask=present, other=0.0)
                many = tl.broadcast_to(few[:, :, None], [ROWS, WIDTH // _BLOCK, _BLOCK])
                scale = tl.reshape(many, [ROWS, WIDTH])
            else:
                scale = tl.load(scale_ptr + r * stride_scale, mask=r < M, other=0.0)[:, None]
            x = saved.to(tl.float32) * scale
            normed = quotient(x, weight, one_over_weight)
        else:
            normed = saved.to(tl.float32) * inverse
            x = weight * normed
        if NEEDS_W:
            dweight += g_fp32 * x if FP8 else g_fp32 * normed
        if NEEDS_H:
            sums = tl.sum(g_fp32 * x, axis=1)
            along = tl.div_rn(sums, tl.full(sums.shape, K, tl.float32))[:, None]
            dh = round_to((weight * g_fp32 - normed * along) * inverse, g.dtype)
            if ADDS:
                dh = round_to(dh.to(tl.float32) + residual.to(tl.float32), g.dtype)
            tl.store(dh_ptr + where, dh, mask=inside)
    if NEEDS_W:
        tl.store(parts_ptr + tl.program_id(0) * K + c, tl.sum(dweight, axis=0), mask=c < K)


@triton.jit
def sum_kernel(
    parts_ptr, weight_ptr, out_ptr, first, last, K: tl.constexpr, FP8: tl.constexpr, SHIFTED: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Sum rows `first` to `last` of the parts. `FP8`: the sum is that of g · x, to be divided by the weight."""
    c = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    total = tl.zeros([TILE_R, TILE_C], tl.float32)
    for start in range(first, last, TILE_R):
        r = start + tl.arange(0, TILE_R)
        inside = (r[:, None] < last) & (c[None, :] < K)
        total += tl.load(parts_ptr + r[:, None] * K + c[None, :], mask=inside, other=0.0)
    gradient = tl.sum(total, axis=0)
    if FP8:
        weight = tl.load(weight_ptr + c, mask=c < K, other=1.0).to(tl.float32)
        if SHIFTED:
            weight += 1.0
        gradient = tl.where(weight == 0.0, 0.0, tl.div_rn(gradient, weight))
    tl.store(out_ptr + c, round_to(gradient, out_ptr.dtype.element_ty), mask=c < K)


def can_norm(h: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether there is a kernel for these tensors, all of the shape of h and contiguous."""
    same = all(x is None or (x.is_contiguous() and x.dtype == h.dtype) for x in (h, *others))
    return same and h.dtype in DTYPES and weight.dtype in DTYPES and 0 < h.shape[-1] <= WIDEST and h.numel() > 0


def can_read(saved: Quantized) -> bool:
    """Whether the backward kernel reads what was saved: in high precision, or with scales as rows have them."""
    data, scale = saved
    if data.element_size() > 1:
        return data.is_contiguous()
    shapes = ((), (data.shape[0], 1), (data.shape[0], -(-data.shape[1] // BLOCK)))
    return data.is_contiguous() and scale.dtype == torch.float32 and tuple(scale.shape) in shapes


def rms_norm(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The kernel of `numerics.norm.rms_norm`."""
    key = (norm.eps, norm.shifted, kind(h, norm.weight))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(h, norm, adds=False))
    x, inverse = launches.run(h, norm.weight)
    return x, inverse


def add_rms_norm(h: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `numerics.norm.add_rms_norm`."""
    key = (norm.eps, norm.shifted, kind(h, norm.weight, y))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(h, norm, adds=True))
    total, x, inverse = launches.run(h, norm.weight, y)
    return total, x, inverse


def _build(h: Tensor, norm: Norm, *, adds: bool) -> Launches:
    m, k = h.shape
    launches = Launches(given=3 if adds else 2)
    total = (launches.make((m, k), h.dtype),) if adds else ()
    x, inverse = launches.make((m, k), h.dtype), launches.make((m, 1), torch.float32)
    rows, width, warps = _rows(k, tuning_for(h.device).norm)
    constants = {"ADDS": adds, "SHIFTED": norm.shifted, "K": k, "ROWS": rows, "WIDTH": width, "num_warps": warps}
    tensors = (0, 2 if adds else 0, 1, *(total or (x,)), x, inverse)
    launches.launch(norm_kernel, (-(-m // rows),), tensors, (m, float(norm.eps)), constants)
    launches.results = (*total, x, inverse)
    return launches


def norm_gradients(
    g: Tensor, saved: Quantized, norm: Norm, inverse: Tensor, residual: Tensor | None, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The kernel of `numerics.norm.norm_gradients`."""
    given = (g, saved.data, saved.scale, norm.weight, inverse, *(() if residual is None else (residual,)))
    key = (needs, norm.shifted, kind(*given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_backward(g, saved, norm, residual is not None, needs))
    ratio = iter(launches.run(*given))
    return next(ratio) if needs[0] else None, next(ratio) if needs[1] else None


def _build_backward(g: Tensor, saved: Quantized, norm: Norm, adds: bool, needs: tuple[bool, bool]) -> Launches:
    m, k = g.shape
    tiles = tuning_for(g.device).norm_backward
    rows, width, warps = _rows(k, tiles)
    programs = min(-(-m // rows), tiles.programs * multiprocessors(g.device))
    launches = Launches(given=6 if adds else 5)
    dh = launches.make((m, k), g.dtype) if needs[0] else 0
    parts = launches.make((programs, k), torch.float32) if needs[1] else 4
    fp8, scale = saved.data.element_size() == 1, saved.scale
    constants = {
        "FP8": fp8, "BLOCKS": fp8 and scale.dim() == 2 and scale.shape[1] > 1, "SHIFTED": norm.shifted, "ADDS": adds,
        "NEEDS_H": needs[0], "NEEDS_W": needs[1], "K": k, "ROWS": rows, "WIDTH": width, "num_warps": warps,
    }  # fmt: skip
    stride = scale.shape[1] if fp8 and scale.dim() == 2 else 0
    tensors = (0, 1, 2 if fp8 else 4, 3, 4, 5 if adds else 0, dh, parts)
    launches.launch(norm_backward_kernel, (programs,), tensors, (m, stride), constants)
    launches.results = (dh,) if needs[0] else ()
    if needs[1]:
        launches.results += (add_sum(launches, parts, 3, norm, (0, programs), fp8=fp8, device=g.device),)
    return launches


def add_sum(
    launches: Launches, parts: int, weight: int, norm: Norm, rows: tuple[int, int], *, fp8: bool, device: torch.device
) -> int:
    """Add the launch that sums these rows of `parts` into the gradient of a norm's weight, whose number it returns."""
    k = norm.weight.shape[0]
    tile_r, tile_c, warps, *_ = tuning_for(device).norm_sum
    out = launches.make((k,), norm.weight.dtype)
    constants = {
        "K": k, "FP8": fp8, "SHIFTED": norm.shifted, "TILE_R": tile_r, "TILE_C": tile_c, "num_warps": warps,
    }  # fmt: skip
    launches.launch(sum_kernel, (-(-k // tile_c),), (parts, weight, out), rows, constants)
    return out


def _rows(k: int, tile: NormTile) -> tuple[int, int, int]:
    """Rows and columns that a program holds at a time, and its warps."""
    width = triton.next_power_of_2(k)
    rows = max(1, tile.elements // width)
    return rows, width, min(16, max(1, rows * width // tile.per_warp))
