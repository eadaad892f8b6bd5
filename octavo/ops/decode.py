"""Attention of tokens that are being generated, and the cache of their keys and values (`numerics/decode.py`).

A GPU runs kernels, any other device the specification. All of it can be captured in a CUDA graph: lengths, places and
positions are int32 tensors on the device, and nothing waits for them.

    q = rotary_and_store(qkv, cos, sin, heads, norms, suffix, slots, positions)
    o = decode_attention(q, prefix, prefix_lengths, group_of, suffix, suffix_lengths, scaling)
"""

import torch
from torch import Tensor

from octavo.kernels.tuning import is_known_gpu
from octavo.numerics import decode as spec
from octavo.numerics.decode import KVCache
from octavo.numerics.norm import Norm
from octavo.numerics.rotary import Heads, Norms
from octavo.ops.register import operator

__all__ = ["KVCache", "decode_attention", "rotary_and_store", "store"]

_CACHE = ("cache_keys", "cache_values", "key_scales", "value_scales")


def store(keys: Tensor, values: Tensor, cache: KVCache, places: Tensor, positions: Tensor) -> None:
    """Write `keys` and `values[T, G, D]` to `cache[places[t], positions[t]]`, as bytes where the cache holds bytes.

    A token with a negative place or position is left out. No two tokens may go to the same position.
    """
    _check_cache("cache", cache, keys)
    if keys.shape != values.shape or keys.shape[1:] != cache.keys.shape[2:]:
        raise ValueError(
            f"keys {tuple(keys.shape)}, values {tuple(values.shape)}: for a cache of [tokens, heads, width] "
            f"[T, {cache.keys.shape[2]}, {cache.keys.shape[3]}]"
        )
    _check_indices(len(keys), places=places, positions=positions)
    _decode_store(keys, values, *cache, places, positions)


def rotary_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: Norms | None, cache: KVCache, places: Tensor,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    """Return q `[T, H, D]` of `qkv[T, (H + 2·G)·D]`, with norms of heads and rotation; store k and v, as `store` does.

    `cos` and `sin[R, D]`: of each token (R = T), or of sequences that share their positions (`numerics.rotary`).
    """
    _check_cache("cache", cache, qkv.new_empty([0, heads.kv, heads.width]))
    _check_indices(len(qkv), places=places, positions=positions)
    if norms is not None and norms[0][1:] != norms[1][1:]:
        raise ValueError(f"norms: {norms[0][1:]} for q and {norms[1][1:]} for k; eps and shifted must be the same")
    weights = [] if norms is None else [norms[0].weight, norms[1].weight]
    eps, shifted = (0.0, False) if norms is None else (norms[0].eps, norms[0].shifted)
    return _rotary_and_store(qkv, cos, sin, weights, list(heads), eps, shifted, *cache, places, positions)


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
    slots_of_group: Tensor | None = None,
) -> Tensor:
    """Attend with one query for each slot, `q[T, H, D]`, to its group's prompt and its own tokens; `[T, H, D]`.

    Slot t sees `prefix[group_of[t], :prefix_lengths[group_of[t]]]`, nothing of it if its group is negative, and
    `suffix[t, :suffix_lengths[t]]`, where the newest token has been stored. `window`: how many positions back it sees,
    itself included. An empty slot (length 0) gives zeros.

    `slots_of_group[groups, n]`, int32 and padded with −1: the slots of each group, in any order. It changes no result;
    with it a GPU reads a prompt once for all of its slots, otherwise each slot reads it for itself.
    """
    _check_cache("prefix", prefix, q)
    _check_cache("suffix", suffix, q)
    _check_indices(len(q), group_of=group_of, suffix_lengths=suffix_lengths)
    _check_indices(len(prefix.keys), prefix_lengths=prefix_lengths)
    if slots_of_group is not None:
        _check_indices(len(prefix.keys), slots_of_group=slots_of_group)
    if (prefix.key_scales is None) != (suffix.key_scales is None):
        raise ValueError("prefix and suffix: one holds bytes, the other does not; allocate both in the same format")
    if q.shape[0] > suffix.keys.shape[0] or q.shape[1] % suffix.keys.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, suffix.keys {tuple(suffix.keys.shape)}: give a place for each slot, and heads of q "
            "that are a multiple of those of k"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window}: at least 1, the query's own position, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: above 0, or None")
    return _decode_attention(
        q, *prefix, prefix_lengths, group_of, *suffix, suffix_lengths, scaling, window or 0, softcap or 0.0,
        slots_of_group,
    )  # fmt: skip


def _nothing() -> None:
    return None


