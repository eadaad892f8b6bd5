"""The eight-bit formats.

A format is a sign, `exponent_bits` and `mantissa_bits`. With bias `b`, a normal number is
`±2^(e−b) · (1 + m/2^mantissa_bits)` and a subnormal one `±2^(1−b) · m/2^mantissa_bits`:

| format     | exponent | mantissa | largest | smallest normal | smallest subnormal | inf | NaN |
| ---------- | -------- | -------- | ------- | --------------- | ------------------ | --- | --- |
| E4M3       | 4        | 3        | 448     | 2^-6            | 2^-9               | no  | yes |
| E5M2       | 5        | 2        | 57344   | 2^-14           | 2^-16              | yes | yes |
| E4M3_FNUZ  | 4        | 3        | 240     | 2^-7            | 2^-10              | no  | yes |
| E5M2_FNUZ  | 5        | 2        | 57344   | 2^-15           | 2^-17              | no  | yes |

The `fnuz` twins (finite, no negative zero) are what MI300 computes in. E8M0 holds scales only: a power of two
from 2^-127 to 2^127, with no sign and no zero.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """An FP8 format, with everything that rounding needs to know about it."""

    name: str
    dtype: torch.dtype
    max: float
    mantissa_bits: int
    min_exponent: int  # of the smallest normal number

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def max_exponent(self) -> int:
        """⌊log2 of the largest value⌋."""
        return math.frexp(self.max)[1] - 1

    @property
    def saturation_threshold(self) -> float:
        """Half-way from `max` to the next step there would be: larger magnitudes saturate."""
        return self.max + 2.0 ** (self.max_exponent - self.mantissa_bits - 1)

    def __str__(self) -> str:
        return self.name


E4M3 = Format("E4M3", torch.float8_e4m3fn, 448.0, 3, -6)
E5M2 = Format("E5M2", torch.float8_e5m2, 57344.0, 2, -14)
E4M3_FNUZ = Format("E4M3_FNUZ", torch.float8_e4m3fnuz, 240.0, 3, -7)
E5M2_FNUZ = Format("E5M2_FNUZ", torch.float8_e5m2fnuz, 57344.0, 2, -15)

FORMATS = {f.name: f for f in (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)}
E8M0_DTYPE = torch.float8_e8m0fnu


def get_format(format: Format | str | torch.dtype) -> Format:
    """Look a format up by name, in any case, or by its dtype; a `Format` passes through."""
    if isinstance(format, Format):
        return format
    if isinstance(format, torch.dtype):
        return format_of(format)
    known = FORMATS.get(str(format).upper())
    if known is None:
        raise ValueError(f"format={format!r}: choose one of {', '.join(FORMATS)}")
    return known


def to_float32(data: Tensor) -> Tensor:
    """Convert FP8 to FP32, exactly: `data.float()`, which takes four times as long for E4M3 on a CPU."""
    if data.device.type != "cpu" or data.dtype != torch.float8_e4m3fn or torch.compiler.is_compiling():
        return data.float()
    # The seven bits of an E4M3 magnitude, moved to where FP16 has its exponent and mantissa, are the value / 2^8.
    bits = (data.view(torch.int8).to(torch.int16) << 7) & ~0x4000
    value = bits.view(torch.float16).float().mul_(256.0)
    if data.numel() and bool(
        torch.stack(torch.aminmax(value)).abs().amax() > E4M3.max
    ):  # NaN, which this would turn into 480
        return data.float()
    return value


def format_of(dtype: torch.dtype) -> Format:
    """Return the format of a float8 dtype."""
    for format in FORMATS.values():
        if format.dtype == dtype:
            return format
    raise ValueError(f"dtype={dtype}: not an FP8 data type; choose one of {[str(f.dtype) for f in FORMATS.values()]}")
