"""Choosing the next token from logits, without waiting for the device.

    p = softmax(z / T)               z in FP32, T the temperature
    token = argmaxᵢ (log pᵢ − log Eᵢ)       Eᵢ independent, exponential: token is i with probability pᵢ

(−log E is Gumbel's distribution.) Greedy takes argmax z, and T = 1 for the log-probability. With top-k, top-p or min-p,
tokens are left out of the choice, and the log-probability stays that of the whole vocabulary.

On a GPU, two launches do it (`ops/sampling.py`), with noise of their own from a seed that the generator draws. With
truncation, and elsewhere, it is operations of torch, with the generator's noise.
"""

import math

import torch
from torch import Tensor

from octavo.ops import sampling as ops
from octavo.rl.completions import Sampling


def choose(
    logits: Tensor, sampling: Sampling, temperature: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a token for each row of FP32 `logits[T, V]`, and its log-probability.

    `temperature`: that of `sampling` as a tensor, so that a CUDA graph can take another.
    """
    if ops.has_kernel(logits) and not sampling.is_truncated:
        seed = torch.empty(1, dtype=torch.int64, device=logits.device)
        if not sampling.is_greedy:
            seed.random_(generator=generator)
        return ops.sample(logits, temperature, seed, greedy=sampling.is_greedy)
    logprobs = (logits if sampling.is_greedy else logits / temperature).log_softmax(dim=-1)
    if sampling.is_greedy:
        token = logits.argmax(dim=-1)  # log-probabilities may be equal where logits are not
    else:
        noise = torch.empty_like(logprobs).exponential_(generator=generator).log_()
        allowed = _truncated(logprobs, sampling) if sampling.is_truncated else logprobs
        token = torch.sub(allowed, noise, out=noise).argmax(dim=-1)
    return token, logprobs.gather(1, token[:, None])[:, 0]


def _truncated(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities with −inf for tokens that are left out: by top-k, then top-p of the rest, then min-p."""
    if sampling.top_k is not None:
        least = logprobs.topk(min(sampling.top_k, logprobs.shape[-1]), dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = logprobs.sort(dim=-1, descending=True)
        shares = ordered.softmax(dim=-1)
        # A token stays if those before it have less than top_p together; so the first always does.
        before = shares.cumsum(dim=-1) - shares
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, index, before >= sampling.top_p)
        logprobs = logprobs.masked_fill(dropped, -torch.inf)
    if sampling.min_p:
        least = logprobs.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
    return logprobs
