"""Attention as two FP8 products, for `fp8_dpa=True`.

    s = q · kᵀ × scale + mask        FP8 product
    p = softmax(s)                   FP32
    o = dropout(p) · v               FP8 product

This is the specification of FP8 attention: it holds the whole score matrix, as no fused kernel would.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def fp8_attention(
    multiply: Callable[[Tensor, Tensor], "Tensor | str"],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | str:
    """`scaled_dot_product_attention` with its signature; `multiply(a, b)` is `a @ b`. Or the reason why not."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = multiply(query, key.mT)
    if isinstance(scores, str):
        return scores
    scores = scores.float() * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, dim=-1)
    if attn_mask is not None:
        weights = weights.nan_to_num(0.0)  # a row with everything masked attends to nothing, as in torch
    weights = torch.nn.functional.dropout(weights, dropout_p).to(value.dtype)
    return multiply(weights, value)
