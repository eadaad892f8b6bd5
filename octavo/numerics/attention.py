"""Causal attention over sequences that lie one after another.

    s = q · kᵀ × scale,   where key j is visible to query i of the same sequence if  0 ≤ i − j < window
    o = softmax(s) · v

Each group of H / G query heads shares one head of k and v. Sequences do not see each other. A sequence may have more
keys than queries, from a cache: its queries are then its last tokens, and i counts from the first key.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    key_offsets: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend with `query[T, H, d]` over `key` and `value[T, G, d]`; sequence i is `offsets[i]:offsets[i + 1]`.

    `key_offsets`: the same for its keys and values, where those are not as many as its queries.
    """
    bounds = offsets.tolist()
    key_bounds = bounds if key_offsets is None else key_offsets.tolist()
    outputs = []
    for (start, stop), (first, last) in zip(pairwise(bounds), pairwise(key_bounds), strict=True):
        if start == stop:
            continue
        q = query[start:stop].transpose(0, 1)
        k, v = (x[first:last].transpose(0, 1) for x in (key, value))
        queries, keys = stop - start, last - first
        masked = queries != keys or (window is not None and window < keys)
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=causal_mask(keys, window, query.device)[-queries:] if masked else None,
                dropout_p=dropout, is_causal=not masked, scale=scale, enable_gqa=True,
            ).transpose(0, 1)
        )  # fmt: skip
    return torch.cat(outputs)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """The keys `[length, length]` that each query sees."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible if window is None else visible.triu(1 - window)
