"""RMS norm before a product, with a backward that reads the norm's output x, which is saved in FP8, and no input.

    x = weight · h / rms(h)          dh = (weight · g − x / weight · mean(g · x)) / rms(h)

Shapes: `h[..., K]`, one rms for each row. That x has been to FP8 and back touches the second term alone, which is one
of K directions.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    weight: Tensor
    eps: float


def rms_norm(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return x, as Hugging Face's Llama computes it, and 1 / rms of each row in FP32."""
    wide = h.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return norm.weight * (wide * inverse).to(h.dtype), inverse


def rms_norm_backward(g: Tensor, x: Tensor, norm: Norm, inverse: Tensor, normed: Tensor | None = None) -> Tensor:
    """Return dh in the dtype of g. `normed`: h / rms(h), if known.

    Without it, the second term is zero in columns whose weight is zero, since x / weight is undefined there.
    """
    weight, wide, x = norm.weight.float(), g.float(), x.float()
    along = (wide * x).mean(-1, keepdim=True)
    normed = torch.where(weight == 0, 0.0, x / weight) if normed is None else normed
    return ((weight * wide - normed * along) * inverse).to(g.dtype)


def weight_gradient(g: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """Gradient of the norm weight; zero where the weight is zero, since x / weight is undefined there."""
    weight = norm.weight.float()
    along = (g.float() * x.float()).sum(0)
    return torch.where(weight == 0, 0.0, along / weight).to(norm.weight.dtype)
