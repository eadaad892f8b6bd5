"""Quantisation and dequantisation: the meaning of an FP8 tensor.

    value = data × scale                                            (dequantising)
    scale = amax / FP8_MAX × margin                                 (the *dequantising* factor, FP32)
    data  = round(x × (1 / scale))                                  (one correctly rounded reciprocal, then multiply)

`scale` belongs to a group of elements, by granularity, over the last two dimensions `[..., R, C]`:

| granularity | one scale for                                | shape of `scale`                |
| ----------- | -------------------------------------------- | ------------------------------- |
| tensor      | everything                                   | `[]`                            |
| channel     | a row                                        | `[..., R, 1]`                   |
| block       | `1×128` elements, or `128×128` (`block=`)    | `[..., ⌈R/rows⌉, ⌈C/columns⌉]`  |
| mx          | `1×32` elements; a power of two in E8M0      | `[..., R, ⌈C/32⌉]`              |

Edge blocks are smaller; nothing needs to divide. C is the contracted dimension of the product that follows.

Unusual input:
- all zero: scale 1, data 0;
- tiny: the scale never falls below 2^-126, so its reciprocal is finite; smaller values round to 0;
- huge: the largest finite magnitude maps to the format's largest value; nothing overflows;
- NaN and infinities: NaN in `data` at their place, in every format; the scale comes from the finite elements;
- finite, but beyond FP32 once divided by the scale: the format's largest value, as everything else that is too large.

A scale given by the caller is the same factor, as `compute_scale` returns it, or a multiplier from
`FP8ScalingManager.get_scale`, which is recognised by its type (`multiplier.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics.amax import block_amax, tensor_amax
from octavo.numerics.checks import check_choice, checked_percentile
from octavo.numerics.formats import E4M3, E8M0_DTYPE, Format, get_format, to_float32
from octavo.numerics.multiplier import as_factor, checked_factor
from octavo.numerics.rounding import ROUNDINGS, round_nearest, round_stochastic

MX_RULES = ("up", "floor")
BLOCK = 128
BLOCKS = ((1, BLOCK), (BLOCK, BLOCK))
MX_BLOCK = 32


@dataclass(frozen=True)
class Granularity:
    """Which elements of `[R, C]` share a scale: so many rows by columns; None stands for all there are."""

    rows: int | None
    columns: int | None
    is_e8m0: bool = False  # the scale is a power of two, in one byte; else it is in FP32


# The group of elements of each granularity. That of `block` may be 128×128, too: see `granularity_of`.
GRANULARITIES = {
    "tensor": Granularity(None, None),
    "channel": Granularity(1, None),
    "block": Granularity(1, BLOCK),
    "mx": Granularity(1, MX_BLOCK, is_e8m0=True),
}
# How many elements along a row may share a scale without sharing it with all; the largest first.
GROUPS = tuple(sorted({g.columns for g in GRANULARITIES.values() if g.columns is not None}, reverse=True))
# How many rows may share a scale, other than one or all; the largest first.
GROUP_HEIGHTS = tuple(
    sorted({BLOCK, *(g.rows for g in GRANULARITIES.values() if g.rows is not None and g.rows > 1)}, reverse=True)
)
LARGEST_SCALE = 2.0**126
SMALLEST_SCALE = 2.0**-126  # the smallest normal FP32: its reciprocal is finite and exact


def granularity_of(name: str, block: tuple[int, int] = (1, BLOCK)) -> Granularity:
    """The granularity of this name; `block` counts for the one that is called so."""
    return Granularity(*block) if name == "block" else GRANULARITIES[name]


def scale_shape(shape: Sequence[int], granularity: str, block: tuple[int, int] = (1, BLOCK)) -> tuple[int, ...]:
    """The shape of the scale of a tensor `[..., R, C]`."""
    group = granularity_of(granularity, block)
    if group.rows is None:
        return ()
    *batch, r, c = shape
    return (*batch, -(-r // group.rows), 1 if group.columns is None else -(-c // group.columns))


def packed_scale_dtype(granularity: str) -> torch.dtype:
    """The dtype in which kernels and operators pass scales: FP32, or bytes for E8M0."""
    return torch.uint8 if GRANULARITIES[granularity].is_e8m0 else torch.float32


class Quantized(NamedTuple):
    """An FP8 tensor: `value = data × scale`. A plain pair, so it unpacks and passes through any interface."""

    data: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(self.data, self.scale, dtype)


def quantize(
    x: Tensor,
    scale: Tensor | float | None = None,
    *,
    format: Format | str = E4M3,
    granularity: str = "tensor",
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
    block: tuple[int, int] = (1, BLOCK),
    mx_rule: str = "up",
) -> Quantized:
    """Quantise a floating-point tensor.

    `scale`: the dequantising factor, as `compute_scale` returns it, or what `FP8ScalingManager.get_scale` returns. Not
    given: computed from `x`. A multiplier in the place of the factor is refused where it shows (`multiplier.py`).
    """
    format = get_format(format)
    check_choice("rounding", rounding, ROUNDINGS)
    if scale is None:
        scale = compute_scale(x, format=format, granularity=granularity, block=block, mx_rule=mx_rule)
    else:
        check_choice("granularity", granularity, GRANULARITIES)
        _check_floating(x)
        scale = checked_factor(scale, x, format)
    return quantize_by(x, scale, format, rounding, generator)


def quantize_by(
    x: Tensor, scale: Tensor, format: Format, rounding: str = "nearest", generator: torch.Generator | None = None
) -> Quantized:
    """Compute `round(x / scale)` for a given scale."""
    x_fp32 = x.detach().float()
    scaled = x_fp32 * expand_scale(reciprocal(scale), x.shape)
    if rounding == "stochastic":
        data = round_stochastic(scaled, format, generator, source=x_fp32)
    else:
        data = round_nearest(scaled, format, source=x_fp32)
    return Quantized(data.contiguous(), scale)


def quantize_stochastic(
    x: Tensor,
    scale: Tensor | float | None = None,
    *,
    format: Format | str = E4M3,
    granularity: str = "tensor",
    generator: torch.Generator | None = None,
) -> Quantized:
    """Apply `quantize` with stochastic rounding: unbiased, on the FP8 grid, reproducible from `generator`."""
    return quantize(x, scale, format=format, granularity=granularity, rounding="stochastic", generator=generator)


def dequantize(
    data: "Tensor | Quantized", scale: Tensor | float | torch.dtype | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute `data × scale` in FP32, rounded once to `dtype` (FP32 if not given).

    `dequantize(q)` and `dequantize(q, dtype)` for a result of `quantize`; `dequantize(data, scale)` for FP8 data with
    its factor, or with the multiplier that `FP8ScalingManager.get_scale` returned.
    """
    if isinstance(scale, torch.dtype):
        scale, dtype = None, scale
    if isinstance(data, Quantized):
        if scale is not None:
            raise TypeError("scale beside a Quantized, which has its own: dequantize(q), or dequantize(q.data, scale)")
        data, scale = data
    elif scale is None:
        raise TypeError("scale is not given: dequantize(data, scale), or dequantize(q) for what quantize returned")
    factor = as_factor(scale, data.device).float()
    return (to_float32(data) * expand_scale(factor, data.shape)).to(dtype or torch.float32)


