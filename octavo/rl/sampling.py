"""Choosing the next token from logits, without waiting for the device.

    p = softmax(z / T)               z in FP32, T the temperature
    token = argmaxᵢ (zᵢ / T − log Eᵢ)      Eᵢ independent, exponential: token is i with probability pᵢ
    log p(token) = z[token] / T − log Σ exp(z / T)

(−log E is Gumbel's distribution.) Greedy takes argmax z, and T = 1 for the log-probability. With top-k or top-p, tokens
are left out of the choice, and the log-probability stays that of the whole vocabulary.
"""

import torch
from torch import Tensor

from octavo.rl.completions import Sampling


def choose(
    logits: Tensor, sampling: Sampling, temperature: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a token for each row of FP32 `logits[T, V]`, and its log-probability.

    `temperature`: that of `sampling` as a tensor, so that a CUDA graph can take another.
    """
    scaled = logits if sampling.is_greedy else logits / temperature
    if sampling.is_greedy:
        token = scaled.argmax(dim=-1)
    else:
        noise = torch.empty_like(scaled).exponential_(generator=generator).log_()
        allowed = _truncated(scaled, sampling) if sampling.is_truncated else scaled
        token = (allowed - noise).argmax(dim=-1)
    chosen = scaled.gather(1, token[:, None])[:, 0]
    return token, chosen - scaled.logsumexp(dim=-1)


def _truncated(scaled: Tensor, sampling: Sampling) -> Tensor:
    """The logits with −inf for tokens that are left out: first top-k, then top-p of what remains, as others do."""
    if sampling.top_k is not None:
        least = scaled.topk(min(sampling.top_k, scaled.shape[-1]), dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = scaled.sort(dim=-1, descending=True)
        shares = ordered.softmax(dim=-1)
        # A token stays if those before it have less than top_p together; so the first always does.
        before = shares.cumsum(dim=-1) - shares
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, index, before >= sampling.top_p)
        scaled = scaled.masked_fill(dropped, -torch.inf)
    return scaled
