"""The product of few tokens by a frozen FP8 weight, with all that is added to it: what decoding computes.

    y = x · (w_q · scale)ᵀ + Σᵢ sᵢ · tᵢ · Bᵢᵀ + bias + residual        tᵢ = x · Aᵢᵀ
    h = act(gate) · up                                                  of gate and up side by side, without a bias

x is in high precision and not quantised; an RMS norm may come first (`numerics.norm`). Everything is added up in FP32
and rounded once to the dtype of x, as is h; tᵢ is rounded to it, because a product follows.

With more tokens, or where something is saved for backward, such a product takes what the weight dequantises to, rounded
to the dtype of x (`ops.weight.Weight.forward_operand`). That is the same product, and this one is nearer to it. With u
half a unit in the last place of the dtype (2⁻⁸ for BF16), and without adapters, both are within

    |y − exact| ≤ (u + K · 2⁻²⁴) · |x| · |w_q · scale|ᵀ + 3u · (|y| + |bias| + |residual|)

of the exact value; here the first u, of the rounded weight, is absent. Adapters add 2u · Σᵢ |sᵢ| · |x| · |Aᵢ|ᵀ · |Bᵢ|ᵀ.

Where x is in BF16 and the weight in E4M3, the kernels multiply in FP8, and no weight is converted: x is taken apart
into two halves in E4M3 (`halves`). With a the largest magnitude of a row, and a power of two so that 2⁷ ≤ 2ᵖ · a < 2⁸,

    v = 2ᵖ · x        high = v to E4M3        low = (v − high) · 16 to E4M3        x = 2⁻ᵖ · (high + low / 16)

That is exact where |x| ≥ 2⁻¹³ · a: there 2ᵉ ≤ |v| < 2ᵉ⁺¹ with −6 ≤ e ≤ 7, and high is off by at most 2ᵉ⁻⁴, a multiple
of BF16's 2ᵉ⁻⁷. So the remainder times 16 is j · 2ᵉ⁻³ with |j| ≤ 8, which E4M3 has: four bits, spaced by 2⁻⁹ at least.
Where |v| < 2⁻⁶, high is a multiple of 2⁻⁹, 16 times the remainder is at most 2⁻⁶, and low is off from that by at most
2⁻¹⁰. That is 2⁻¹⁴ · 2⁻ᵖ in x, at most 2⁻²¹ · a. p is at most 122, so where a < 2⁻¹¹⁵ that is 2⁻¹³⁶. It adds

    2⁻²¹ · Σ_k a_k · |w_q · scale|_k        a_k: the a of the row, or, of h, of the row and columns of one tile

to the bound. Tensor cores keep the sum of a step, 64 or 128 columns, to some 14 bits, and FP32 adds the steps up: with
c of the largest product of a step, that is off by at most (columns of a step + 4) · 2⁻¹³ · c, for which

    Σ_steps 132 · 2⁻¹³ · max |x_k · (w_q · scale)_k|

is added; errors of either sign, and products of like size, leave about 2⁻¹³ · |x| · |w|ᵀ / √steps of it, an eighth of
what rounding y to BF16 does. A row of x with an infinity becomes NaN, as E4M3 has none; NaN stays NaN.

Other products, of E5M2, of x in FP16, or of more tokens than 64, are in FP16, which holds every FP8 value: BF16 would
take four times as many instructions to convert a weight. x, if it is in BF16, is multiplied by a power of two for each
row, and h for each row and 64 of its columns (those with even numbers among 128, or with odd ones), so that a is in
[2¹⁴, 2¹⁵). FP16 has 3 bits more than BF16, and is spaced by 2⁻²⁴ at the least; so x is exact where |x| ≥ 2⁻³¹ · a, and
off by at most 2⁻³⁹ · a where it is smaller, which takes the place of 2⁻²¹ · a above. The power is at most 2¹²⁶: where
a < 2⁻¹¹², that is 2⁻¹⁵¹. Infinities and NaN stay what they are. tᵢ is of x in its own dtype, always.

So a token's logits do not depend on how many tokens there are beyond what the order of a sum does to them.

Shapes: M tokens, at most `MOST_TOKENS`, K inputs, N outputs, F hidden features, R the rank of an adapter.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics.activation import ACTIVATIONS
from octavo.numerics.norm import Norm, rms_norm
from octavo.numerics.quantize import Quantized

LOW = 16.0  # the low halves are that many times as large as what they stand for
TOP_OF_HALVES = 7  # the exponent of a row's largest magnitude, once it is multiplied by its power of two
LARGEST_POWER = 122  # so that the factors of both halves are normal numbers
MOST_TOKENS = 128  # with more, tensor cores are the limit, and what reads a weight once gains nothing


class Low(NamedTuple):
    """An adapter: `scaling · x · downᵀ · upᵀ` is added to outputs `first` to `last`. `down[R, K]`, `up[N, R]`."""

    first: int
    last: int
    scaling: float
    down: Tensor
    up: Tensor


class Halves(NamedTuple):
    """x as tensor cores take it: `(high + low / LOW) · factor`. `factor` has one column for each group of columns."""

    high: Tensor
    low: Tensor
    factor: Tensor

    def joined(self) -> Tensor:
        """x again, in FP32."""
        columns = self.high.shape[1] // self.factor.shape[1]
        factor = self.factor.repeat_interleave(columns, dim=1)
        return (self.high.float() + self.low.float() / LOW) * factor


def halves(x: Tensor, columns: int | None = None) -> Halves:
    """Take `x[M, K]` in BF16 apart into E4M3, with a factor for each row and so many columns, all by default."""
    groups = x.float().reshape(x.shape[0], -1, columns or x.shape[1])
    bits = groups.abs().amax(dim=2, keepdim=True).view(torch.int32)
    exponent = torch.where(groups.isnan().any(dim=2, keepdim=True), 255, bits >> 23) - 127
    power = (TOP_OF_HALVES - exponent).clamp(max=LARGEST_POWER)
    v = (groups * torch.exp2(power.float())).reshape(x.shape)
    v = v + 0 * v  # infinities become NaN
    high = v.to(torch.float8_e4m3fn)
    low = ((v - high.float()) * LOW).to(torch.float8_e4m3fn)
    return Halves(high, low, torch.exp2(-power.float()).squeeze(2))


def linear(
    x: Tensor,
    weight: Quantized,
    adapters: Sequence[Low] = (),
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """Compute y, `[M, N]`, in the dtype of `x[M, K]`."""
    total = _product(_normed(x, norm), weight, adapters)
    for added in (bias, residual):
        total = total if added is None else total + added.float()
    return total.to(x.dtype)


def gated_mlp(
    x: Tensor,
    gate_up: Quantized,
    down: Quantized,
    activation: str,
    adapters: Sequence[Low] = (),
    adapters_down: Sequence[Low] = (),
    *,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """Compute h · w_downᵀ, where h is that of `gate_up[2F, K]`."""
    gate, up = _product(_normed(x, norm), gate_up, adapters).chunk(2, dim=-1)
    h = (ACTIVATIONS[activation](gate)[0] * up).to(x.dtype)
    return linear(h, down, adapters_down, residual=residual)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, norm)[0]


def _product(x: Tensor, weight: Quantized, adapters: Sequence[Low]) -> Tensor:
    """The product and what adapters add to it, in FP32."""
    # y_MN = x_MK · w_NKᵀ
    total = x.float() @ weight.dequantize(torch.float32).t()
    for low in adapters:
        # y += s · (x · Aᵀ) · Bᵀ
        t = (x.float() @ low.down.to(x.dtype).float().t()).to(x.dtype)
        total[:, low.first : low.last] += low.scaling * (t.float() @ low.up.to(x.dtype).float().t())
    return total