def compute_scale(
    x: Tensor,
    *,
    format: Format | str = E4M3,
    granularity: str = "tensor",
    margin: float = 1.0,
    percentile: float | None = None,
    block: tuple[int, int] = (1, BLOCK),
    mx_rule: str = "up",
) -> Tensor:
    """Return the dequantising scale of `x`: FP32, or E8M0 for `mx`. `margin` is a factor of headroom above the amax."""
    format = get_format(format)
    check_choice("granularity", granularity, GRANULARITIES)
    check_choice("mx_rule", mx_rule, MX_RULES)
    if block not in BLOCKS:
        raise ValueError(f"block={block!r}: choose one of {', '.join(map(str, BLOCKS))}")
    if not 0 < margin < math.inf:
        raise ValueError(f"margin={margin!r}: a finite factor above 0")
    if percentile is not None:
        percentile = checked_percentile("percentile", percentile)
    _check_floating(x)
    x = x.float() if x.dtype == torch.float64 else x
    if percentile is not None and granularity != "tensor":
        raise ValueError(f"percentile={percentile!r}: only with granularity='tensor'")
    if granularity == "tensor":
        return scale_from_amax(tensor_amax(x, percentile), format, margin)
    if x.dim() == 0:
        raise ValueError(f"granularity={granularity!r}: a 0-d tensor has no rows; use granularity='tensor'")
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    group = granularity_of(granularity, block)
    amax = block_amax(rows, (group.rows or 1, group.columns or max(rows.shape[-1], 1)))
    if group.columns is None and not rows.shape[-1]:
        amax = amax.new_zeros(*rows.shape[:-1], 1)  # a row without elements still has a scale
    amax = amax.squeeze(0) if x.dim() == 1 else amax
    return mx_scale(amax, format, mx_rule, margin) if group.is_e8m0 else scale_from_amax(amax, format, margin)


