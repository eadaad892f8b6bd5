"""AdamW's step for one parameter, in torch: the specification of the fused step in `kernels/adamw.py`.

The moments are plain tensors, or torchao's low-bit ones. Rounded moments can reach states that no gradients produce: a
mean of squares of 0 beside a non-zero mean, which would move a weight by its mean over epsilon. By Cauchy–Schwarz,
|m| ≤ bound · √v for exact moments (`Step.bound`), so the update is clamped to that, which leaves exact moments alone.
A non-finite gradient spoils its own weight and leaves 0 in low-bit states: in a block's scale it would spoil the block.

For 4-bit states we replace torchao's levels and its nearest rounding. Its mean of squares is in sixteenths of the
block's maximum; squares of gradients differ by orders of magnitude within a block, so all small ones become one
sixteenth, and weights with small gradients hardly change (BDH 100M, 1,000 steps: loss 12 % higher). Here the levels are
powers of two, down to 2⁻¹⁵, and those of the mean are signed cubes of sevenths of the maximum. Both are dithered: with
nearest rounding, a mean that decays by a tenth or a twentieth in a step would never decay. A state carries its levels
(`qmap`), so torchao can still read it.

The dither is a Weyl sequence: start = hash(element index) (lowbias32 by C. Wellons), increment = an irrational, added
once per optimiser step. Over a few steps an element is therefore rounded up as often as it should be, not only on
average, and errors cancel. The mean, the squares and a BF16 weight have separate starts and irrationals: a mean rounded
up moves the weight further in the next step, whose rounding must not correlate with it. The result does not depend on
the order in which parameters are stepped, and is the same after a restart. Of a shard, the index is that in the whole
parameter (`first` is that of its first element), so it does not depend on the number of ranks either.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST_POWER = 15  # code of 1 in unsigned states
SEVEN = 7  # code of 0 in signed states, whose code of 1 is twice as much
GOLDEN = 0x9E3779B1  # golden section of 2³²
# Increments of the dither per step, as shares of 2¹⁶: √2 − 1 for squares and the golden section for the mean; √3 − 1.
PHASE_STEP, PHASE_STEP_OF_P = 0x6A099E37, 0xBB67
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Step:
    """Step number `count` with the optimiser's settings. `stochastic`: dither p when it is rounded to BF16."""

    count: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    stochastic: bool

    @property
    def rate(self) -> float:
        """Factor of the mean: the learning rate with the bias correction of the mean."""
        return self.lr / (1 - self.betas[0] ** self.count)

    @property
    def root_correction(self) -> float:
        """Bias correction of the root of the mean of squares."""
        return float((1 - self.betas[1] ** self.count) ** -0.5)

    @property
    def decay(self) -> float:
        """Factor of p: the share that weight decay leaves."""
        return 1 - self.lr * self.weight_decay

    @property
    def bound(self) -> float:
        """Upper bound on `m / sqrt(v)` for zero-initialised moments and constant betas (Cauchy–Schwarz).

        (1 − β₁) · √(Σ (β₁² / β₂)ᵏ / (1 − β₂)), k from 0 to the last step: 1.2 for 0.9 and 0.95, 7.3 for 0.9 and 0.999.
        Infinite where β₁² ≥ β₂: the sum then grows without limit.
        """
        ratio = self.betas[0] ** 2 / self.betas[1] if self.betas[1] else math.inf
        if ratio >= 1:
            return math.inf
        terms = (1 - ratio**self.count) / (1 - ratio)
        return (1 - self.betas[0]) * math.sqrt(terms / (1 - self.betas[1]))

    def rounds_at_random(self, p: Tensor) -> bool:
        return self.stochastic and p.dtype == torch.bfloat16


def apply(step: Step, p: Tensor, g: Tensor, mean: Any, square: Any, *, first: int = 0) -> None:
    """Update p and its two moments in place. `first`: index of p's first element in the parameter it is a shard of."""
    g = g.float()
    new_mean = mean.float().lerp(g, 1 - step.betas[0])
    new_square = square.float().lerp(g.square(), 1 - step.betas[1])
    moved = new_mean
    if type(square) is not Tensor and math.isfinite(step.bound):
        largest = new_square.sqrt() * step.bound
        moved = new_mean.clamp(-largest, largest)
    new = p.float() * step.decay - step.rate * moved / (new_square.sqrt() * step.root_correction + step.eps)
    of_4_bits, rounds_p = is_of_4_bits(square), step.rounds_at_random(p)
    noise: tuple[Tensor, ...] = noise_of(g, step.count, first) if of_4_bits or rounds_p else ()
    for i, (state, values) in enumerate(((square, new_square), (mean, new_mean))):
        if of_4_bits:
            write_levels(state, values, noise[i])
        else:
            state.copy_(values if type(state) is Tensor else _finite(values))
    p.copy_(_to_bf16_at_random(new, noise[2]) if rounds_p else new)


