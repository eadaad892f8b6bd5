"""The cache of a rollout: keys and values in two static parts, and how a decoder attends to them.

    prefix[place]    a prompt, held once for all of its completions
    suffix[slot]     the tokens of one completion

GRPO knows its own structure, n completions of each prompt, so sharing a prompt takes no pages and no table of blocks.
`numerics/decode.py` has the attention over both parts. While prompts are computed, attention is the ordinary one over
the prompts themselves, packed in one row, and their keys and values are stored on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.decoders import attention
from octavo.numerics.attention import causal_mask
from octavo.numerics.rotary import Heads, Norms
from octavo.ops.decode import KVCache, decode_attention, rotary_and_store, store

KV_DTYPES = ("auto", "bf16", "fp8")


@dataclass(frozen=True)
class CacheSize:
    """How much a cache holds: `places` prompts of `prefix` tokens and `slots` completions of `suffix` tokens."""

    places: int
    prefix: int
    slots: int
    suffix: int

    @property
    def tokens(self) -> int:
        return self.places * self.prefix + self.slots * self.suffix

    def covers(self, other: "CacheSize") -> bool:
        pairs = zip(self._sizes, other._sizes, strict=True)
        return all(mine >= theirs for mine, theirs in pairs)

    def joined(self, other: "CacheSize") -> "CacheSize":
        """The smallest size that covers both."""
        return CacheSize(*(max(pair) for pair in zip(self._sizes, other._sizes, strict=True)))

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return self.places, self.prefix, self.slots, self.suffix


@dataclass(frozen=True)
class CacheFormat:
    """Contents of a cache for one token: heads of k and v of each layer, their width, and their dtype.

    `dtype`: of keys and values; uint8 for E4M3 with an FP32 scale for each token and head.
    """

    layers: int
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        scale = 4 if self.dtype == torch.uint8 else 0
        return 2 * self.layers * self.heads * (self.width * self.dtype.itemsize + scale)

    def new(self, places: int, positions: int, device: torch.device) -> KVCache:
        """Return empty keys and values of one layer and one part."""
        shape = (places, positions, self.heads, self.width)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=device) for _ in range(2))
        if self.dtype != torch.uint8:
            return KVCache(keys, values)
        scales = (torch.empty(shape[:3], dtype=torch.float32, device=device) for _ in range(2))
        return KVCache(keys, values, *scales)


class RolloutCache:
    """Keys and values of all layers, and the length of each prompt."""

    def __init__(self, size: CacheSize, form: CacheFormat, device: torch.device) -> None:
        self.size, self.format = size, form
        self.prefix = [form.new(size.places, size.prefix, device) for _ in range(form.layers)]
        self.suffix = [form.new(size.slots, size.suffix, device) for _ in range(form.layers)]
        self.prefix_lengths = torch.zeros(size.places, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.size.tokens * self.format.bytes_per_token


class Prefill:
    """Attention of prompts that lie one after another in one row, which go to `places`."""

    def __init__(
        self, cache: RolloutCache, lengths: Sequence[int], places: Sequence[int], device: torch.device
    ) -> None:
        self.cache = cache
        counts = torch.tensor(lengths)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        positions = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(counts)
        where = torch.tensor(places).repeat_interleave(counts)
        self.bounds: list[int] = offsets.tolist()
        self.longest = max(lengths)
        self.offsets, self.positions, self.places = (x.int().to(device) for x in (offsets, positions, where))
        cache.prefix_lengths[torch.tensor(places, device=device)] = counts.int().to(device)

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
        store(key, value, self.cache.prefix[layer], self.places, self.positions)
        if softcap is not None:
            return self._bent(query, key, value, scaling, window, softcap)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out, _ = attention.attention(
            _CAUSAL, q, k, v, attention.plainly_causal(q), scaling=scaling, sliding_window=window,
            cu_seq_lens_q=self.offsets, max_length_q=self.longest,
        )  # fmt: skip
        return out[0]

    def attend_rotated(self, *_: Any, **__: Any) -> None:
        """Nothing: the prompts' own attention needs k and v themselves."""

    def _bent(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, cap: float
    ) -> Tensor:
        """Attention whose scores are bent: one prompt after another, in FP32."""
        outputs = []
        shared = query.shape[1] // key.shape[1]
        for start, stop in zip(self.bounds, self.bounds[1:], strict=False):
            q, k, v = (x[start:stop].float().transpose(0, 1) for x in (query, key, value))
            k, v = (x.repeat_interleave(shared, dim=0) for x in (k, v))
            scores = cap * torch.tanh(q @ k.transpose(1, 2) * (scaling / cap))
            hidden = ~causal_mask(stop - start, window, query.device)
            out = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
            outputs.append(out.transpose(0, 1).to(query.dtype))
        return torch.cat(outputs)


class _Causal(torch.nn.Module):
    """A module in the place of the one that attends: `attention` asks it whether it is causal."""

    is_causal = True


_CAUSAL = _Causal()


class Decode:
    """Attention of one new token for each slot.

    `places[T]`: the slot itself, or −1 for an empty one, which stores nothing; `positions[T]`: where its token goes;
    `lengths[T]`: of its suffix, with that token; `group_of[T]`: the place of its prompt; `slots_of_group`: its inverse.
    """

    def __init__(
        self,
        cache: RolloutCache,
        *,
        places: Tensor,
        positions: Tensor,
        lengths: Tensor,
        group_of: Tensor,
        slots_of_group: Tensor,
    ) -> None:
        self.cache, self.places, self.positions, self.lengths = cache, places, positions, lengths
        self.group_of, self.slots_of_group = group_of, slots_of_group

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
        store(key, value, self.cache.suffix[layer], self.places, self.positions)
        return self._attend(layer, query, scaling, window, softcap)

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
    ) -> Tensor:
        suffix = self.cache.suffix[layer]
        query = rotary_and_store(qkv, cos, sin, heads, norms, suffix, self.places, self.positions)
        return self._attend(layer, query, scaling, window, softcap)

    def _attend(self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
        cache = self.cache
        return decode_attention(
            query, cache.prefix[layer], cache.prefix_lengths, self.group_of, cache.suffix[layer], self.lengths,
            scaling, window, softcap, self.slots_of_group,
        )  # fmt: skip