def scale_from_amax(amax: Tensor, format: Format, margin: float = 1.0) -> Tensor:
    """Compute `amax / FP8_MAX × margin` in FP32; 1 where amax is 0, never below `SMALLEST_SCALE`."""
    scale = (divide(amax.float(), format.max) * margin).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    return torch.where(amax > 0, scale, 1.0)


def mx_scale(amax: Tensor, format: Format, rule: str = "up", margin: float = 1.0) -> Tensor:
    """Return a power of two in E8M0 per block.

    `up` rounds `amax / FP8_MAX` up to a power of two, so that nothing saturates. `floor` is the rule of the OCP MX
    specification, `2^(⌊log2 amax⌋ − ⌊log2 FP8_MAX⌋)`: it clips block maxima whose mantissa exceeds the format's.
    """
    if rule == "up":
        bits = (divide(amax, format.max) * margin).view(torch.int32)
        exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
    else:
        top = torch.tensor(format.max, dtype=torch.float32, device=amax.device).view(torch.int32) >> 23
        exponent = ((amax * margin).view(torch.int32) >> 23) - top + 127
    exponent = torch.where(amax > 0, exponent.clamp(1, 254), 127)
    return exponent.to(torch.uint8).view(E8M0_DTYPE)


def reciprocal(scale: Tensor) -> Tensor:
    """Return the quantising multiplier `1 / scale`, correctly rounded in FP32 (`torch.reciprocal` need not be)."""
    return torch.ones((), dtype=torch.float32, device=scale.device) / scale.float()


def divide(x: Tensor, divisor: float) -> Tensor:
    """Compute `x / divisor`, correctly rounded; for a Python number CUDA would multiply by its rounded reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def expand_scale(scale: Tensor, shape: torch.Size) -> Tensor:
    """Broadcast per-group scales to data of `shape`.

    The block is derived from the shapes; where two readings are possible (one block covers the row), they agree.
    """
    if scale.dim() == 0:
        return scale
    if len(shape) == 1:
        return _spread(scale, -1, shape[-1])
    if scale.dim() == 1:
        raise ValueError(f"scale of shape {tuple(scale.shape)} for data {tuple(shape)}: give 0-d, or [R, 1] per row")
    return _spread(_spread(scale, -2, shape[-2]), -1, shape[-1])


def quantize_by_groups(
    x: Tensor,
    scale: Tensor,
    format: Format,
    rounding: str = "nearest",
    *,
    first: int,
    height: int | None,
    width: int | None,
) -> Tensor:
    """Compute `round(x / scale)` for rows `[R, C]` of a larger matrix, those from `first` on; return the data.

    `scale`: of all groups of that matrix, `[⌈rows/height⌉, ⌈C/width⌉]`; None stands for all rows or columns.
    """
    spread = scale_of_rows(scale, x.shape, first=first, height=height, width=width)
    return quantize_by(x, spread, format, rounding).data


def scale_of_rows(scale: Tensor, shape: Sequence[int], *, first: int, height: int | None, width: int | None) -> Tensor:
    """Return the scales of rows from `first` on of a larger matrix: one for each element, or what broadcasts."""
    rows, columns = shape
    scale = scale.float()
    if height is not None and scale.dim():
        scale = scale[torch.arange(first, first + rows, device=scale.device) // height]
    if width is not None and scale.dim():
        scale = scale[:, torch.arange(columns, device=scale.device) // width]
    return scale


def _spread(scale: Tensor, dim: int, size: int) -> Tensor:
    groups = scale.shape[dim]
    if groups in (1, size):
        return scale
    blocks = GROUPS if dim == -1 else GROUP_HEIGHTS
    block = next((b for b in blocks if -(-size // b) == groups), None)
    if block is None:
        choices = " or ".join(f"{-(-size // b)} (blocks of {b})" for b in reversed(blocks))
        raise ValueError(
            f"scale of shape {tuple(scale.shape)} does not fit {size} elements in dimension {dim}: "
            f"expected 1, {size}, {choices}"
        )
    return scale.repeat_interleave(block, dim).narrow(dim, 0, size)


def _check_floating(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}: quantize takes a tensor")
    if not x.is_floating_point() or x.element_size() == 1:
        raise TypeError(f"x has dtype {x.dtype}: quantize takes float16, bfloat16, float32 or float64")
