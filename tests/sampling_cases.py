"""Logits to draw tokens from, and how far a kernel's choice may be from the specification's."""

import torch

from octavo.numerics import sampling as spec


def new_logits(rows, vocabulary):
    """Logits as a model has them: most are small, a few are not."""
    return torch.randn(rows, vocabulary) * 3 + (torch.rand(rows, vocabulary) > 0.99) * 6


def assert_same_choice(found, given):
    """Tokens are those of the specification, or as good as those to rounding; log-probabilities are those of tokens."""
    logits, temperature, seed, greedy = given
    token, logprob = found
    assert token.dtype == torch.int64 and logprob.dtype == torch.float32
    expected, _ = spec.sample(*given)
    logprobs = (logits if greedy else logits / temperature).log_softmax(-1)
    size = logprobs.where(logprobs.isfinite(), 0.0).abs().amax(-1)

    def of(scores, tokens):
        return scores.gather(1, tokens[:, None])[:, 0]

    # FP32 has 2^-24 of a score; a product by log₂e / T, a difference, and logarithms to 2^-22 of their result.
    bound = 2.0**-21 * (size + 32)
    assert ((logprob - of(logprobs, token)).abs() <= bound).all()
    if greedy:
        assert torch.equal(token, expected)
        return
    scores = logprobs - spec.exponential(tuple(logits.shape), seed).log()
    # 1 − u has 2^-25 of 1, of an E that is 2^-10 or more: 2^-15 of it.
    assert ((of(scores, expected) - of(scores, token)) <= bound + 2.0**-14).all()
    assert (token == expected).double().mean() > 0.9
