"""The attention that fused decoders use: one front for rows of one length and for sequences of any length.

It plugs in by transformers' own door: a registered attention function, which the model's configuration names. It takes

    rows of one length    cuDNN, if the length is a multiple of 128; it makes a plan for every shape. Not where the user
                          wants deterministic algorithms: its backward adds up the gradient of q in any order
    any other sequences   flash attention, whose kernels take offsets and plan nothing
    everything else       transformers' function for `sdpa`: a mask that is given, a cache, another device

Measured on one H200, torch 2.11, 32 heads over 8 of 128, forward and backward: 4 × 2048 tokens take 1.12 ms by cuDNN
and 2.00 by flash attention; 8,192 tokens in 19 sequences of log-normal lengths take 1.06 by flash attention. A new
shape costs cuDNN 100 to 140 ms, and flash attention nothing. cuDNN's own form for sequences of any length makes its
plan in every call (102 ms), and its gradients are wrong there.

So cuDNN is for text that is cut to one length, which is a round number, and lengths that come as they are have no plan
to wait for. The choice depends on the shape alone: a layer that is computed again by checkpointing, a run that is
resumed, and one that is compiled choose alike.

transformers' continuous batching (`generate_batch`) attends over a cache of pages, which that owns. In
transformers 5.17 it asks for `paged|octavo`; in 5.22 it knows no attention but its own, and models go there by `sdpa`.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from octavo.numerics.attention import causal_mask, varlen_attention
from octavo.support import is_deterministic
from octavo.tracing import constant_when_traced

NAME = "octavo"
PAGED = f"paged|{NAME}"  # as continuous batching calls it
_LARGEST_CUDNN_HEAD = 128
_LARGEST_FLASH_HEAD = 256
_ROUND = 128  # lengths that are a multiple of it are those that text is cut to


def plainly_causal(like: Tensor) -> Tensor:
    """A mask that means causal and nothing else: empty, of four dimensions, which transformers passes on unchanged.

    Causal within a row, or within a sequence where offsets come with it (`cu_seq_lens_q`), and within the window of the
    layer. Given no mask, transformers reads the positions back from the GPU to see whether sequences are packed in
    them, and so waits for all that the GPU still has to do.
    """
    return like.new_empty(0, 0, 0, 0)


@cache
def register() -> None:
    """Register this attention with transformers, with the masks of `sdpa`; over pages, it needs none."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if "paged|sdpa" in AttentionInterface._global_mapping:
        AttentionInterface.register(PAGED, paged_attention)
    else:
        _batch_by_sdpa()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _batch_by_sdpa() -> None:
    """Have continuous batching find `sdpa` where a model has this attention, and give that back in the end."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    manager: Any = ContinuousBatchingManager
    original = manager.switch_to_cb_friendly_attn

    @wraps(original)
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        ours = model.config._attn_implementation == NAME
        if ours:
            model.set_attn_implementation("sdpa")
        original(self, model, *args, **kwargs)
        if ours:
            self._original_attn_impl = NAME

    manager.switch_to_cb_friendly_attn = switch


@constant_when_traced
def is_distributed() -> str:
    """Who has attention computed across ranks, in a way that this one would bypass; empty if nobody has.

    torch's `context_parallel` puts another function in the place of sdpa, and DeepSpeed's Ulysses in transformers' list
    of attentions: this attention calls neither. Each rank would attend to its own tokens alone.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if f"{nn.functional.scaled_dot_product_attention.__module__}".startswith("torch.distributed."):
        return "context_parallel"
    listed = ALL_ATTENTION_FUNCTIONS.get("sdpa")
    return "sequence parallelism by DeepSpeed" if getattr(listed, "__module__", "").startswith("deepspeed.") else ""


def refuse_distributed(config: Any) -> None:
    """Raise where a model has this attention, and its tokens are spread over ranks."""
    who = is_distributed() if config._attn_implementation == NAME else ""
    if who:
        raise ValueError(
            f"{who} with attn_implementation={NAME!r}: each rank would attend to its own tokens alone. Call "
            'model.set_attn_implementation("sdpa") after the model is converted, or train without it'
        )


def configs_of(model: Any) -> list[Any]:
    """The configurations that say how a causal language model attends, some of them several times.

    A layer that was copied has one of its own.
    """
    attentions: Any = (getattr(layer, "self_attn", None) for layer in getattr(model.model, "layers", ()))
    return [model.config, *(each.config for each in attentions if hasattr(each, "config"))]


