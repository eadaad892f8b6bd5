"""Keys and values into the cache of a decoder that generates: the kernels behind `numerics.decode.store`.

A program holds one head of a few tokens, in two halves as `kernels/rotary.py` does, with its norm and rotation where
qkv comes from the product that computes it; then q goes to a tensor of its own, k and v to their places in the cache.
For a cache of bytes, the program finds the scale of each of its tokens, since it holds the whole head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import finite, tiles
from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.norm import inverse_rms, weighted
from octavo.kernels.rotary import WIDEST, apart, can_rotate, load_halves, product_of
from octavo.kernels.tiles import round_to
from octavo.kernels.tuning import may_overlap, tuning_for
from octavo.numerics.decode import KVCache
from octavo.numerics.formats import E4M3
from octavo.numerics.rotary import Heads, Norms

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LAUNCHES = LaunchCache()


@triton.jit
def put(data_ptr, scales_ptr, row, c, a, b, kept, D: tl.constexpr, BYTES: tl.constexpr):
    """Write heads, halves `a` and `b[TILE, HALF]` in FP32 with zeros past D, to rows of D; a scale each for bytes."""
    inside = kept & (c < D // 2)
    where = row * D + c
    dtype: tl.constexpr = data_ptr.dtype.element_ty
    if BYTES:
        FORMAT: tl.constexpr = tiles.format_of(dtype)
        amax = tl.maximum(tl.max(finite.magnitude(a), axis=1), tl.max(finite.magnitude(b), axis=1))[:, None]
        scale = tiles.scale_from_amax(amax, FORMAT, 1.0)
        inverse = tiles.reciprocal(scale)
        tl.store(scales_ptr + row, scale, mask=kept)
        a = tiles.cast(tiles.saturate(tiles.scaled(a, inverse), 0, 0, FORMAT, False, False), dtype, tl.float32)
        b = tiles.cast(tiles.saturate(tiles.scaled(b, inverse), 0, 0, FORMAT, False, False), dtype, tl.float32)
    else:
        a, b = round_to(a, dtype), round_to(b, dtype)
    tl.store(data_ptr + where, a, mask=inside)
    tl.store(data_ptr + where + D // 2, b, mask=inside)


@triton.jit
def row_of(places_ptr, positions_ptr, t, T, P, G):
    """The first of G rows of a token in the cache, and whether it is to be written."""
    place = tl.load(places_ptr + t, mask=t < T, other=-1)
    position = tl.load(positions_ptr + t, mask=t < T, other=-1)
    return (place.to(tl.int64) * P + position) * G, (place >= 0) & (position >= 0) & (position < P)


@triton.jit
def store_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, places_ptr, positions_ptr, T, P, G,
    k_token, k_head, v_token, v_head,
    BYTES: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`k_token`, `k_head`, …: strides of what is stored."""
    tiles.follow(OVERLAPS)
    head = tl.program_id(0)
    t, c = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None], tl.arange(0, HALF)[None, :]
    row, kept = row_of(places_ptr, positions_ptr, t, T, P, G)
    inside = (t < T) & (c < D // 2)
    if head < G:
        a, b = load_halves(k_ptr + head * k_head, t.to(tl.int64) * k_token + c, inside, D)
        put(keys_ptr, key_scales_ptr, row + head, c, a, b, kept, D, BYTES)
    else:
        a, b = load_halves(v_ptr + (head - G) * v_head, t.to(tl.int64) * v_token + c, inside, D)
        put(values_ptr, value_scales_ptr, row + head - G, c, a, b, kept, D, BYTES)


@triton.jit
def rotary_and_store_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    places_ptr, positions_ptr, q_ptr, T, R, P, H, G, eps,
    BYTES: tl.constexpr, NORMED: tl.constexpr, SHIFTED: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tiles.follow(OVERLAPS)
    head = tl.program_id(0)
    t, c = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None], tl.arange(0, HALF)[None, :]
    inside = (t < T) & (c < D // 2)
    token = t.to(tl.int64)
    dtype = qkv_ptr.dtype.element_ty
    a, b = load_halves(qkv_ptr, (token * (H + 2 * G) + head) * D + c, inside, D)
    if head >= H + G:
        row, kept = row_of(places_ptr, positions_ptr, t, T, P, G)
        put(values_ptr, value_scales_ptr, row + head - H - G, c, a, b, kept, D, BYTES)
    else:
        if NORMED:
            if head < H:
                weight_ptr = q_weight_ptr
            else:
                weight_ptr = k_weight_ptr
            wa, wb = load_halves(weight_ptr, c, c < D // 2, D)
            inverse = inverse_rms(tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1), eps, D)[:, None]
            a = weighted(a, inverse, wa, SHIFTED, dtype).to(tl.float32)
            b = weighted(b, inverse, wb, SHIFTED, dtype).to(tl.float32)
        cos_a, cos_b = load_halves(cos_ptr, token % R * D + c, inside, D)
        sin_a, sin_b = load_halves(sin_ptr, token % R * D + c, inside, D)
        one = round_to(product_of(a, cos_a, dtype) + product_of(-b, sin_a, dtype), dtype)
        other = round_to(product_of(b, cos_b, dtype) + product_of(a, sin_b, dtype), dtype)
        if head < H:
            out = q_ptr + (token * H + head) * D + c
            tl.store(out, one, mask=inside)
            tl.store(out + D // 2, other, mask=inside)
        else:
            row, kept = row_of(places_ptr, positions_ptr, t, T, P, G)
            a, b = one.to(tl.float32), other.to(tl.float32)
            put(keys_ptr, key_scales_ptr, row + head - H, c, a, b, kept, D, BYTES)


def can_store(width: int, dtype: torch.dtype, cache: KVCache) -> bool:
    """Whether there is a kernel for heads of this width and dtype, and this cache."""
    return (
        dtype in DTYPES
        and cache.keys.dtype in (*DTYPES, torch.uint8)
        and all(x is None or x.is_contiguous() for x in cache)
        and width % 2 == 0
        and width <= WIDEST
    )


def can_rotate_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: Norms | None, cache: KVCache
) -> bool:
    """Whether there is a kernel for these tensors."""
    return can_rotate(qkv, cos, sin, heads, norms) and can_store(heads.width, qkv.dtype, cache)


def store(keys: Tensor, values: Tensor, cache: KVCache, places: Tensor, positions: Tensor) -> None:
    """The kernel of `numerics.decode.store`. Keys and values may have any strides but the last."""
    if not keys.numel():
        return
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    given = (keys, values, *tensors_of(cache), places.contiguous(), positions.contiguous())
    key = ("store", kind(*given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_store(keys, values, cache))
    launches.run(*given)


def _build_store(keys: Tensor, values: Tensor, cache: KVCache) -> Launches:
    tokens, g, d = keys.shape
    launches = Launches(given=8, overlaps=may_overlap(keys.device), follows=True)
    tile, constants = _tile(d, cache, keys.device)
    strides = (keys.stride(0), keys.stride(1), values.stride(0), values.stride(1))
    grid = (2 * g, -(-tokens // tile))
    launches.launch(store_kernel, grid, range(8), (tokens, cache.keys.shape[1], g, *strides), constants)
    return launches


def rotary_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: Norms | None, cache: KVCache, places: Tensor,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    """The kernel of `numerics.decode.rotary_and_store`."""
    weights = (qkv, qkv) if norms is None else (norms[0].weight, norms[1].weight)
    given = (qkv, cos, sin, *weights, *tensors_of(cache), places.contiguous(), positions.contiguous())
    key = (heads, None if norms is None else norms[0][1:], kind(*given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_rotary(qkv, cos, heads, norms, cache))
    return launches.run(*given)[0]


def _build_rotary(qkv: Tensor, cos: Tensor, heads: Heads, norms: Norms | None, cache: KVCache) -> Launches:
    tokens, (h, g, d) = qkv.shape[0], heads
    launches = Launches(given=11, overlaps=may_overlap(qkv.device), follows=True)
    q = launches.make((tokens, h, d), qkv.dtype)
    tile, constants = _tile(d, cache, qkv.device)
    constants |= {"NORMED": norms is not None, "SHIFTED": norms is not None and norms[0].shifted} | apart(qkv.dtype)
    eps = 0.0 if norms is None else float(norms[0].eps)
    grid = (h + 2 * g, -(-tokens // tile))
    numbers = (tokens, cos.shape[0], cache.keys.shape[1], h, g, eps)
    launches.launch(rotary_and_store_kernel, grid, (*range(11), q), numbers, constants)
    launches.results = (q,)
    return launches


def tensors_of(cache: KVCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A cache as kernels take it: bytes as E4M3, and where there are no scales something in their place."""
    if cache.key_scales is None or cache.value_scales is None:
        return cache.keys, cache.values, cache.keys, cache.values
    return cache.keys.view(E4M3.dtype), cache.values.view(E4M3.dtype), cache.key_scales, cache.value_scales


def _tile(width: int, cache: KVCache, device: torch.device) -> tuple[int, dict[str, Any]]:
    """Tokens of a program, and what a kernel knows when it is compiled."""
    elements, warps = tuning_for(device).decode_store
    half = triton.next_power_of_2(width // 2)
    tile = max(1, elements // (2 * half))
    constants = {"BYTES": cache.key_scales is not None, "D": width, "HALF": half, "TILE": tile, "num_warps": warps}
    return tile, constants
