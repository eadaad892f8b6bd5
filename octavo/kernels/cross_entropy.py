"""Cross entropy of a chunk of logits: the kernels behind `numerics.cross_entropy`.

One program walks over one token's logits for the loss; then tiles compute the gradient, in place, or as FP8 in both
layouts, ready for the two GEMMs of the head's backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.launch import launch_once
from octavo.kernels.tuning import tuning_for
from octavo.numerics.cross_entropy import IGNORED
from octavo.numerics.formats import Format
from octavo.numerics.quantize import Quantized

_IGNORED = tl.constexpr(IGNORED)


@triton.jit
def _loss_kernel(logits_ptr, labels_ptr, loss_ptr, lse_ptr, V, stride, WIDTH: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    logits_ptr += t * stride
    lane = tl.arange(0, WIDTH)
    top = tl.full([WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    # Each lane keeps its own maximum and sum, so the lanes meet only once, at the end.
    for start in tl.range(0, V, WIDTH, num_stages=3):
        v = start + lane
        logit = tl.load(logits_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(tl.maximum(top, logit), -1e30)  # finite, so that no infinity meets another
        total = total * tl.exp(top - higher) + tl.exp(logit - higher)
        top = higher
    peak = tl.max(top, axis=0)
    lse = peak + tl.log(tl.sum(total * tl.exp(top - peak), axis=0))
    label = tl.load(labels_ptr + t)
    counted = label != _IGNORED
    known = (label >= 0) & (label < V)
    # NaN for a label that is no token: in the loss, and by way of lse in the gradient.
    lse = tl.where(counted & (known == 0), float("nan"), lse)
    picked = tl.load(logits_ptr + tl.where(known, label, 0)).to(tl.float32)
    tl.store(loss_ptr + t, tl.where(counted, lse - picked, 0.0))
    tl.store(lse_ptr + t, lse)


@triton.jit
def _gradient_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    factor_ptr,
    rows_ptr,
    columns_ptr,
    scale_ptr,
    scale_t_ptr,
    T,
    V,
    stride,
    stride_t,
    FP8: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_V: tl.constexpr,
):
    across = tl.cdiv(V, TILE_V)
    pid = tl.program_id(0)
    t = pid // across * TILE_T + tl.arange(0, TILE_T)
    v = pid % across * TILE_V + tl.arange(0, TILE_V)
    inside = (t[:, None] < T) & (v[None, :] < V)
    where = t[:, None].to(tl.int64) * stride + v[None, :]
    logits = tl.load(logits_ptr + where, mask=inside, other=float("-inf"))
    label = tl.load(labels_ptr + t, mask=t < T, other=_IGNORED)
    lse = tl.load(lse_ptr + t, mask=t < T, other=0.0)
    gradient = tl.exp(logits.to(tl.float32) - lse[:, None]) - tl.where(label[:, None] == v[None, :], 1.0, 0.0)
    gradient = tl.where(label[:, None] != _IGNORED, gradient, 0.0)
    if FP8:
        if logits.dtype == tl.float16:  # has less range than E5M2 under this scale
            rounded = gradient
        else:
            rounded = tiles.round_to(gradient, logits.dtype)
        dtype = rows_ptr.dtype.element_ty
        maximum: tl.constexpr = FORMAT.max
        unit = tl.div_rn(1.0, maximum)
        multiplier = tl.div_rn(1.0, unit)
        q = tiles.saturate(rounded.to(tl.float32) * multiplier, 0, 0, FORMAT, False)
        tl.store(rows_ptr + t[:, None].to(tl.int64) * V + v[None, :], tiles.cast(q, dtype, rounded.dtype), mask=inside)
        if COLUMNS:
            q_t = tiles.saturate(tl.trans(rounded).to(tl.float32) * multiplier, 0, 0, FORMAT, False)
            q8_t = tiles.cast(q_t, dtype, rounded.dtype)
            inside_t = (v[:, None] < V) & (t[None, :] < T)
            tl.store(columns_ptr + v[:, None].to(tl.int64) * stride_t + t[None, :], q8_t, mask=inside_t)
        if pid == 0:
            scale = unit * tl.load(factor_ptr)
            tl.store(scale_ptr, scale)
            tl.store(scale_t_ptr, scale)
    else:
        gradient = tl.where(label[:, None] != _IGNORED, gradient * tl.load(factor_ptr), 0.0)
        tl.store(rows_ptr + where, tiles.round_to(gradient, logits.dtype), mask=inside)


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, numel, WIDTH: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    for start in range(tl.program_id(0) * WIDTH, numel, tl.num_programs(0) * WIDTH):
        i = start + tl.arange(0, WIDTH).to(tl.int64)
        x = tl.load(x_ptr + i, mask=i < numel, other=0.0)
        tl.store(x_ptr + i, tiles.round_to(x.to(tl.float32) * factor, x.dtype), mask=i < numel)


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of `numerics.cross_entropy.cross_entropy`; loss and gradient are NaN for a label that is no token."""
    loss, lse = logits.new_empty(2, len(labels), dtype=torch.float32)
    width, warps = tuning_for(logits.device).cross_entropy
    sizes = (logits.shape[1], logits.stride(0))
    launch_once(_loss_kernel, (len(labels),), logits, labels, loss, lse, *sizes, WIDTH=width, num_warps=warps)
    return loss, lse


def cross_entropy_backward_(logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor) -> None:
    """`numerics.cross_entropy.cross_entropy_backward` in place of the logits."""
    grid, tile = _arrange(logits)
    launch_once(
        _gradient_kernel,
        grid,
        logits,
        labels,
        lse,
        factor,
        logits,
        logits,
        lse,
        lse,
        *logits.shape,
        logits.stride(0),
        0,
        FP8=False,
        COLUMNS=False,
        FORMAT=None,
        **tile,
    )


def cross_entropy_quantize(
    logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor, format: Format, columns: Tensor | None
) -> Quantized:
    """The kernel of `numerics.cross_entropy.cross_entropy_quantize`; writes columns `[V, T]`, too, if given."""
    t, v = logits.shape
    rows = Quantized(logits.new_empty(t, v, dtype=format.dtype), lse.new_empty(()))
    scale_t = lse.new_empty(())
    grid, tile = _arrange(logits)
    launch_once(
        _gradient_kernel,
        grid,
        logits,
        labels,
        lse,
        factor,
        rows.data,
        rows.data if columns is None else columns,
        rows.scale,
        scale_t,
        t,
        v,
        logits.stride(0),
        0 if columns is None else columns.stride(0),
        FP8=True,
        COLUMNS=columns is not None,
        FORMAT=format,
        **tile,
    )
    return rows


def scale_(x: Tensor, factor: Tensor) -> None:
    """`x *= factor`, which costs nothing where the factor is 1, as that of a loss usually is."""
    tuning = tuning_for(x.device)
    width, warps = tuning.rescale
    launch_once(_scale_kernel, (tuning.rescale_programs,), x, factor, x.numel(), WIDTH=width, num_warps=warps)


def _arrange(logits: Tensor) -> tuple[tuple[int], dict[str, int]]:
    tile = tuning_for(logits.device).cross_entropy_gradient
    grid = (-(-logits.shape[0] // tile.rows) * -(-logits.shape[1] // tile.columns),)
    return grid, {"TILE_T": tile.rows, "TILE_V": tile.columns, "num_warps": tile.warps}
