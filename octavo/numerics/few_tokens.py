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

One token alone is multiplied in FP32, and scaled at the end. Where Σ_k |x| times the largest value of the format passes
2¹²⁸, its sums may be infinite or NaN, though y is neither: that takes an |x| above 10³¹ with E4M3, 10²⁹ with E5M2.

For more than one token, the kernels multiply in FP16, which holds every FP8 value: BF16 would take four times as many
instructions to convert a weight. x, if it is in BF16, is multiplied by a power of two for each row, and h for each row
and 64 of its columns (those with even numbers among 128, or with odd ones), so that the largest magnitude a is in [2¹⁴,
2¹⁵). FP16 has 3 bits more than BF16, and is spaced by 2⁻²⁴ at the least; so x is exact where |x| ≥ 2⁻³¹ · a, and off by
at most 2⁻³⁹ · a where it is smaller. That adds to the bound

    2⁻³⁹ · Σ_k a_k · |w_q · scale|_k        a_k: the a of the row, or of the row and its 64 columns

which is less than the K · 2⁻²⁴ · |x| · |w_q · scale|ᵀ of FP32 unless |w| is 2¹⁵ times as large elsewhere as where x is
largest. The power is at most 2¹²⁶, so where a < 2⁻¹¹² that 2⁻³⁹ · a is 2⁻¹⁵¹. Infinities and NaN stay what they are.
tᵢ is of x in its own dtype.

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

MOST_TOKENS = 128  # with more, tensor cores are the limit, and what reads a weight once gains nothing


class Low(NamedTuple):
    """An adapter: `scaling · x · downᵀ · upᵀ` is added to outputs `first` to `last`. `down[R, K]`, `up[N, R]`."""

    first: int
    last: int
    scaling: float
    down: Tensor
    up: Tensor


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