def is_paged(kwargs: dict[str, Any]) -> bool:
    """Whether a model is called by continuous batching: keys are written to places in pages."""
    return kwargs.get("write_index") is not None


def attention_of(config: Any) -> Callable[..., Any] | None:
    """The function by which a model attends; None for one that its own module has (`eager`)."""
    if config._attn_implementation == NAME:
        return attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    return function


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
    plain = attention_mask is not None and attention_mask.numel() == 0
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = plain or (attention_mask is None and is_causal)
    window = kwargs.get("sliding_window") if plain else None  # otherwise it is in the mask
    offsets = kwargs.get("cu_seq_lens_q") if plain else None
    if plain and offsets is None and window is not None and window >= query.shape[2]:
        window = None
    query, key, value = _as_autocast(query, key, value)
    if offsets is not None or window is not None:
        return _varlen(query, key, value, offsets, kwargs.get("max_length_q"), dropout, scaling, window), None
    if causal and dropout == 0.0 and _cudnn_takes(query, key):
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, torch.is_grad_enabled(), 0.0, True, scale=scaling
        )[0]
        return out.transpose(1, 2).contiguous(), None
    if causal and _flash_takes(query, key):
        return _varlen(query, key, value, None, None, dropout, scaling, None), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = None if plain else attention_mask
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    *,
    scaling: float | None = None,
    cache: Any,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | dict[str, Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int | dict[str, int],
    read_index: list[Tensor],
    write_index: list[Tensor],
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with the new tokens `query[1, H, T, d]` of several sequences over those and what the cache has of them.

    `cu_seq_lens_q`, `cu_seq_lens_k`: where new tokens and keys of a sequence begin; for each kind of layer, if there
    are two kinds. `read_index`, `write_index`: places of keys in the cache, for each group of layers.
    """
    kind = "full_attention" if sliding_window is None else "sliding_attention"
    offsets = cu_seq_lens_k[kind] if isinstance(cu_seq_lens_k, dict) else cu_seq_lens_k
    longest = max_seqlen_k[kind] if isinstance(max_seqlen_k, dict) else max_seqlen_k
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=read_index, write_index=write_index
    )
    q = query[0].transpose(0, 1)
    if _has_flash(query, _LARGEST_FLASH_HEAD):
        queries, keys = cu_seq_lens_q.int(), offsets.int()
        out = _flash(q, key, value, (queries, keys), (max_seqlen_q, longest), 0.0, scaling, sliding_window)
    else:
        out = varlen_attention(q, key, value, cu_seq_lens_q, offsets, scale=scaling, window=sliding_window)
    return out[None], None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor | None,
    longest: int | None,
    dropout: float,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention over sequences with these offsets; over rows if there are none."""
    batch, _, length, _ = query.shape
    if offsets is None:
        if not _flash_takes(query, key):
            return _rows(query, key, value, dropout, scale, window)
        offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        longest = length
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if _flash_takes(query, key):
        assert longest is not None
        out = _flash(q, k, v, (offsets, offsets), (longest, longest), dropout, scale, window)
    else:
        out = varlen_attention(q, k, v, offsets, scale=scale, window=window, dropout=dropout)
    return out.unflatten(0, (batch, length))


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    dropout: float,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Flash attention over sequences. `offsets`, `longest`: of queries, and of keys."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *offsets, *longest, dropout, window is None, False, scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return out


def _rows(query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None, window: int | None) -> Tensor:
    mask = causal_mask(query.shape[2], window, query.device)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous()


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype in which torch's autocast has attention compute."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


def _cudnn_takes(query: Tensor, key: Tensor) -> bool:
    return query.shape[2] % _ROUND == 0 and _is_short_cut(query, key, _LARGEST_CUDNN_HEAD) and not is_deterministic()


def _flash_takes(query: Tensor, key: Tensor) -> bool:
    return _is_short_cut(query, key, _LARGEST_FLASH_HEAD)


def _is_short_cut(query: Tensor, key: Tensor, largest_head: int) -> bool:
    return _has_flash(query, largest_head) and query.shape[2] == key.shape[2] and query.shape[2] > 1


def _has_flash(query: Tensor, largest_head: int) -> bool:
    """Whether these queries may go to cuDNN or flash attention, as far as device, dtype and width go."""
    return (
        query.device.type == "cuda"
        and torch.version.hip is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] <= largest_head
        and query.shape[3] % 8 == 0
    )
