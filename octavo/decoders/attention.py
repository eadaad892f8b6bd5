"""The attention that fused decoders use: cuDNN's where it applies, torch's choice elsewhere.

On one H200, 4 × 2048 tokens, 32 heads over 8 of 128: cuDNN 1.21 ms forward and backward, flash attention 2.17. torch
2.11 picks cuDNN by itself there; naming it does not leave that to the version. It plugs in by transformers' own door:
a registered attention function, which the model's configuration names.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

NAME = "octavo"
_LARGEST_HEAD = 128


def plainly_causal(like: Tensor) -> Tensor:
    """A mask that means causal and nothing else: empty, of four dimensions, which transformers passes on unchanged.

    Given no mask, transformers reads the positions back from the GPU to see whether sequences are packed in them, and
    so waits for all that the GPU still has to do.
    """
    return like.new_empty(0, 0, 0, 0)


@cache
def register() -> None:
    """Register this attention with transformers, with the masks of `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_of(config: Any) -> Callable[..., Any] | None:
    """The function by which a model attends; None for one that its own module has (`eager`)."""
    if config._attn_implementation == NAME:
        return attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    return found


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with `query[B, H, T, d]` over `key` and `value[B, G, T, d]`; returns `[B, T, H, d]`."""
    if attention_mask is not None and attention_mask.numel() == 0:
        attention_mask = None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and dropout == 0.0 and _cudnn_takes(query, key):
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, torch.is_grad_enabled(), 0.0, True, scale=scaling
        )[0]
        return out.transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def _cudnn_takes(query: Tensor, key: Tensor) -> bool:
    return (
        query.device.type == "cuda"
        and torch.version.hip is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] == key.shape[2]
        and query.shape[2] > 1
        and query.shape[3] <= _LARGEST_HEAD
        and query.shape[3] % 8 == 0
    )
