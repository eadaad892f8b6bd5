"""Attention as two FP8 products, for `fp8_dpa=True`.

    s = q · kᵀ × scale + mask        FP8 product
    p = softmax(s)                   FP32
    o = dropout(p) · v               FP8 product

This is the specification of FP8 attention; unlike a fused kernel, it stores the whole score matrix. There is no such
kernel, because it would not pay: `NOT_ON_A_GPU` has the measurements.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

NOT_ON_A_GPU = (
    "FP8 attention does not pay on a GPU. Measured on an H200 at the 8B shape (4 x 2,048 tokens; "
    "benchmarks/attention_fp8.py, 2026-11-15): an FP8 flash forward takes 0.236 ms, before anything is quantised for "
    "it, against 0.255 ms of cuDNN in BF16, and is off by 4.8 % instead of 0.2 %; as two FP8 products, forward and "
    "backward take 25.7 ms and 8 GiB against 1.2 ms. Leave fp8_dpa out; emulate=True keeps the two products, for their "
    "numerics"
)


def refuse_on_gpu(query: Tensor) -> None:
    """Raise if attention would run in FP8 on a GPU."""
    if query.is_cuda:
        raise ValueError(f"fp8_dpa=True: {NOT_ON_A_GPU}")


def fp8_attention(
    multiply: Callable[..., "Tensor | str"],
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
    """Compute `scaled_dot_product_attention` in FP8, or return the reason why that is not possible.

    `multiply(a, b)` is `a @ b`. If only the second product cannot run in FP8, it runs in high precision.
    """
    if not _fits(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        return "arguments that do not fit, or that torch alone takes"
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
        weights = weights.nan_to_num(0.0)  # a query with all keys masked attends to nothing, as in torch
    weights = torch.nn.functional.dropout(weights, dropout_p).to(value.dtype)
    return multiply(weights, value, or_hp=True)


def _fits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Return True for shapes and dtypes that torch accepts without broadcasting."""
    if not query.dim() == key.dim() == value.dim() >= (3 if enable_gqa else 2):
        return False
    batch = -3 if enable_gqa else -2
    heads_fit = not enable_gqa or (key.shape[-3] == value.shape[-3] != 0 and query.shape[-3] % key.shape[-3] == 0)
    if not (query.shape[:batch] == key.shape[:batch] == value.shape[:batch] and heads_fit):
        return False
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2] or not 0 <= dropout_p < 1:
        return False
    if not (query.dtype == key.dtype == value.dtype and query.device == key.device == value.device):
        return False
    if attn_mask is None:
        return True
    shape = (*query.shape[:-1], key.shape[-2])
    return (
        not is_causal
        and attn_mask.dtype in (torch.bool, query.dtype)
        and attn_mask.device == query.device
        and 2 <= attn_mask.dim() <= len(shape)
        and all(n in (1, wanted) for n, wanted in zip(reversed(attn_mask.shape), reversed(shape), strict=False))
    )
