"""Attention of one token for each slot over its group's prompt and its own tokens: the kernels of `numerics.decode`.

Reading keys and values once is all the time there is. A program takes one head of k and v and the H / G heads of q that
use it, as rows of one small product; it walks over a part of the keys with a running softmax (`attend`) and writes its
output in FP32 with its log-sum-exp. A second launch merges the parts, always in the same order.

    slots       one program for each slot, head of k, and part of what the slot sees
    groups      with a table of the slots of each group: one for each group, head of k, and part of the prompt, whose
                rows are the heads of all its slots, so that a prompt is read once; slots then see to their own tokens
    whole       where each slot is one part: its program writes the result, and there is nothing to merge

Lengths are on the device, and a grid must not depend on them: it has so many programs for each slot, which share what
there is to read (`share`). Those with nothing to do say so in their log-sum-exp. Scores are in powers of two.

For bytes, products take E4M3 as it is, in FP16 (`decode_bytes.py`).
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.decode_bytes import in_half, of_pairs
from octavo.kernels.decode_store import DTYPES, tensors_of
from octavo.kernels.decode_tiles import fitting, most_rows, parts_of, tile_for, widened
from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.tiles import round_to
from octavo.kernels.tuning import DecodeTile, may_overlap, tuning_for
from octavo.numerics.decode import KVCache

WIDEST = 256  # of a head
MOST_ROWS = 64  # heads of q for one of k
LOG2E = math.log2(math.e)
_LAUNCHES = LaunchCache()


@triton.jit
def share(start, stop, part, parts, least, KEYS: tl.constexpr):
    """First and last of one of `parts` parts of start…stop: whole tiles, no part smaller than `least`."""
    size = tl.maximum(tl.cdiv(tl.cdiv(stop - start, parts), KEYS) * KEYS, least)
    first = start + part * size
    return first, tl.minimum(first + size, stop)


@triton.jit
def product(a, b):
    """a · b in FP32; without the tensor cores' TF32 where both are FP32."""
    if tiles.INTERPRETED:  # whose own product of BF16 is not one
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def attend(
    acc, odd, top, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, start, stop, lowest, scaling, softcap, G,
    BYTES: tl.constexpr, CAPPED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add keys start…stop of one place and head to a running softmax; row i sees those from `lowest[i]` on.

    `scaling`, of each row, makes scores in powers of two of products, or, `CAPPED`, what tanh(x) = 2 sigmoid(2 x) − 1
    takes; then `softcap` does.
    `top`: the largest score so far, for bytes that of score · value scale; `total`: the sum of exp2(score − top);
    `acc`: that of the values times these, or for pairs of bytes (`odd`), of those in even columns.
    """
    c, half = tl.arange(0, WIDTH), tl.arange(0, WIDTH // 2)
    PAIRED: tl.constexpr = BYTES and q.dtype != tl.float32
    for first in range(start, stop, KEYS):
        j = first + tl.arange(0, KEYS)
        inside = j < stop
        k = tl.load(k_ptr + j[None, :] * (G * D) + c[:, None], mask=inside[None, :] & (c < D)[:, None], other=0.0)
        if PAIRED:
            words_ptr = v_ptr.to(tl.pointer_type(tl.int16)) + j[:, None] * (G * D // 2) + half[None, :]
            v = tl.load(words_ptr, mask=inside[:, None] & (half < D // 2)[None, :], other=0)
        else:
            v = tl.load(v_ptr + j[:, None] * (G * D) + c[None, :], mask=inside[:, None] & (c < D)[None, :], other=0.0)
        s = product(q, k.to(q.dtype))
        if BYTES:
            s *= tl.load(k_scale_ptr + j * G, mask=inside, other=0.0)[None, :]
        s *= scaling[:, None]
        if CAPPED:
            s = softcap * (2.0 * tiles.sigmoid(s) - 1.0)
        s = tl.where(inside[None, :] & (j[None, :] >= lowest[:, None]), s, float("-inf"))
        if BYTES:
            weight = tl.load(v_scale_ptr + j * G, mask=inside, other=0.0)
            # Below 2^-90 of no matter: sums of exp2(score − top) stay within FP32.
            higher = tl.maximum(top, tl.max(s + (tiles.log2(tl.maximum(weight, 2.0**-90)) - 14.0)[None, :], axis=1))
        else:
            higher = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p, fade = tiles.exp2(s - base[:, None]), tiles.exp2(top - base)
        total = total * fade + tl.sum(p, axis=1)
        if BYTES:
            p *= weight[None, :]
        p = round_to(p, q.dtype)
        if PAIRED:
            even_v, odd_v = of_pairs(v)
            acc = acc * fade[:, None] + product(p, even_v)
            odd = odd * fade[:, None] + product(p, odd_v)
        else:
            acc = acc * fade[:, None] + product(p, v.to(q.dtype))
        top = higher
    return acc, odd, top, total


@triton.jit
def load_q(q_ptr, row, inside, scaling, BYTES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of q in the dtype of products, and what makes scores of them, for each row."""
    c = tl.arange(0, WIDTH)[None, :]
    q = tl.load(q_ptr + row[:, None] * D + c, mask=inside[:, None] & (c < D), other=0.0)
    each = tl.full([row.shape[0]], 1.0, tl.float32) * scaling
    if BYTES and q.dtype == tl.bfloat16:
        return in_half(q, each)
    else:  # noqa: RET505 - for Triton both would be compiled
        return q, each


@triton.jit
def new_sums(ROWS: tl.constexpr, WIDTH: tl.constexpr, PAIRED: tl.constexpr):
    """A running softmax that has seen nothing; see `attend`."""
    ACROSS: tl.constexpr = WIDTH // 2 if PAIRED else WIDTH
    acc, odd = tl.zeros([ROWS, ACROSS], tl.float32), tl.zeros([ROWS, ACROSS], tl.float32)
    return acc, odd, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def divided(acc, odd, total, PAIRED: tl.constexpr):
    """Output of a running softmax, and zeros where it saw nothing."""
    if PAIRED:
        acc = tl.interleave(acc, odd)
    return acc / tl.where(total != 0.0, total, 1.0)[:, None]


@triton.jit
def write_part(
    parts_ptr, lse_ptr, row, part, out, top, total, wanted, parts, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write the output and log-sum-exp of one part; rows that saw nothing have −∞."""
    c = tl.arange(0, WIDTH)[None, :]
    seen = total != 0.0
    lse = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + row * parts + part, lse, mask=wanted)
    tl.store(parts_ptr + (row * parts + part).to(tl.int64)[:, None] * D + c, out, mask=wanted[:, None] & (c < D))


@triton.jit
def attend_for_group(
    pid, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, prefix_lengths_ptr, suffix_lengths_ptr, slots_ptr, parts_ptr,
    lse_ptr, P, H, G, N, prefix_parts, parts, least, window, scaling, softcap, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, BYTES: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A part of a prompt, for slots of its group: as many as have room in `ROWS`."""
    head, rest = pid % G, pid // G
    blocks = tl.cdiv(N * R, ROWS)
    part, rest = rest % prefix_parts, rest // prefix_parts
    block, group = rest % blocks, rest // blocks
    length = tl.load(prefix_lengths_ptr + group)
    r = block * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + group * N + r // R, mask=r < N * R, other=-1)
    own = tl.load(suffix_lengths_ptr + slot, mask=slot >= 0, other=0)
    wanted = own > 0
    lowest = tl.zeros([ROWS], tl.int32)
    if WINDOWED:
        lowest = tl.maximum(length + own - window, 0)
    start = tl.min(tl.where(wanted, tl.minimum(lowest, length), length), axis=0)
    first, last = share(start, length, part, prefix_parts, least, KEYS)
    row = slot * H + head * R + r % R
    q, scaling = load_q(q_ptr, row, slot >= 0, scaling, BYTES, D, WIDTH)
    PAIRED: tl.constexpr = BYTES and q.dtype != tl.float32
    acc, odd, top, total = new_sums(ROWS, WIDTH, PAIRED)
    place = group.to(tl.int64) * P * G + head
    acc, odd, top, total = attend(
        acc, odd, top, total, q, k_ptr + place * D, v_ptr + place * D, k_scale_ptr + place, v_scale_ptr + place, first,
        last, lowest, scaling, softcap, G, BYTES, CAPPED, D, WIDTH, KEYS,
    )  # fmt: skip
    out = divided(acc, odd, total, PAIRED)
    write_part(parts_ptr, lse_ptr, row, part, out, top, total, wanted, parts, D, WIDTH)


@triton.jit(do_not_specialize=["N", "shared", "prefix_parts", "suffix_parts", "least", "window"])
def decode_kernel(
    q_ptr, prefix_k_ptr, prefix_v_ptr, prefix_ks_ptr, prefix_vs_ptr, prefix_lengths_ptr, group_of_ptr, suffix_k_ptr,
    suffix_v_ptr, suffix_ks_ptr, suffix_vs_ptr, suffix_lengths_ptr, slots_ptr, parts_ptr, lse_ptr,
    PREFIX_P, SUFFIX_P, H, G, N, shared, prefix_parts, suffix_parts, least, window, scaling, softcap,
    WHOLE: tl.constexpr, SHARED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, BYTES: tl.constexpr,
    R: tl.constexpr, ROWS: tl.constexpr, SHARED_ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`N`: slots in the table of a group. `shared`: so many programs, the first ones, are for groups."""
    tiles.follow(OVERLAPS)
    pid = tl.program_id(0)
    if SHARED:
        if pid < shared:
            attend_for_group(
                pid, q_ptr, prefix_k_ptr, prefix_v_ptr, prefix_ks_ptr, prefix_vs_ptr, prefix_lengths_ptr,
                suffix_lengths_ptr, slots_ptr, parts_ptr, lse_ptr, PREFIX_P, H, G, N, prefix_parts,
                prefix_parts + suffix_parts, least, window, scaling, softcap, WINDOWED, CAPPED, BYTES, R, SHARED_ROWS,
                D, WIDTH, KEYS,
            )  # fmt: skip
            return
    head, rest = (pid - shared) % G, (pid - shared) // G
    part, slot = rest % suffix_parts, rest // suffix_parts
    own = tl.load(suffix_lengths_ptr + slot)
    r, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    row = slot * H + head * R + r
    # Before lengths are here, and of empty slots, too: then there are no keys.
    q, scaling = load_q(q_ptr, row, r < R, scaling, BYTES, D, WIDTH)
    length = 0  # of the prompt, as far as this program is concerned
    if not SHARED:
        group = tl.load(group_of_ptr + slot)
        length = tl.load(prefix_lengths_ptr + group, mask=group >= 0, other=0)
    wanted = (r < R) & (own > 0)
    start = 0
    if WINDOWED:
        start = tl.maximum(length + own - window, 0)
    first, last = share(start, tl.where(own > 0, length + own, start), part, suffix_parts, least, KEYS)
    PAIRED: tl.constexpr = BYTES and q.dtype != tl.float32
    acc, odd, top, total = new_sums(ROWS, WIDTH, PAIRED)
    every = tl.zeros([ROWS], tl.int32)  # what the window hides is before `first`
    if not SHARED:
        place = group.to(tl.int64) * PREFIX_P * G + head
        acc, odd, top, total = attend(
            acc, odd, top, total, q, prefix_k_ptr + place * D, prefix_v_ptr + place * D, prefix_ks_ptr + place,
            prefix_vs_ptr + place, first, tl.minimum(last, length), every, scaling, softcap, G, BYTES, CAPPED, D,
            WIDTH, KEYS,
        )  # fmt: skip
    place = slot.to(tl.int64) * SUFFIX_P * G + head
    acc, odd, top, total = attend(
        acc, odd, top, total, q, suffix_k_ptr + place * D, suffix_v_ptr + place * D, suffix_ks_ptr + place,
        suffix_vs_ptr + place, tl.maximum(first - length, 0), last - length, every, scaling, softcap, G, BYTES, CAPPED,
        D, WIDTH, KEYS,
    )  # fmt: skip
    out = divided(acc, odd, total, PAIRED)
    if WHOLE:
        out = round_to(out, parts_ptr.dtype.element_ty)
        tl.store(parts_ptr + row[:, None] * D + c, out, mask=(r < R)[:, None] & (c < D))
    else:
        parts = prefix_parts + suffix_parts
        write_part(parts_ptr, lse_ptr, row, prefix_parts + part, out, top, total, wanted, parts, D, WIDTH)


@triton.jit
def merge_kernel(
    parts_ptr, lse_ptr, group_of_ptr, suffix_lengths_ptr, out_ptr, H,
    PREFIX_PARTS: tl.constexpr, PARTS: tl.constexpr, MANY: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row, of a slot and a head: Σ output · exp(lse) / Σ exp(lse)."""
    tiles.follow(OVERLAPS)
    row = tl.program_id(0)
    slot = row // H
    i, c = tl.arange(0, MANY), tl.arange(0, WIDTH)
    lse = tl.load(lse_ptr + row * PARTS + i, mask=i < PARTS, other=float("-inf"))
    where = (row * PARTS + i).to(tl.int64)[:, None] * D + c[None, :]
    part = tl.load(parts_ptr + where, mask=(i < PARTS)[:, None] & (c < D)[None, :], other=0.0)
    own = tl.load(suffix_lengths_ptr + slot)
    present = own > 0
    if PREFIX_PARTS > 0:
        # Nobody writes the parts of a prompt that is not there.
        present = present & ((i >= PREFIX_PARTS) | (tl.load(group_of_ptr + slot) >= 0))
    lse = tl.where(present, lse, float("-inf"))
    top = tl.max(lse, axis=0)
    weight = tiles.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    # Where nothing was seen, whatever memory holds.
    part = tl.where((lse == float("-inf"))[:, None], 0.0, part * weight[:, None])
    out = tl.sum(part, axis=0) / tl.where(own > 0, tl.sum(weight, axis=0), 1.0)
    tl.store(out_ptr + row.to(tl.int64) * D + c, round_to(out, out_ptr.dtype.element_ty), mask=c < D)


def can_decode(q: Tensor, prefix: KVCache, suffix: KVCache) -> bool:
    """Whether there is a kernel for these tensors."""
    caches, as_bytes = (prefix, suffix), suffix.key_scales is not None
    return (
        q.dtype in DTYPES
        and q.numel() > 0
        and q.shape[2] <= WIDEST
        and (q.shape[2] % 2 == 0 or not as_bytes)
        and q.shape[1] // suffix.keys.shape[2] <= MOST_ROWS
        and all(cache.keys.dtype in (q.dtype, torch.uint8) for cache in caches)
        and all(x is None or x.is_contiguous() for cache in caches for x in cache)
        and fitting(tile_for(1, 1, as_bytes=as_bytes, device=q.device), q, MOST_ROWS, as_bytes=as_bytes) is not None
    )


class _How(NamedTuple):
    """All that launches depend on beside the tensors."""

    scaling: float
    window: int | None
    softcap: float | None
    tile: DecodeTile


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
    tile: DecodeTile | None = None,
) -> Tensor:
    """The kernel of `numerics.decode.decode_attention`. `tile`: to be used instead of the measured one."""
    q = q.contiguous()
    tile = tile or tile_for(len(q), suffix.keys.shape[2], as_bytes=suffix.key_scales is not None, device=q.device)
    how = _How(scaling, window, softcap, tile)
    if slots_of_group is not None and slots_of_group.shape[1] < 2:
        slots_of_group = None  # each prompt has one slot, which reads it as well
    given = (
        q, *tensors_of(prefix), prefix_lengths, group_of, *tensors_of(suffix), suffix_lengths,
        *(() if slots_of_group is None else (slots_of_group,)),
    )  # fmt: skip
    key = (how, kind(*given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(q, prefix, suffix, slots_of_group, how))
    return launches.run(*given)[0]


def _build(q: Tensor, prefix: KVCache, suffix: KVCache, slots_of_group: Tensor | None, how: _How) -> Launches:
    (slots, h, d), g = q.shape, suffix.keys.shape[2]
    per_head, shared = h // g, slots_of_group is not None
    lengths = prefix.keys.shape[1], suffix.keys.shape[1]
    own_rows = max(16, triton.next_power_of_2(per_head))
    n = 0 if slots_of_group is None else slots_of_group.shape[1]
    rows = min(most_rows(q.dtype), how.tile.rows, max(16, triton.next_power_of_2(n * per_head)))
    as_bytes = suffix.key_scales is not None
    tile = fitting(how.tile, q, max(rows, own_rows), as_bytes=as_bytes)
    if tile is None:
        raise ValueError(f"{how.tile}: in no form fits the shared memory, with heads of {d} in {q.dtype}")
    parts = parts_of(slots, g, lengths[1] if shared else sum(lengths), tile, q.device)
    blocks = prefix_parts = 0
    if slots_of_group is not None:
        blocks = len(slots_of_group) * -(-n * per_head // rows)
        prefix_parts = parts_of(blocks, g, lengths[0], tile, q.device)
    whole = parts == 1 and not shared
    launches = Launches(given=12 + shared, overlaps=may_overlap(q.device), follows=True)
    out = launches.make((slots, h, d), q.dtype)
    every = prefix_parts + parts
    apart = out if whole else launches.make((slots * h, every, d), torch.float32)
    lse = out if whole else launches.make((slots * h, every), torch.float32)
    constants: dict[str, Any] = {
        "WHOLE": whole, "SHARED": shared, "WINDOWED": how.window is not None, "CAPPED": how.softcap is not None,
        "BYTES": as_bytes, "R": per_head, "ROWS": own_rows,
        "SHARED_ROWS": rows, "D": d, "WIDTH": widened(d), "KEYS": tile.keys,
        "num_warps": tile.warps, "num_stages": tile.stages,
    } | ({"maxnreg": tile.registers} if tile.registers else {})  # fmt: skip
    for_groups = blocks * g * prefix_parts
    scaling = how.scaling * LOG2E if how.softcap is None else 2.0 * how.scaling / how.softcap
    cap = (how.softcap or 1.0) * LOG2E
    numbers = (*lengths, h, g, n, for_groups, prefix_parts, parts, tile.least, how.window or 0, scaling, cap)
    tensors = (*range(12), 12 if shared else 0, apart, lse)
    launches.launch(decode_kernel, (for_groups + slots * g * parts,), tensors, numbers, constants)
    if not whole:
        merging = {"PREFIX_PARTS": prefix_parts, "PARTS": every, "MANY": triton.next_power_of_2(every), "D": d,
                   "WIDTH": constants["WIDTH"], "num_warps": tuning_for(q.device).decode_merge_warps}  # fmt: skip
        launches.launch(merge_kernel, (slots * h,), (apart, lse, 6, 11, out), (h,), merging)
    launches.results = (out,)
    return launches
