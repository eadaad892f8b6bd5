"""Products of few tokens by a frozen FP8 weight, with nothing saved: by kernels that read its bytes once, if they can.

They are chosen by shape, as every kernel is: `numerics/few_tokens.py` says what they compute, and how near that is to
what the same call computes with more tokens. On other devices, and where the kernels do not take a product, a function
here returns None, and the caller computes it as any other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics.few_tokens import MOST_TOKENS, Low
from octavo.numerics.norm import Norm
from octavo.ops.adapters import Adapters
from octavo.ops.weight import Weight
from octavo.support import has_fp8_tensor_cores


def _are_few(x: Tensor, dtype: torch.dtype) -> bool:
    return 0 < x.shape[0] <= MOST_TOKENS and x.dtype == dtype and has_fp8_tensor_cores(x.device)


def _lows(adapters: Adapters) -> list[Low]:
    triples = zip(adapters.positions, adapters.downs, adapters.ups, strict=True)
    return [Low(at.first, at.last, at.scaling, down, up) for at, down, up in triples]


def linear(
    x: Tensor,
    weight: Weight,
    adapters: Adapters,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Norm | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Compute `numerics.few_tokens.linear`, or return None."""
    if not _are_few(x, dtype):
        return None
    from octavo.kernels import few_tokens as kernels  # brings Triton

    whole, lows = weight.as_one(), _lows(adapters)
    if whole is None or not kernels.can_multiply(x, whole, lows, norm):
        return None
    return kernels.linear(x, whole, lows, bias=bias, residual=residual, norm=norm)


def gated_mlp(
    x: Tensor,
    weights: Sequence[Weight],
    adapters: Sequence[Adapters],
    activation: str,
    residual: Tensor | None,
    norm: Norm | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Compute `numerics.few_tokens.gated_mlp`, or return None. Weights and adapters: of gate and up, and of down."""
    if not _are_few(x, dtype):
        return None
    from octavo.kernels import few_tokens as kernels

    gate_up, down = (weight.as_one() for weight in weights)
    lows = [_lows(each) for each in adapters]
    if gate_up is None or down is None or not kernels.can_gate(x, gate_up, down, *lows, norm=norm):
        return None
    return kernels.gated_mlp(x, gate_up, down, activation, *lows, residual=residual, norm=norm)
