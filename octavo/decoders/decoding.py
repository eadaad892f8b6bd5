"""The attention of a decoder that generates from a cache which somebody else keeps.

It plugs in by transformers' own door, as `attention.py` does: a registered attention function, which the configuration
names for as long as `decoding` lasts. All that a family does around it stays its own: norms of heads, rotation by
position, windows, bounds of scores. The function hands q, k and v of the new tokens to the cache and returns what the
cache attends to. The model is called without a cache of transformers', with positions and an empty mask
(`attention.plainly_causal`), from which no mask is made.

Where a fused attention has q, k and v side by side, the cache may take them so, and rotate and store in one kernel.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octavo.decoders import attention
from octavo.numerics.rotary import Heads, Norms

NAME = "octavo_decode"


class Attends(Protocol):
    """A cache of keys and values. `layer`: the index of the layer; T new tokens, H heads over G of width D."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store `key` and `value[T, G, D]`, and attend with `query[T, H, D]`; returns `[T, H, D]`."""
        ...

    def attend_rotated(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: Heads,
        norms: Norms | None,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor | None:
        """Do the same from `qkv[T, (H + 2·G)·D]` before norms and rotation; None if that has to be done outside."""
        ...


_BLIND_TO_SOFTCAP = ("sdpa", attention.NAME)  # functions that take no bound of scores, which models give them anyway


class _Decoding(NamedTuple):
    cache: Attends
    bends: frozenset[int]  # configurations, by `id`, whose own attention bends scores by `softcap`


_CURRENT: ContextVar[_Decoding | None] = ContextVar("octavo_decoding", default=None)


def current() -> Attends | None:
    """Return the cache that attention uses at the moment; None outside `decoding`."""
    if torch.compiler.is_compiling():  # Dynamo cannot read the variable; a model that generates is not compiled
        return None
    found = _CURRENT.get()
    return None if found is None else found.cache


@contextmanager
def decoding(configs: Sequence[Any], attends: Attends) -> Iterator[None]:
    """Have a model attend by a cache. Everything is as before afterwards, errors included.

    `configs`: those of the model and of its attentions, each once. A layer that was copied has one of its own.
    """
    _register()
    before = [config._attn_implementation for config in configs]
    bends = {id(config) for config, name in zip(configs, before, strict=True) if name not in _BLIND_TO_SOFTCAP}
    token = _CURRENT.set(_Decoding(attends, frozenset(bends)))
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        _CURRENT.reset(token)


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with `query[B, H, S, D]` over `key` and `value[B, G, S, D]` and what the cache has; `[B, S, H, D]`."""
    found = _CURRENT.get()
    if found is None:
        raise RuntimeError(f"attn_implementation={NAME!r} has no cache: it is for octavo.rl's engine alone")
    batch, length = query.shape[0], query.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    bound = softcap if id(module.config) in found.bends else None
    out = found.cache.attend(layer, q, k, v, scaling=scaling, window=sliding_window, softcap=bound)
    return out.unflatten(0, (batch, length)), None
