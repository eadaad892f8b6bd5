"""The two kinds of scale, told apart.

    factor        value = data × factor            `Quantized.scale`, `compute_scale`, the scales of checkpoints
    multiplier    data = round(x × multiplier)     `FP8ScalingManager.get_scale`; elsewhere often called "scale", too

Taken for each other they give zeros, or nothing but the largest value. So `get_scale` returns a `Multiplier`, which
`quantize`, `dequantize` and `fp8_linear` know; every other tensor or number is a factor. A multiplier that has lost its
type (`get_scale(name).item()`, `448 / x.abs().max()`) is recognised by what it would do: where a factor would put the
largest |x| outside of the format's range, and its reciprocal would not, it is refused.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from octavo.numerics.amax import finite_amax
from octavo.numerics.formats import E8M0_DTYPE, Format

# Limits for the scaled largest |x|: above twice the format's maximum many elements saturate, below 16 times its least
# normal number most lose bits. A computed multiplier puts it at the maximum or below; slightly above if it is stale.
_TOO_HIGH, _TOO_LOW, _OLD = 2.0, 16.0, 1.25


class Multiplier(Tensor):
    """Quantising multiplier: the tensor that x is multiplied by. `1 / multiplier` is the dequantising factor.

    In arithmetic it is a plain tensor. Copies, other devices and products with a number remain multipliers; other
    results do not.
    """

    @classmethod
    def of(cls, multiplier: Tensor) -> Self:
        return multiplier.as_subclass(cls)

    @property
    def factor(self) -> Tensor:
        """The dequantising factor, correctly rounded."""
        plain = self.detach().as_subclass(Tensor).float()
        return torch.ones((), dtype=torch.float32, device=plain.device) / plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied: Self = memo.setdefault(id(self), self.clone())
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _SAME or (func in _BY_NUMBER and isinstance(args[-1], int | float)):
            return result.as_subclass(cls)
        return result


_SAME = {
    *(Tensor.clone, Tensor.detach, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.contiguous),
    *(Tensor.reshape, Tensor.view, Tensor.squeeze, torch.clone, torch.squeeze, torch.reshape),
}
_BY_NUMBER = {
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, torch.mul, torch.div),
}


def as_factor(scale: Tensor | float, device: torch.device) -> Tensor:
    """Return the dequantising factor that a caller's scale stands for: FP32, or E8M0 as is; 0-d if it is one number."""
    if not isinstance(scale, Tensor | int | float):
        raise TypeError(f"scale={scale!r}: a number or a tensor; a format goes by name, format=...")
    if isinstance(scale, int | float) and not 0 < scale < math.inf:
        raise ValueError(f"scale={scale!r}: a finite number above 0")
    if isinstance(scale, Multiplier):
        scale = scale.factor
    scale = torch.as_tensor(scale, device=device).detach()
    scale = scale if scale.dtype == E8M0_DTYPE else scale.float()
    return scale.reshape(()) if scale.numel() == 1 else scale


def checked_factor(scale: Tensor | float, x: Tensor, format: Format, name: str = "scale") -> Tensor:
    """Return `as_factor` for quantising x, unless it must be a multiplier that has lost its type.

    On a CPU that is an error. Elsewhere, and while compiling, the factor is then NaN, and so are all results: a check
    would have to wait for the device.
    """
    factor = as_factor(scale, x.device)
    if factor.device.type == "cpu" and not torch.compiler.is_compiling() and not bool((factor.float() > 0).all()):
        raise ValueError(f"{name} has values that are not above 0: {factor}")
    if isinstance(scale, Multiplier) or factor.dim() or not x.numel():
        return factor
    amax, value = finite_amax(x)[0], factor.float()
    low, divided, multiplied = _TOO_LOW * 2.0**format.min_exponent, amax / value, amax * value
    useless = (divided < low) | (divided > _TOO_HIGH * format.max)
    mistaken = useless & (multiplied >= low) & (multiplied <= _OLD * format.max)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.where(mistaken, torch.nan, value)
    if bool(mistaken):
        raise ValueError(
            f"{name}={value.item():g} for |x| up to {amax.item():g}: x / {name} is out of {format}'s range, and "
            f"x × {name} is in it. A scale is the factor that dequantises (value = data × scale); of a multiplier, "
            "such as 448 / amax, pass 1 / multiplier, or what FP8ScalingManager.get_scale returns, as it is"
        )
    return factor