def phase_of(count: int) -> int:
    """Return the phases of the dither at this step as an int32: squares above, the mean in the lower 16 bits."""
    return as_int32(count * PHASE_STEP)


def as_int32(number: int) -> int:
    """Return the lower 32 bits of a number, with a sign."""
    number &= _MASK
    return number - (number >> 31 << 32)


def noise_of(like: Tensor, count: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return 16 bits of dither per element for the squares, the mean and p; `first` is the index of the first."""
    x = (torch.arange(like.numel(), device=like.device).view(like.shape) + first & _MASK) * GOLDEN & _MASK
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    x = x ^ x >> 16
    dither = x + phase_of(count) & _MASK
    return dither >> 16, dither & 0xFFFF, ((x * GOLDEN & _MASK) >> 16) + count * PHASE_STEP_OF_P & 0xFFFF


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0.0)


def _to_bf16_at_random(p: Tensor, noise: Tensor) -> Tensor:
    """Round away from zero with the probability that the discarded bits give; non-finite values are not dithered."""
    bits = p.contiguous().view(torch.int32)
    up = torch.where(p.isfinite(), noise, 0).int()
    return (bits + up & -0x10000).view(torch.float32).bfloat16()


def is_of_4_bits(state: Any) -> bool:
    return type(state).__name__ == "OptimState4bit"


def levels(*, signed: bool, device: torch.device | None = None) -> Tensor:
    """Return the values of the sixteen codes in rising order; with a sign, the last one appears twice."""
    sevenths = [(k / SEVEN) ** 3 for k in range(-SEVEN, SEVEN + 1)] + [1.0]
    powers = [2.0 ** (code - LARGEST_POWER) for code in range(LARGEST_POWER + 1)]
    return torch.tensor(sevenths if signed else powers, device=device)


def write_levels(state: Any, values: Tensor, noise: Tensor) -> None:
    """Encode values into a 4-bit state: blocks scaled by their largest magnitude, dithered by 16 bits of noise."""
    blocks = _finite(values.float()).reshape(-1, state.block_size)
    scale = blocks.abs().amax(1, keepdim=True).clip(1e-12)
    encode = _cubes_at_random if state.signed else _powers_at_random
    codes = encode(blocks / scale, noise.view(blocks.shape)).to(torch.uint8).view(-1, 2)
    state.codes.copy_(codes[:, 0] << 4 | codes[:, 1])
    state.scale.copy_(scale.view(-1))


def _powers_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """Return codes of neighbouring powers of two: the fraction plus the dither may carry into the exponent."""
    bits = x.view(torch.int32) + (noise.int() << 7)
    return ((bits >> 23) - 127 + LARGEST_POWER).clamp(0, LARGEST_POWER)


def _cubes_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """Return codes of neighbouring cubes of sevenths; the distance from k³ to (k + 1)³ is 3k² + 3k + 1."""
    size = x.abs() * SEVEN**3
    k = (size ** (1 / 3)).floor().clamp(max=SEVEN - 1)
    k += size - k**3 >= (3 * k * k + 3 * k + 1) * (1 - noise / 2**16)
    return torch.where(x < 0, SEVEN - k, SEVEN + k)


def with_levels(state: Any) -> Any:
    """Return a 4-bit state with the levels used here: the same object if it has them, else a re-encoded copy."""
    if not is_of_4_bits(state) or torch.equal(state.qmap, levels(signed=state.signed, device=state.qmap.device)):
        return state
    names, context = state.__tensor_flatten__()
    inner = {name: torch.empty_like(getattr(state, name)) for name in names}
    new = type(state).__tensor_unflatten__(inner, context, state.size(), state.stride())
    new.qmap.copy_(levels(signed=state.signed))
    values = state.dequantize(torch.float32)
    write_levels(new, values, torch.full(values.shape, 0x8000, device=values.device))  # to the nearest
    return new
