"""AdamW's step for one parameter, in torch: what `kernels/adamw.py` does in one pass over it.

Means are plain tensors, or torchao's with few bits. Rounded ones can say what no gradients could: squares that have
become 0 beside a mean that has not, and then a weight moves by its mean over epsilon. By Cauchy and Schwarz a mean is
never more than so many times the root of the mean of squares (`Step.bound`), so no weight is moved by more. Where
nothing was rounded this changes nothing. What is not finite spoils its own weight, and leaves 0 in such states: in a
block's scale it would spoil all of the block.

Of 4 bits, torchao has other levels, and rounds to the nearest of them. Its mean of squares is in sixteenths of a
block's largest; but squares of gradients differ by orders of magnitude within a block: all the small ones count as a
sixteenth, and weights with small gradients hardly move (BDH 100M, 1,000 steps: loss 12 % higher). Here they are powers
of two, down to 2⁻¹⁵. The mean is in cubes of sevenths of the largest, with a sign. Both are rounded at random between
two levels: to the nearest, a mean that falls by a tenth in a step, or a twentieth, would never fall. A state has its
levels with it (`qmap`), so torchao reads it all the same.

"At random" is by a number between 0 and 1 that begins anywhere, by the place (through a mixer, lowbias32 by C.
Wellons), and goes on by the same irrational in every step. So over some steps it is up as often as it should be, not
only on average, and errors make up for each other. The mean, the squares and a BF16 weight have each a start and an
irrational of their own: a mean that was rounded up moves the weight further in the next step, and must not find it
rounded as it was itself. All is the same in whatever order steps are computed, and after a restart.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST_POWER = 15  # the code of 1, if there is no sign
SEVEN = 7  # the code of 0, if there is; that of 1 is twice as much
GOLDEN = 0x9E3779B1  # of 2³²
TURN, TURN_OF_P = 0x6A099E37, 0xBB67  # of 2¹⁶ in a step: √2 − 1 for squares, the golden section for the mean; √3 − 1
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

    @property
    def bound(self) -> float:
        """Of the mean over the root of the mean of squares, both from zero on, whatever the gradients (constant betas).

        (1 − β₁) · √(Σ (β₁² / β₂)ᵏ / (1 − β₂)), k from 0 to the last step: 1.2 for 0.9 and 0.95, 7.3 for 0.9 and 0.999.
        It grows without end, and none is given, where the squares forget faster than the mean.
        """
        ratio = self.betas[0] ** 2 / self.betas[1] if self.betas[1] else math.inf
        if ratio >= 1:
            return math.inf
        terms = (1 - ratio**self.count) / (1 - ratio)
        return (1 - self.betas[0]) * math.sqrt(terms / (1 - self.betas[1]))

    def rounds_at_random(self, p: Tensor) -> bool:
        return self.stochastic and p.dtype == torch.bfloat16


def apply(step: Step, p: Tensor, g: Tensor, mean: Any, square: Any) -> None:
    """A step of p and of its means, in place."""
    g = g.float()
    new_mean = mean.float().lerp(g, 1 - step.betas[0])
    new_square = square.float().lerp(g.square(), 1 - step.betas[1])
    moved = new_mean
    if type(square) is not Tensor and math.isfinite(step.bound):
        largest = new_square.sqrt() * step.bound
        moved = new_mean.clamp(-largest, largest)
    new = p.float() * step.decay - step.rate * moved / (new_square.sqrt() * step.root_correction + step.eps)
    of_4_bits, rounds_p = is_of_4_bits(square), step.rounds_at_random(p)
    noise: tuple[Tensor, ...] = noise_of(g, step.count) if of_4_bits or rounds_p else ()
    for i, (state, values) in enumerate(((square, new_square), (mean, new_mean))):
        if of_4_bits:
            write_levels(state, values, noise[i])
        else:
            state.copy_(values if type(state) is Tensor else _finite(values))
    p.copy_(_to_bf16_at_random(new, noise[2]) if rounds_p else new)


def turn_of(count: int) -> int:
    """How far the noise of squares and, below, of the mean has gone by this step, as a signed number of 32 bits."""
    turn = count * TURN & _MASK
    return turn - (turn >> 31 << 32)


def noise_of(like: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each element three numbers of 16 bits: for squares, for the mean and for p."""
    x = torch.arange(like.numel(), device=like.device).view(like.shape) * GOLDEN & _MASK
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    x = x ^ x >> 16
    turned = x + turn_of(count) & _MASK
    return turned >> 16, turned & 0xFFFF, ((x * GOLDEN & _MASK) >> 16) + count * TURN_OF_P & 0xFFFF


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0.0)


def _to_bf16_at_random(p: Tensor, noise: Tensor) -> Tensor:
    """Away from zero with the probability that the bits to be cut off say. Not NaN or infinity: these would carry."""
    bits = p.contiguous().view(torch.int32)
    up = torch.where(p.isfinite(), noise, 0).int()
    return (bits + up & -0x10000).view(torch.float32).bfloat16()


def is_of_4_bits(state: Any) -> bool:
    return type(state).__name__ == "OptimState4bit"


def levels(*, signed: bool, device: torch.device | None = None) -> Tensor:
    """What the sixteen codes stand for, in rising order. With a sign the last is there twice."""
    sevenths = [(k / SEVEN) ** 3 for k in range(-SEVEN, SEVEN + 1)] + [1.0]
    powers = [2.0 ** (code - LARGEST_POWER) for code in range(LARGEST_POWER + 1)]
    return torch.tensor(sevenths if signed else powers, device=device)


def write_levels(state: Any, values: Tensor, noise: Tensor) -> None:
    """Into blocks, each with its largest as a scale, up or down by 16 bits of noise."""
    blocks = _finite(values.float()).reshape(-1, state.block_size)
    scale = blocks.abs().amax(1, keepdim=True).clip(1e-12)
    encode = _cubes_at_random if state.signed else _powers_at_random
    codes = encode(blocks / scale, noise.view(blocks.shape)).to(torch.uint8).view(-1, 2)
    state.codes.copy_(codes[:, 0] << 4 | codes[:, 1])
    state.scale.copy_(scale.view(-1))


def _powers_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """Codes of the powers of two about x: the bits of its fraction and noise carry into its exponent, or do not."""
    bits = x.view(torch.int32) + (noise.int() << 7)
    return ((bits >> 23) - 127 + LARGEST_POWER).clamp(0, LARGEST_POWER)


def _cubes_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """Codes of the cubes of sevenths about x: from k³ to (k + 1)³ it is 3k² + 3k + 1."""
    size = x.abs() * SEVEN**3
    k = (size ** (1 / 3)).floor().clamp(max=SEVEN - 1)
    k += size - k**3 >= (3 * k * k + 3 * k + 1) * (1 - noise / 2**16)
    return torch.where(x < 0, SEVEN - k, SEVEN + k)


def with_levels(state: Any) -> Any:
    """A state of 4 bits with these levels: the very one, if it has them, else its values in a new one."""
    if not is_of_4_bits(state) or torch.equal(state.qmap, levels(signed=state.signed, device=state.qmap.device)):
        return state
    names, context = state.__tensor_flatten__()
    parts = {name: torch.empty_like(getattr(state, name)) for name in names}
    new = type(state).__tensor_unflatten__(parts, context, state.size(), state.stride())
    new.qmap.copy_(levels(signed=state.signed))
    values = state.dequantize(torch.float32)
    write_levels(new, values, torch.full(values.shape, 0x8000, device=values.device))  # to the nearest
    return new
