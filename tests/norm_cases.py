"""Norms and rotations for the tests of their specification and of their kernels."""

import torch
from torch import Tensor

from octavo.numerics import E4M3
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized, quantize
from octavo.numerics.rotary import Heads

SHAPES = [(1, 64), (7, 80), (33, 130), (5, 4096), (3, 5000), (130, 256)]
HEADS = [Heads(4, 2, 64), Heads(3, 1, 128), Heads(2, 2, 80), Heads(1, 1, 6)]


def new_norm(width: int, dtype: torch.dtype, *, shifted: bool, device: str = "cpu") -> Norm:
    weight = torch.randn(width, device=device) * 0.3 + (0.0 if shifted else 1.0)
    return Norm(weight.to(dtype), 1e-5, shifted)


def saved_of(h: Tensor, x: Tensor, how: str) -> Quantized:
    """What a forward pass would have saved for the norm's backward: h, or x in FP8."""
    if how == "h":
        return Quantized(h, h.new_empty(0))
    actual = quantize(x, format=E4M3, granularity=how)
    more = -x.shape[0] % 64  # as products pad it
    data = torch.nn.functional.pad(actual.data.view(torch.uint8), (0, 0, 0, more)).view(actual.data.dtype)
    scale = (
        actual.scale if actual.scale.dim() == 0 else torch.nn.functional.pad(actual.scale, (0, 0, 0, more), value=1.0)
    )
    return Quantized(data, scale)


def angles(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin, as transformers' rotary embeddings compute them."""
    frequency = 10_000 ** (-torch.arange(0, width, 2, device=device) / width)
    angle = torch.outer(torch.arange(rows, device=device) * 3.0, frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def share_different(actual: Tensor, expected: Tensor) -> float:
    """The share of elements that differ; two NaNs are alike."""
    alike = (actual == expected) | (actual.isnan() & expected.isnan())
    return 1.0 - alike.float().mean().item()
