"""How far an FP8 product may be from the exact one, element by element.

Rounding to nearest moves a value by at most half a step: |x̂ − x| <= max(2^-(m+1)·|x|, scale·s/2) =: δ(x), with m
mantissa bits and s the smallest subnormal, as long as nothing saturates. So

    |â·b̂ − a·b| <= (|a| + δ(a)) · (|b| + δ(b)) − |a| · |b|      (matrix products of magnitudes)

and FP32 accumulation over K terms adds K·2^-23 of the first term. Rounding the result to `out_dtype` adds half its
step. The bound is tight within a factor of a few for one element and far from it for a wrong transpose or scale.
"""

import torch
from torch import Tensor

from octavo.numerics import Format, get_format


def rounding_error(x: Tensor, format: Format | str, largest: float | None = None) -> Tensor:
    """δ(x) for a tensor quantised with a scale no larger than `largest` / FP8_MAX (its own amax if not given)."""
    format = get_format(format)
    amax = x.abs().max() if largest is None else torch.tensor(largest, device=x.device)
    smallest_step = amax.double() / format.max * format.smallest_subnormal * 2  # mx rounds its scale up by up to 2
    return torch.maximum(x.abs() * 2.0 ** -(format.mantissa_bits + 1), smallest_step / 2)


def product_bound(
    a: Tensor, b: Tensor, a_format: Format | str, b_format: Format | str, dtype: torch.dtype, tensor_cores: bool
) -> Tensor:
    """The bound above for `a @ b`, in float64.

    Hopper adds 32 products at a time to a sum that keeps about 14 bits: K/32 · 2^-13 instead of K · 2^-23.
    """
    a, b = a.detach().double(), b.detach().double()
    a_high = a.abs() + rounding_error(a, a_format)
    b_high = b.abs() + rounding_error(b, b_format)
    high = a_high @ b_high
    k = a.shape[-1]
    accumulation = (-(-k // 32) * 2.0**-13 if tensor_cores else k * 2.0**-23) * high
    return high - a.abs() @ b.abs() + accumulation + torch.finfo(dtype).eps * high


def assert_product_close(
    y: Tensor, a: Tensor, b: Tensor, a_format: Format | str = "E4M3", b_format: Format | str = "E4M3"
) -> None:
    """`y` is `a @ b` in FP8 within the bound; summed over broadcast batch dimensions where `y` has fewer."""
    exact = a.detach().double() @ b.detach().double()
    bound = product_bound(a, b, a_format, b_format, y.dtype, y.is_cuda)
    exact, bound = exact.sum_to_size(y.shape), bound.sum_to_size(y.shape)
    excess = (y.detach().double() - exact).abs() / bound
    assert excess.max() <= 1, f"{excess.max():.2f} times the bound"


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()
