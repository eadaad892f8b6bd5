"""Rounding of FP32 values onto an FP8 grid: to nearest even, or stochastically.

Both saturate: magnitudes beyond the format's largest value become it. Infinities and NaN are not values to be
rounded: they become NaN, in every format, so that an overflow upstream stays visible instead of turning into 448.
Where `v` is a scaled `source`, only the source's infinities count: values that became infinite by scaling saturate.

Stochastic rounding picks one of the two grid neighbours of `v` with probability proportional to closeness, so that
E[round(v)] = v for every |v| <= max. With the grid step at `v`, `s = 2^(max(⌊log2|v|⌋, min_exponent) − mantissa_bits)`,

    round(v) = s · ⌊v/s + u⌋,   u uniform on [0, 1) in steps of 2^-24.

`v/s` and the product are exact in FP32 (s is a power of two).
"""

import torch
from torch import Tensor

from octavo.numerics.formats import Format

ROUNDINGS = ("nearest", "stochastic")

_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23


def round_nearest(v: Tensor, format: Format, *, source: Tensor | None = None) -> Tensor:
    """Round FP32 `v` to FP8, to nearest even, saturating. `v` may be overwritten."""
    # The clamp must not see infinities: it would turn them into the largest value.
    return _non_finite_to_nan(v, source).clamp_(-format.max, format.max).to(format.dtype)


def round_stochastic(
    v: Tensor, format: Format, generator: torch.Generator | None = None, *, source: Tensor | None = None
) -> Tensor:
    """Round FP32 `v` to FP8, stochastically and without bias, saturating; reproducible from `generator`."""
    v = _non_finite_to_nan(v, source).clamp_(-format.max, format.max)
    exponent = (v.view(torch.int32) >> _MANTISSA_BITS & 0xFF).clamp_(min=format.min_exponent + _EXPONENT_BIAS)
    step_exponent = exponent - format.mantissa_bits
    step = (step_exponent << _MANTISSA_BITS).view(torch.float32)
    inverse_step = ((2 * _EXPONENT_BIAS - step_exponent) << _MANTISSA_BITS).view(torch.float32)
    noise = torch.rand(v.shape, dtype=torch.float32, device=v.device, generator=generator)
    # ⌊v/s + u⌋ in FP32 would round the sum first; comparing u with the fraction is the same thing, exactly.
    scaled = v * inverse_step
    whole = scaled.floor()
    return ((whole + (noise < scaled - whole)) * step).to(format.dtype)


def round_stochastic_bf16(v: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round FP32 `v` to BF16, stochastically and without bias: random lower halves are added and may carry."""
    noise = torch.randint(2**16, v.shape, dtype=torch.int32, device=v.device, generator=generator)
    upper = (v.view(torch.int32) + noise) & -(2**16)
    return torch.where(v.isfinite(), upper.view(torch.float32), v).to(torch.bfloat16)


def _non_finite_to_nan(v: Tensor, source: Tensor | None) -> Tensor:
    if v.device.type == "cpu" and v.numel() and not torch.compiler.is_compiling():
        low, high = torch.aminmax(v)
        if bool((high - low).isfinite()):  # one cheap pass saves two expensive ones in the usual case
            return v
    return torch.where((v if source is None else source).isinf(), torch.nan, v)
