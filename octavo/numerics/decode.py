"""Attention of one new token for each slot, over keys and values that are kept: the step of a decoder that generates.

A *slot* holds one completion, and a *group* the prompt that several completions share. The cache of a layer has two
parts, `prefix[group]` and `suffix[slot]`, each with so many *places* of P *positions*. Slot t attends to the prompt of
its group and to its own tokens, of which the newest is stored already:

    prefix j  is at j,  j < prefix_lengths[g]              g = group_of[t]; no prompt if g < 0
    suffix j  is at prefix_lengths[g] + j,  j < suffix_lengths[t]
    query     is at prefix_lengths[g] + suffix_lengths[t] − 1

    s_j = (q · k_j) × scaling            s_j ← softcap · tanh(s_j / softcap), where there is one
    o   = Σ_j softmax(s)_j · v_j         over all j with  position of query − position of j < window

It is one softmax over both parts. Computed apart, each of two or more parts i with its own softmax, output and
log-sum-exp, they are merged as

    lse_i = log Σ_j exp(s_j),   o = Σ_i o_i · exp(lse_i) / Σ_i exp(lse_i)

Each of G heads of k and v serves H / G heads of q. All is computed in FP32 and rounded once, to the dtype of q.

Keys and values are kept in the dtype of the activations, or as E4M3 bytes with one scale for each token and head, by
the rules of `numerics.quantize` (amax / 448, 1 for zeros, NaN stays NaN). A scale per tensor would let one token with
an outlier take the precision of all others.

Unusual input:
- an empty slot, `suffix_lengths[t] = 0`: zeros, whatever its group is;
- what lies beyond a length never counts, not even if it is NaN or was never written;
- NaN in q, or in a key or value that is visible: NaN in the heads that use it, in this slot alone (or, in a prompt, in
  the slots of its group);
- a token whose place or position is negative is not stored: so an empty slot takes part in a step and leaves nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import dequantize, quantize
from octavo.numerics.rotary import Heads, Norms, rotary


class KVCache(NamedTuple):
    """Keys and values of one layer and one part, prefix or suffix: S places of P positions.

    `keys`, `values`: `[S, P, G, D]`, in the dtype of the activations, or E4M3 as uint8. The scales are FP32
    `[S, P, G]`, and there where `keys` and `values` are bytes.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def store(keys: Tensor, values: Tensor, cache: KVCache, places: Tensor, positions: Tensor) -> None:
    """Write `keys` and `values[T, G, D]` to `cache[places[t], positions[t]]`; no two tokens to the same.

    A token with a negative place or position is left out.
    """
    kept = (places >= 0) & (positions >= 0)
    where = places[kept].long(), positions[kept].long()
    for x, data, scales in ((keys, cache.keys, cache.key_scales), (values, cache.values, cache.value_scales)):
        if scales is None:
            data[where] = x[kept].to(data.dtype)
        else:
            quantized = quantize(x[kept], format=E4M3, granularity="channel")
            data[where] = quantized.data.view(torch.uint8)
            scales[where] = quantized.scale.squeeze(-1)


def rotary_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: Norms | None, cache: KVCache, places: Tensor,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    """Return q `[T, H, D]`, with its norm and rotation (`numerics.rotary`), and store k and v."""
    q, k, v = rotary(qkv, cos, sin, heads, norms)
    store(k, v, cache, places, positions)
    return q


def decode_attention(
    q: Tensor,
    prefix: KVCache,
    prefix_lengths: Tensor,
    group_of: Tensor,
    suffix: KVCache,
    suffix_lengths: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    slots_of_group: Tensor | None = None,  # noqa: ARG001
) -> Tensor:
    """Attend with one query for each slot, `q[T, H, D]`, to its group's prompt and its own tokens; `[T, H, D]`.

    `slots_of_group[groups, n]`, int32, padded with −1: which slots have this group in `group_of`, in any order, for
    each group that an occupied slot has. It adds nothing to the meaning; a kernel that knows it reads a prompt once
    for all its slots.
    """
    group = group_of.long()
    before = torch.where(group >= 0, prefix_lengths[group.clamp(min=0)].long(), 0)
    own = suffix_lengths.long()
    # The position of the first key that a query sees.
    first = torch.zeros_like(own) if window is None else (before + own - window).clamp(min=0)
    prefix_positions = torch.arange(_longest(before, prefix.keys), device=q.device)
    suffix_positions = torch.arange(_longest(own, suffix.keys), device=q.device)
    visible = [
        (prefix_positions < before[:, None]) & (prefix_positions >= first[:, None]),
        (suffix_positions < own[:, None]) & (suffix_positions >= (first - before)[:, None]),
    ]
    slots = torch.arange(q.shape[0], device=q.device)
    parts = [
        _gather(prefix, group.clamp(min=0), visible[0]),
        _gather(suffix, slots, visible[1]),
    ]
    apart = q.float().unflatten(1, (suffix.keys.shape[2], -1))  # [T, G, H / G, D]
    scores = torch.cat([torch.einsum("tgrd,tpgd->tgrp", apart, keys) for keys, _ in parts], dim=-1) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(torch.cat(visible, dim=1)[:, None, None, :], scores, -torch.inf)
    shares = torch.softmax(scores, dim=-1).split([each.shape[1] for each in visible], dim=-1)
    out = sum(torch.einsum("tgrp,tpgd->tgrd", share, v) for share, (_, v) in zip(shares, parts, strict=True))
    assert isinstance(out, Tensor)
    return torch.where((own > 0)[:, None, None], out.flatten(1, 2), 0.0).to(q.dtype)


def _longest(lengths: Tensor, data: Tensor) -> int:
    """How many positions to look at: as many as are used; on a GPU, where asking would wait for it, all there are."""
    return int(lengths.max()) if lengths.device.type == "cpu" and lengths.numel() else data.shape[1]


def _gather(cache: KVCache, places: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of these places in FP32, `[T, P, G, D]`; zeros where they are hidden."""
    length, hidden = visible.shape[1], ~visible[:, :, None, None]
    found = []
    for data, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        x = data[:, :length][places]
        if scales is None:
            x = x.float()
        else:
            x = dequantize(x.view(E4M3.dtype), scales[:, :length][places].unsqueeze(-1))
        found.append(x.masked_fill(hidden, 0.0))
    return found[0], found[1]
