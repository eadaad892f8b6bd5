"""Magnitudes that scales are made from.

`amax` is the largest |x| over the *finite* elements: one infinity must not turn every other value into zero.
Non-finite elements are counted apart, and stay visible (they become NaN in the quantised tensor).

A percentile instead of the maximum ignores outliers: with `percentile=99.9`, one element in a thousand may saturate
and the rest gains resolution. `torch.quantile` refuses tensors past 16M elements, so this counts: |x| rounded up to
BF16 has 2^15 possible bit patterns, ordered like the values; their histogram gives the smallest BF16 value `v` such
that at least `percentile` % of the elements are <= `v`. Exact for BF16 input, within 2^-7 above for FP32.
"""

import torch
from torch import Tensor

_BF16_BITS = 16
_FINITE_PATTERNS = 0x7F80  # the bit pattern of +inf in BF16: finite magnitudes are below it


def finite_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest finite magnitude of a tensor (0 if there is none), and whether all is finite; both 0-d."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device), torch.ones((), dtype=torch.bool, device=x.device)
    x = x.detach()
    x = x.float() if x.dtype == torch.float64 else x  # values that overflow FP32 count as non-finite
    low, high = torch.aminmax(x)
    amax = torch.maximum(-low, high).float()
    finite = amax.isfinite()
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and bool(finite):
        return amax, finite  # the usual case; masking costs two more passes over the tensor
    return torch.where(finite, amax, mask_non_finite(x).abs().amax().float()), finite


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest finite magnitude of each `rows × columns` block of the last two dimensions.

    Blocks at the edges may be smaller. `[..., R, C]` gives `[..., ⌈R/rows⌉, ⌈C/columns⌉]`, FP32.
    """
    rows, columns = block
    pad_rows, pad_columns = -x.shape[-2] % rows, -x.shape[-1] % columns
    magnitude = mask_non_finite(x.detach()).abs()
    if pad_rows or pad_columns:
        magnitude = torch.nn.functional.pad(magnitude, (0, pad_columns, 0, pad_rows))
    return magnitude.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax(dim=(-3, -1)).float()


def percentile_amax(x: Tensor, percentile: float) -> Tensor:
    """Return the `percentile` of the finite |x|, rounded up to BF16; FP32 and 0-d."""
    x = x.detach().float()
    bits = mask_non_finite(x).abs().flatten().view(torch.int32)
    patterns = (bits + 0xFFFF) >> _BF16_BITS  # rounded up
    counts = torch.bincount(patterns.clamp_(max=_FINITE_PATTERNS - 1), minlength=_FINITE_PATTERNS)
    masked = (~x.isfinite()).sum()
    counts[0] -= masked  # masked elements were counted as zeros
    needed = ((x.numel() - masked).double() * percentile / 100).ceil_().unsqueeze(0)
    pattern = torch.searchsorted(counts.cumsum(0).double(), needed).clamp_(max=_FINITE_PATTERNS - 1)
    return (pattern.to(torch.int32) << _BF16_BITS).view(torch.float32).squeeze(0)


def tensor_amax(x: Tensor, percentile: float | None = None) -> Tensor:
    """Return one step's amax of a tensor: the maximum of |x|, or a percentile of it."""
    top = finite_amax(x)[0]
    return top if percentile is None else percentile_or_top(x, percentile, top)


def percentile_or_top(x: Tensor, percentile: float, top: Tensor) -> Tensor:
    """Return the percentile, or the maximum where that is 0 because nearly all elements are (after a ReLU, say)."""
    amax = percentile_amax(x, percentile)
    return torch.where(amax > 0, amax, top)


def mask_non_finite(x: Tensor) -> Tensor:
    """Replace NaN and infinities by zeros."""
    return torch.where(x.isfinite(), x, 0.0)
