"""Bookkeeping of slots before and after a step, a launch each: the kernels behind `numerics.slots`.

As operations of torch it is 28 launches of a microsecond or two. Flags are bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.tuning import may_overlap

TILE = 128  # slots of a program
_LAUNCHES = LaunchCache()


@triton.jit
def begin_step_kernel(
    active_ptr, lengths_ptr, group_of_ptr, prefix_lengths_ptr, positions_ptr, places_ptr, where_ptr, seen_ptr, T,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tiles.follow(OVERLAPS)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = t < T
    active = tl.load(active_ptr + t, mask=inside, other=0) != 0
    length = tl.load(lengths_ptr + t, mask=inside, other=0)
    group = tl.maximum(tl.load(group_of_ptr + t, mask=inside, other=0), 0)
    before = tl.load(prefix_lengths_ptr + group, mask=inside, other=0)
    tl.store(positions_ptr + t, tl.where(active, before + length, 0).to(tl.int64), mask=inside)
    tl.store(places_ptr + t, tl.where(active, t, -1), mask=inside)
    tl.store(where_ptr + t, length, mask=inside)
    tl.store(seen_ptr + t, tl.where(active, length + 1, 0), mask=inside)


@triton.jit
def end_step_kernel(
    tokens_ptr, logprobs_ptr, newest_ptr, lengths_ptr, active_ptr, token_ptr, logprob_ptr, stops_ptr, limits_ptr,
    T, L, V, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tiles.follow(OVERLAPS)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = t < T
    active = tl.load(active_ptr + t, mask=inside, other=0) != 0
    length = tl.load(lengths_ptr + t, mask=inside, other=0)
    token = tl.load(token_ptr + t, mask=inside, other=0)
    logprob = tl.load(logprob_ptr + t, mask=inside, other=0.0)
    limit = tl.load(limits_ptr + t, mask=inside, other=0)
    stop = tl.load(stops_ptr + token, mask=active & (token >= 0) & (token < V), other=0) != 0
    where = t.to(tl.int64) * L + tl.minimum(length + 1, L - 1)
    tl.store(tokens_ptr + where, token, mask=active)
    tl.store(logprobs_ptr + where, logprob, mask=active)
    tl.store(newest_ptr + t, token, mask=active)
    length += tl.where(active, 1, 0)
    tl.store(lengths_ptr + t, length, mask=inside)
    goes_on = active & (stop == 0) & (length + 1 < limit)
    tl.store(active_ptr + t, tl.where(goes_on, 1, 0).to(tl.uint8), mask=inside)


def begin_step(
    active: Tensor, lengths: Tensor, group_of: Tensor, prefix_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `numerics.slots.begin_step`."""
    given = (active.view(torch.uint8), lengths, group_of, prefix_lengths)
    key = ("begin", kind(*given))
    launches = _LAUNCHES.get(key)
    if launches is None:
        slots = len(active)
        launches = _LAUNCHES.add(key, Launches(given=4, overlaps=may_overlap(active.device), follows=True))
        dtypes = (torch.int64, torch.int32, torch.int32, torch.int32)
        launches.results = tuple(launches.make((slots,), dtype) for dtype in dtypes)
        launches.launch(
            begin_step_kernel, (-(-slots // TILE),), (*range(4), *launches.results), (slots,),
            {"TILE": TILE, "num_warps": 4},
        )  # fmt: skip
    positions, places, where, seen = launches.run(*given)
    return positions, places, where, seen


def end_step_(
    tokens: Tensor,
    logprobs: Tensor,
    newest: Tensor,
    lengths: Tensor,
    active: Tensor,
    token: Tensor,
    logprob: Tensor,
    stops: Tensor,
    limits: Tensor,
) -> None:
    """The kernel of `numerics.slots.end_step_`. A token outside of `stops` is no stop."""
    flags = (active.view(torch.uint8), stops.view(torch.uint8))
    given = (tokens, logprobs, newest, lengths, flags[0], token, logprob, flags[1], limits)
    key = ("end", kind(*given))
    launches = _LAUNCHES.get(key)
    if launches is None:
        slots, length = tokens.shape
        launches = _LAUNCHES.add(key, Launches(given=9, overlaps=may_overlap(active.device), follows=True))
        numbers = (slots, length, len(stops))
        launches.launch(end_step_kernel, (-(-slots // TILE),), range(9), numbers, {"TILE": TILE, "num_warps": 4})
    launches.run(*given)
