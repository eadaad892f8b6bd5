"""Cross entropy of logits `[T, V]` against labels `[T]`, and its gradient.

    loss_t = log Σ_v exp(l_tv) − l_t,label        0 where the label is ignored
    dl_tv  = softmax(l_t)_v − [v = label]         0 where the label is ignored

In FP32 from logits of any dtype; the gradient is rounded once to the dtype of the logits. It lies in [−1, 1], so its
FP8 form needs no history: its scale is `1 / FP8_MAX`, times whatever factor the loss has.
"""

import torch
from torch import Tensor

from octavo.numerics.formats import Format
from octavo.numerics.quantize import Quantized, quantize_by, reciprocal

IGNORED = -100


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every token, and the logarithm of its sum of exponentials."""
    lse = torch.logsumexp(logits.float(), dim=-1)
    kept = labels != IGNORED
    picked = logits.gather(-1, torch.where(kept, labels, 0)[:, None]).squeeze(-1)
    return torch.where(kept, lse - picked.float(), 0.0), lse


def cross_entropy_backward(logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """The gradient of `factor × Σ loss`."""
    kept = labels != IGNORED
    gradient = torch.exp(logits.float() - lse[:, None])
    gradient[torch.arange(len(labels), device=labels.device), torch.where(kept, labels, 0)] -= 1.0
    return torch.where(kept[:, None], gradient * factor, 0.0).to(logits.dtype)


def cross_entropy_quantize(
    logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor, format: Format
) -> tuple[Quantized, Quantized]:
    """The gradient in FP8, as rows `[T, V]` and as columns `[V, T]`."""
    unit = reciprocal(torch.full((), format.max, dtype=torch.float32, device=logits.device))
    rows = quantize_by(cross_entropy_backward(logits, labels, lse), unit, format)
    scale = unit * factor
    return Quantized(rows.data, scale), Quantized(rows.data.mT.clone(memory_format=torch.contiguous_format), scale)
