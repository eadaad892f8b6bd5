"""Cross entropy of logits `[T, V]` against labels `[T]`, and its gradient.

    loss_t = log Σ_v exp(l_tv) − l_t,label        0 where the label is ignored
    dl_tv  = softmax(l_t)_v − [v = label]         0 where the label is ignored

Logits may be a part of the vocabulary, with the sum of exponentials of all of it. A label that is not in this part is
`ELSEWHERE`: it is counted, and equals no v.

In FP32 from logits of any dtype; the gradient is rounded once to the dtype of the logits. It lies in [−1, 1], so its
FP8 form needs no history: its scale is `1 / FP8_MAX`, times whatever factor the loss has.
"""

import torch
from torch import Tensor

from octavo.numerics.formats import Format
from octavo.numerics.quantize import Quantized, quantize_by, reciprocal

IGNORED = -100
ELSEWHERE = -1  # among other ranks' tokens; a label of gradients alone


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, and the logarithm of its sum of exponentials."""
    counted = labels != IGNORED
    check_labels(labels, logits.shape[-1])
    lse = torch.logsumexp(logits.float(), dim=-1)
    picked = logits.gather(-1, torch.where(counted, labels, 0)[:, None]).squeeze(-1)
    return torch.where(counted, lse - picked.float(), 0.0), lse


def cross_entropy_backward(logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """Return the gradient of `factor × Σ loss`."""
    counted = labels != IGNORED
    gradient = torch.exp(logits.float() - lse[:, None])
    here = labels >= 0
    gradient.scatter_add_(1, torch.where(here, labels, 0)[:, None], -here[:, None].float())
    return torch.where(counted[:, None], gradient * factor, 0.0).to(logits.dtype)


def cross_entropy_quantize(
    logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor, format: Format
) -> tuple[Quantized, Quantized]:
    """Return the gradient in FP8, as rows `[T, V]` and as columns `[V, T]`; not via FP16, which has less range."""
    logits = logits.float() if logits.dtype == torch.float16 else logits
    unit = reciprocal(torch.full((), format.max, dtype=torch.float32, device=logits.device))
    rows = quantize_by(cross_entropy_backward(logits, labels, lse), unit, format)
    scale = unit * factor
    return Quantized(rows.data, scale), Quantized(rows.data.mT.clone(memory_format=torch.contiguous_format), scale)


def check_labels(labels: Tensor, vocabulary: int) -> None:
    """Raise for a label that is neither ignored nor a token. On a GPU that would synchronise: the device asserts it."""
    if labels.device.type != "cpu":
        return
    unknown = labels[(labels != IGNORED) & ((labels < 0) | (labels >= vocabulary))]
    if unknown.numel():
        raise IndexError(
            f"labels: {unknown[0]} is not a token of a vocabulary of {vocabulary}, whose tokens are 0 to "
            f"{vocabulary - 1}; give {IGNORED} to positions that have no label, and resize the model's embeddings to "
            "the tokenizer's length if it has more tokens"
        )
