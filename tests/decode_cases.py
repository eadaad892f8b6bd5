"""Caches with something in them, for the tests of decode attention: its specification, its kernels, its operators."""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics.decode import KVCache, store
from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import dequantize


class Decode(NamedTuple):
    """The arguments of `decode_attention` before `scaling`; then the slots of each group."""

    q: Tensor
    prefix: KVCache
    prefix_lengths: Tensor
    group_of: Tensor
    suffix: KVCache
    suffix_lengths: Tensor
    slots_of_group: Tensor

    def to(self, device: str) -> "Decode":
        return Decode(*(_moved(x, device) for x in self))


def _moved(x, device):
    if isinstance(x, KVCache):
        return KVCache(*(None if y is None else y.to(device) for y in x))
    return x.to(device)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def new_cache(places: int, positions: int, heads: int, width: int, dtype: torch.dtype, *, bytes: bool) -> KVCache:
    """Full of NaN, as memory may be that nobody has written to."""
    shape = (places, positions, heads, width)
    if bytes:
        nan = torch.full(shape[:3], torch.nan)
        return KVCache(*(torch.full(shape, 0x7F, dtype=torch.uint8) for _ in range(2)), nan, nan.clone())
    return KVCache(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))


def new_decode(
    *,
    prefix: tuple[int, ...] = (9, 0, 37),
    suffix: tuple[int, ...] = (3, 0, 70, 1, 33, 12),
    groups: tuple[int, ...] = (2, 0, 0, -1, 1, 2),
    positions: tuple[int, int] = (40, 75),
    heads: tuple[int, int, int] = (4, 2, 64),
    dtype: torch.dtype = torch.float32,
    bytes: bool = False,
    device: str = "cpu",
) -> Decode:
    """Keys and values drawn at random, where lengths say that there are any; `groups`: of each slot."""
    h, g, d = heads
    caches = []
    for lengths, most in ((prefix, positions[0]), (suffix, positions[1])):
        cache = new_cache(len(lengths), most, g, d, dtype, bytes=bytes)
        places = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
        where = torch.cat([torch.arange(length) for length in lengths]).int()
        k, v = torch.randn(2, len(places), g, d).to(dtype)
        k[:: max(1, len(k) // 3)] *= 20.0  # tokens that are unlike the others
        store(k, v, cache, places, where)
        caches.append(cache)
    table = table_of(groups, len(prefix))
    q = torch.randn(len(suffix), h, d).to(dtype)
    made = Decode(q, caches[0], ints(*prefix), ints(*groups), caches[1], ints(*suffix), table)
    return made.to(device)


def table_of(groups: tuple[int, ...], count: int) -> Tensor:
    """The slots of each group, padded with −1 by one more than needed, and not in order."""
    each = [[slot for slot, group in enumerate(groups) if group == i][::-1] for i in range(count)]
    most = max(2, *(len(slots) + 1 for slots in each))
    return torch.tensor([[-1] * (most - len(slots)) + slots for slots in each], dtype=torch.int32)


def reference(
    made: Decode, scaling: float, window: int | None = None, softcap: float | None = None, dtype=torch.float64
) -> Tensor:
    """Softmax over the keys of each slot one after another, in FP64."""
    out = torch.zeros(made.q.shape, dtype=dtype)
    for t, own in enumerate(made.suffix_lengths.tolist()):
        group = int(made.group_of[t])
        before = int(made.prefix_lengths[group]) if group >= 0 else 0
        if own == 0:
            continue
        k, v = (
            torch.cat([_wide(made.prefix, i, max(group, 0), before), _wide(made.suffix, i, t, own)]).to(dtype)
            for i in range(2)
        )
        if window is not None:
            k, v = k[-window:], v[-window:]
        each = made.q.shape[1] // k.shape[1]
        for head in range(made.q.shape[1]):
            s = k[:, head // each] @ made.q[t, head].to(dtype) * scaling
            if softcap is not None:
                s = torch.tanh(s / softcap) * softcap
            out[t, head] = torch.softmax(s, 0) @ v[:, head // each]
    return out


def bound(made: Decode, expected: Tensor, scaling: float) -> Tensor:
    """How far a kernel's output may be from the specification's.

    Scores are computed in FP32 on both sides, each off by half a step 2^-24 of the largest, S ≤ scaling · |q| · |k|,
    and shares p by as much, relatively. A kernel rounds shares to the dtype of their product with values, by half a
    step u: that of FP16 where values are bytes, since p · value scale is there normal down to 2^-28 of its largest.
    Both change Σ p v by that factor times max |v|, at most. Then each side rounds its output.
    """
    dtype = made.q.dtype
    k, v = (torch.cat([_all(cache, i).double().flatten() for cache in (made.prefix, made.suffix)]) for i in range(2))
    scores = (
        scaling * made.q.double().nan_to_num(0.0).norm(dim=-1).max() * k.view(-1, made.q.shape[2]).norm(dim=-1).max()
    )
    of_shares = 0.0 if dtype == torch.float32 else HALF_STEP[dtype if made.suffix.key_scales is None else torch.float16]
    return (scores * 2.0**-23 + of_shares) * v.abs().max() + 2 * HALF_STEP[dtype] * expected.float().abs()


HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _all(cache: KVCache, i: int) -> Tensor:
    """All keys or values in FP32, with zeros where nothing was written."""
    data, scales = cache[i], cache[2 + i]
    wide = data.float() if scales is None else dequantize(data.view(E4M3.dtype), scales.unsqueeze(-1))
    return wide.nan_to_num(0.0)


def _wide(cache: KVCache, i: int, place: int, length: int) -> Tensor:
    data, scales = cache[i], cache[2 + i]
    if scales is None:
        return data[place, :length]
    return dequantize(data[place, :length].view(E4M3.dtype), scales[place, :length].unsqueeze(-1))