@operator(mutates=_CACHE, fake=_nothing)
def _decode_store(
    keys: Tensor,
    values: Tensor,
    cache_keys: Tensor,
    cache_values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    places: Tensor,
    positions: Tensor,
) -> None:
    """Keys and values into a cache; see `store`."""
    cache = KVCache(cache_keys, cache_values, key_scales, value_scales)
    if _has_kernels(keys, cache):
        from octavo.kernels import decode_store as kernels  # brings Triton

        if kernels.can_store(keys.shape[2], keys.dtype, cache):
            return kernels.store(keys, values, cache, places, positions)
    return spec.store(keys, values, cache, places, positions)


def _rotary_and_store_fake(qkv: Tensor, heads: list[int]) -> Tensor:
    return qkv.new_empty([qkv.shape[0], heads[0], heads[2]])


@operator(mutates=_CACHE, fake=_rotary_and_store_fake)
def _rotary_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: list[Tensor],
    heads: list[int],
    eps: float,
    shifted: bool,
    cache_keys: Tensor,
    cache_values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    places: Tensor,
    positions: Tensor,
) -> Tensor:
    """q, with k and v stored; `weights`: of the norms of q and k, if there are any. See `rotary_and_store`."""
    cache = KVCache(cache_keys, cache_values, key_scales, value_scales)
    norms = (Norm(weights[0], eps, shifted), Norm(weights[1], eps, shifted)) if weights else None
    split = Heads(*heads)
    if _has_kernels(qkv, cache):
        from octavo.kernels import decode_store as kernels

        if kernels.can_rotate_and_store(qkv, cos, sin, split, norms, cache):
            return kernels.rotary_and_store(qkv, cos, sin, split, norms, cache, places, positions)
    return spec.rotary_and_store(qkv, cos, sin, split, norms, cache, places, positions)


def _decode_attention_fake(q: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@operator(fake=_decode_attention_fake)
def _decode_attention(
    q: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    prefix_key_scales: Tensor | None,
    prefix_value_scales: Tensor | None,
    prefix_lengths: Tensor,
    group_of: Tensor,
    suffix_keys: Tensor,
    suffix_values: Tensor,
    suffix_key_scales: Tensor | None,
    suffix_value_scales: Tensor | None,
    suffix_lengths: Tensor,
    scaling: float,
    window: int,
    softcap: float,
    slots_of_group: Tensor | None,
) -> Tensor:
    """Attention over both parts of a cache; see `decode_attention`. `window`, `softcap`: 0 for none."""
    prefix = KVCache(prefix_keys, prefix_values, prefix_key_scales, prefix_value_scales)
    suffix = KVCache(suffix_keys, suffix_values, suffix_key_scales, suffix_value_scales)
    given = (q, prefix, prefix_lengths, group_of, suffix, suffix_lengths, scaling, window or None, softcap or None)
    if _has_kernels(q, suffix):
        from octavo.kernels import decode as kernels

        if kernels.can_decode(q, prefix, suffix):
            return kernels.decode_attention(*given, slots_of_group)
    return spec.decode_attention(*given, slots_of_group)


def _has_kernels(x: Tensor, cache: KVCache) -> bool:
    """Whether the GPU runs kernels: it need not have FP8 tensor cores unless the cache holds bytes."""
    return x.is_cuda and is_known_gpu(x.device, fp8=cache.key_scales is not None)


def _check_cache(name: str, cache: KVCache, like: Tensor) -> None:
    """Raise if tensors of a cache do not fit each other, or heads `[T, heads, D]` of the width that it should have."""
    keys, values, *scales = cache
    if keys.dim() != 4 or keys.shape != values.shape or keys.dtype != values.dtype or keys.shape[3] != like.shape[2]:
        raise ValueError(
            f"{name}: keys {tuple(keys.shape)} in {keys.dtype}, values {tuple(values.shape)} in {values.dtype}; both "
            f"are [places, positions, heads, {like.shape[2]}] in one dtype"
        )
    if (keys.dtype == torch.uint8) != all(scale is not None for scale in scales) or (scales[0] is None) != (
        scales[1] is None
    ):
        raise ValueError(f"{name}: {keys.dtype} with scales {[s is not None for s in scales]}; bytes have both scales")
    if any(s is not None and (s.shape != keys.shape[:3] or s.dtype != torch.float32) for s in scales):
        raise ValueError(f"{name}: scales are FP32 {tuple(keys.shape[:3])}, one for each token and head")


def _check_indices(length: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32 or len(tensor) != length:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}; give {length} of torch.int32")
