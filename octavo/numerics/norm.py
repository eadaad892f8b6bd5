"""RMS norm, alone, after the residual stream was added to, or before a product; and the way back.

    h ← h + y                        if there is a y to add, rounded as torch rounds an addition
    x = weight · h / rms(h)          dh = (weight · g − x / weight · mean(g · x)) / rms(h) + residual

Shapes: `h[..., K]`, one rms for each row. Computed in FP32 and rounded as transformers does it: Llama's norm rounds
h / rms(h) and then the product with the weight, Gemma's (`Norm.shifted`) multiplies by 1 + weight and rounds once.

Backward reads h, or, where a product follows and keeps its input in FP8, the norm's output x, and no input. That x has
been to FP8 and back touches the second term alone, which is one of K directions. `residual` is the gradient that comes
to h past the norm; it is added to dh after rounding, as autograd would.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics.quantize import Quantized


class Norm(NamedTuple):
    """Weight and eps of an RMS norm. `shifted`: it multiplies by 1 + weight, in FP32, as Gemma does."""

    weight: Tensor
    eps: float
    shifted: bool = False

    def factor(self) -> Tensor:
        """Return what h / rms(h) is multiplied by, in FP32."""
        return self.weight.float() + 1.0 if self.shifted else self.weight.float()


def rms_norm(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return x, as transformers computes it, and 1 / rms of each row in FP32."""
    wide = h.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.shifted:
        return (wide * inverse * norm.factor()).to(h.dtype), inverse
    return norm.weight * (wide * inverse).to(h.dtype), inverse


def add_rms_norm(h: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Return h + y, and of that x and 1 / rms of each row."""
    h = h + y
    return h, *rms_norm(h, norm)


def rms_norm_backward(g: Tensor, x: Tensor, norm: Norm, inverse: Tensor, normed: Tensor | None = None) -> Tensor:
    """Return dh in the dtype of g. `normed`: h / rms(h), if known.

    Without it, the second term is zero in columns whose weight is zero, since x / weight is undefined there.
    """
    factor, wide, x = norm.factor(), g.float(), x.float()
    along = (wide * x).mean(-1, keepdim=True)
    normed = torch.where(factor == 0, 0.0, x / factor) if normed is None else normed
    return ((factor * wide - normed * along) * inverse).to(g.dtype)


def weight_gradient(g: Tensor, x: Tensor, norm: Norm, normed: Tensor | None = None) -> Tensor:
    """Gradient of the norm weight. `normed`: h / rms(h), if known.

    Without it, the gradient is zero where the weight is zero, since x / weight is undefined there.
    """
    if normed is not None:
        return (g.float() * normed).sum(0).to(norm.weight.dtype)
    factor = norm.factor()
    along = (g.float() * x.float()).sum(0)
    return torch.where(factor == 0, 0.0, along / factor).to(norm.weight.dtype)


def norm_gradients(
    g: Tensor, saved: Quantized, norm: Norm, inverse: Tensor, residual: Tensor | None, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return dh plus `residual`, and the gradient of the weight, from `g[M, K]` and what was saved; `needs` says which.

    `saved`: x in FP8, maybe with more rows, or h in high precision.
    """
    normed = None
    if saved.data.element_size() > 1:
        normed = saved.data.float() * inverse
        x = norm.factor() * normed
    else:
        x = saved.dequantize(torch.float32)[: g.shape[0]]
    dh = rms_norm_backward(g, x, norm, inverse, normed) if needs[0] else None
    if dh is not None and residual is not None:
        dh = dh + residual
    return dh, weight_gradient(g, x, norm, normed) if needs[1] else None
