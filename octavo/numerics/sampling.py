"""A token for each row of logits, drawn by its probability, and the logarithm of that probability.

    p     = softmax(z / T)                   z[V] in FP32, T the temperature
    token = argmaxᵢ (log pᵢ − log Eᵢ)        Eᵢ independent, exponential: token is i with probability pᵢ

(−log E has Gumbel's distribution. The largest of zᵢ / T − log Eᵢ is the same token, so one pass over the logits finds
it together with their log-sum-exp.) Greedy takes argmax z, the first of equal ones, and T = 1 for the log-probability.

E comes from 32 random bits: of column v of row t of an array of any shape, by Philox-4x32-10 (Salmon et al., 2011),
whose key is the seed and which makes four words of each counter:

    counter = (⌊v / 4⌋, t, 0, 0)      word v mod 4
    u = (bits + ½) · 2⁻³²             in FP32, at most 1 − 2⁻²⁴
    E = −log(1 − u)                   by u · (1 + u / 2) below 2⁻¹⁰, where 1 − u would have lost bits of u

So the random numbers of an element depend on the seed and its place, and on nothing else. The smallest E is 2⁻³³: a
token of probability 2⁻³³ can still be drawn, which 24 bits would never allow.

Unusual logits: −∞ is a token of probability 0. NaN anywhere in a row, +∞, or a row of −∞ alone makes the
log-probability NaN; the token is then any of the vocabulary.
"""

import torch
from torch import Tensor

ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEYS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
SMALL = 2.0**-10
LARGEST = 1 - 2.0**-24


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of 32 random bits for each counter of four; all of them in int64. `seed`: int64, any value."""
    a, b, c, d = counters
    key_a, key_b = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        low, high = _product(a, _FACTORS[0])
        low_c, high_c = _product(c, _FACTORS[1])
        a, b, c, d = high_c ^ b ^ key_a, low_c, high ^ d ^ key_b, low
        key_a, key_b = (key_a + _KEYS[0]) & _MASK, (key_b + _KEYS[1]) & _MASK
    return a, b, c, d


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper 32 bits of the product of two numbers of 32 bits."""
    # Half of x at a time: the whole product would not fit the 63 bits of a positive int64.
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    middle = high + (low >> 16)
    return ((middle << 16) | (low & 0xFFFF)) & _MASK, middle >> 16


def exponential(shape: tuple[int, int], seed: Tensor) -> Tensor:
    """Return E `[T, V]` in FP32; `seed[1]`: int64."""
    rows, columns = shape
    counter = torch.arange(-(-columns // 4), device=seed.device).expand(rows, -1)
    row = torch.arange(rows, device=seed.device)[:, None].expand_as(counter)
    zero = torch.zeros_like(row)
    bits = torch.stack(philox((counter, row, zero, zero), seed), dim=-1).flatten(1)[:, :columns]
    u = ((bits.float() + 0.5) * 2.0**-32).clamp(max=LARGEST)
    return torch.where(u < SMALL, u * (1 + 0.5 * u), -torch.log(1 - u))


def sample(logits: Tensor, temperature: Tensor, seed: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """Return a token (int64) for each row of FP32 `logits[T, V]`, and its log-probability (FP32).

    `temperature[]`: FP32, above 0; ignored if `greedy`. `seed[1]`: int64, of the noise; ignored if `greedy`.
    """
    logprobs = (logits if greedy else logits / temperature).log_softmax(dim=-1)
    if greedy:
        token = logits.argmax(dim=-1)  # log-probabilities may be equal where logits are not
    else:
        token = (logprobs - exponential((logits.shape[0], logits.shape[1]), seed).log()).argmax(dim=-1)
    return token, logprobs.gather(1, token[:, None])[:, 0]
