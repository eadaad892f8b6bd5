"""AdamW's step for one parameter, in torch: what `kernels/adamw.py` does in one pass over it.

Means are plain tensors, or torchao's with few bits. Of 4 bits, torchao's levels for the mean of squares are sixteenths
of a block's largest. But squares of gradients differ by orders of magnitude within a block: all the small ones would
count as a sixteenth, and weights with small gradients would hardly move (BDH 100M, 1,000 steps: loss 12 % higher). Here
they are powers of two, down to 2⁻¹⁵; between two of them it is rounded at random, or a mean that falls by a twentieth
in a step would never fall. A state has its levels with it (`qmap`), so torchao reads it all the same.

What is random comes from the gradient's own bits, the place and the step, through a mixer (lowbias32, by C. Wellons):
the same whenever it is computed, in whatever order, and after a restart.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST_POWER = 15  # its code
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Step:
    """The `count`-th step, and what the optimiser says of it. `stochastic`: round p, if in BF16, at random."""

    count: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    stochastic: bool

    @property
    def rate(self) -> float:
        """By what the mean is multiplied: with its correction for having begun at zero."""
        return self.lr / (1 - self.betas[0] ** self.count)

    @property
    def root_correction(self) -> float:
        """The same for the root of the mean of squares."""
        return float((1 - self.betas[1] ** self.count) ** -0.5)

    @property
    def decay(self) -> float:
        """What is left of p."""
        return 1 - self.lr * self.weight_decay

    def rounds_at_random(self, p: Tensor) -> bool:
        return self.stochastic and p.dtype == torch.bfloat16


def apply(step: Step, p: Tensor, g: Tensor, mean: Any, square: Any) -> None:
    """A step of p and of its means, in place."""
    g = g.float()
    new_mean = mean.float().lerp(g, 1 - step.betas[0])
    new_square = square.float().lerp(g.square(), 1 - step.betas[1])
    new = p.float() * step.decay - step.rate * new_mean / (new_square.sqrt() * step.root_correction + step.eps)
    mean.copy_(new_mean)
    if is_of_4_bits(square):
        write_powers(square, new_square, noise_of(g, step.count) >> 16)
    else:
        square.copy_(new_square)
    p.copy_(_to_bf16_at_random(new, noise_of(g, step.count)) if step.rounds_at_random(p) else new)


def salt_of(count: int) -> int:
    """What a step adds to the mixer, in 31 bits."""
    return count * 0x85EBCA6B & 0x7FFFFFFF


def noise_of(g: Tensor, count: int) -> Tensor:
    """32 bits for each element of an FP32 gradient, as int64."""
    place = torch.arange(g.numel(), device=g.device).view(g.shape)
    x = g.contiguous().view(torch.int32).long() & _MASK
    x = x ^ (place * 0x9E3779B1 & _MASK) ^ salt_of(count)
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16


def _to_bf16_at_random(p: Tensor, noise: Tensor) -> Tensor:
    """Away from zero with the probability that the bits to be cut off say. Not NaN or infinity: these would carry."""
    bits = p.contiguous().view(torch.int32)
    up = torch.where(p.isfinite(), noise & 0xFFFF, 0).int()
    return (bits + up & -0x10000).view(torch.float32).bfloat16()


def is_of_4_bits(state: Any) -> bool:
    return type(state).__name__ == "OptimState4bit"


def powers(device: torch.device | None = None) -> Tensor:
    """The levels, in rising order."""
    return torch.tensor([2.0 ** (code - LARGEST_POWER) for code in range(LARGEST_POWER + 1)], device=device)


def write_powers(state: Any, values: Tensor, noise: Tensor) -> None:
    """Blocks of what is not negative, to a power of two of their largest, up or down by 16 bits of noise."""
    blocks = values.float().reshape(-1, state.block_size)
    scale = blocks.amax(1, keepdim=True).clip(1e-12)
    bits = (blocks / scale).view(torch.int32) + (noise.int() << 7).view(blocks.shape)
    codes = ((bits >> 23) - 127 + LARGEST_POWER).clamp(0, LARGEST_POWER).to(torch.uint8).view(-1, 2)
    state.codes.copy_(codes[:, 0] << 4 | codes[:, 1])
    state.scale.copy_(scale.view(-1))


def with_powers(state: Any) -> Any:
    """A 4-bit mean of squares with these levels: the very one, if it has them, else its values in a new one."""
    if not is_of_4_bits(state) or torch.equal(state.qmap, powers(state.qmap.device)):
        return state
    names, context = state.__tensor_flatten__()
    parts = {name: torch.empty_like(getattr(state, name)) for name in names}
    new = type(state).__tensor_unflatten__(parts, context, state.size(), state.stride())
    new.qmap.copy_(powers())
    values = state.dequantize(torch.float32)
    write_powers(new, values, torch.full(values.shape, 0x8000, device=values.device))  # to the nearest
    return new
