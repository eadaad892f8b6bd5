"""A token for each row of logits, and its log-probability: the kernels behind `numerics.sampling`.

    parts   one program for each row and part of the vocabulary: largest logit, sum of exponentials, best token
    merge   one program for each row: of all its parts

A thread reads four neighbours at a time, which take the four words of one counter. It keeps figures of its own, and
threads meet once, at the end. Logits are read once, and noise never leaves registers. Scores are in powers of two:
z · log₂e / T.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import may_overlap, tuning_for
from octavo.numerics import sampling as spec

_ROUNDS = tl.constexpr(spec.ROUNDS)
_SMALL = tl.constexpr(spec.SMALL)
_LARGEST = tl.constexpr(spec.LARGEST)
_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2.0))
_FLOOR = tl.constexpr(-1e30)  # finite, so that no infinity meets another
_NO_TOKEN = tl.constexpr(2**31 - 1)
MOST_PARTS = 256
_LAUNCHES = LaunchCache()


@triton.jit
def log2_of_noise(bits):
    """log₂ of E, of 32 random bits each, but for a constant: that of −log₂(1 − u) instead of −log(1 − u)."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST)
    return tiles.log2(tl.where(u < _SMALL, u * (1.0 + 0.5 * u) * _LOG2E, -tiles.log2(1.0 - u)))


@triton.jit
def noise_of(seed, row, counter):
    """log₂ of E for columns 4 · counter to 4 · counter + 3 of a row, `[LANES, 4]`."""
    zero = counter * 0
    a, b, c, d = tl.philox(seed, counter, zero + row, zero, zero, _ROUNDS)
    return log2_of_noise(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [counter.shape[0], 4]))


@triton.jit
def parts_kernel(
    logits_ptr, temperature_ptr, seed_ptr, figures_ptr, tokens_ptr, V, stride, parts, walk, GREEDY: tl.constexpr,
    LANES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`walk`: columns of a part, in whole tiles."""
    tiles.follow(OVERLAPS)
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    lane = tl.arange(0, LANES)
    column = lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    factor = tl.full([], _LOG2E, tl.float32)
    if not GREEDY:
        factor = tl.div_rn(factor, tl.load(temperature_ptr))
        seed = tl.load(seed_ptr)
    logits_ptr += row.to(tl.int64) * stride
    top = tl.full([LANES], _FLOOR, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES, 4], float("-inf"), tl.float32)
    tile = tl.zeros([LANES, 4], tl.int32) + part * walk  # where the best of a column of tiles was found
    for start in range(part * walk, tl.minimum(part * walk + walk, V), LANES * 4):
        z = tl.load(logits_ptr + start + column, mask=start + column < V, other=float("-inf"))
        s = z * factor
        higher = tl.maximum(top, tl.max(s, axis=1))
        total = total * tiles.exp2(top - higher) + tl.sum(tiles.exp2(s - higher[:, None]), axis=1)
        top = higher
        if GREEDY:
            score = z
        else:
            score = s - noise_of(seed, row, start // 4 + lane)
        found = score > best  # NaN never is; the first of equal ones stays
        best, tile = tl.where(found, score, best), tl.where(found, start, tile)
    peak = tl.max(top, axis=0)
    total = tl.sum(total * tiles.exp2(top - peak), axis=0)
    most = tl.max(tl.max(best, axis=1), axis=0)
    token = tl.min(tl.min(tl.where(best == most, tile + column, _NO_TOKEN), axis=1), axis=0)
    where = tl.program_id(0)
    tl.store(figures_ptr + where * 3, peak)
    tl.store(figures_ptr + where * 3 + 1, total)
    tl.store(figures_ptr + where * 3 + 2, most)
    tl.store(tokens_ptr + where, token)


@triton.jit
def choose_kernel(
    logits_ptr, temperature_ptr, figures_ptr, tokens_ptr, token_ptr, logprob_ptr, V, stride, PARTS: tl.constexpr,
    MANY: tl.constexpr, GREEDY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: the best of its parts, and log₂ p = z · log₂e / T − log₂ of the sum of all."""
    tiles.follow(OVERLAPS)
    row = tl.program_id(0)
    i = tl.arange(0, MANY)
    inside, where = i < PARTS, (row * PARTS + i) * 3
    top = tl.load(figures_ptr + where, mask=inside, other=_FLOOR)
    total = tl.load(figures_ptr + where + 1, mask=inside, other=0.0)
    best = tl.load(figures_ptr + where + 2, mask=inside, other=float("-inf"))
    tokens = tl.load(tokens_ptr + row * PARTS + i, mask=inside, other=_NO_TOKEN)
    factor = tl.full([], _LOG2E, tl.float32)
    if not GREEDY:
        factor = tl.div_rn(factor, tl.load(temperature_ptr))
    peak = tl.max(top, axis=0)
    sum = tl.sum(total * tiles.exp2(top - peak), axis=0)
    token = tl.min(tl.where(best == tl.max(best, axis=0), tokens, _NO_TOKEN), axis=0)
    token = tl.minimum(token, V - 1)
    score = tl.load(logits_ptr + row.to(tl.int64) * stride + token) * factor
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, (score - peak - tl.log2(sum)) * _LN2)


def can_sample(logits: Tensor) -> bool:
    """Whether there is a kernel for these logits."""
    return logits.dtype == torch.float32 and logits.numel() > 0 and logits.stride(1) == 1


def sample(logits: Tensor, temperature: Tensor, seed: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """The kernel of `numerics.sampling.sample`."""
    given = (logits, temperature, seed)
    key = (greedy, kind(*given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(logits, greedy))
    token, logprob = launches.run(*given)
    return token, logprob


def _build(logits: Tensor, greedy: bool) -> Launches:
    rows, v = logits.shape
    tile = tuning_for(logits.device).sampling
    columns = 4 * tile.lanes
    walks = -(-v // columns)
    enough = -(-tile.programs * multiprocessors(logits.device) // rows)
    per_part = -(-walks // max(1, min(enough, walks, MOST_PARTS)))
    parts = -(-walks // per_part)
    launches = Launches(given=3, overlaps=may_overlap(logits.device), follows=True)
    figures = launches.make((rows, parts, 3), torch.float32)
    tokens = launches.make((rows, parts), torch.int32)
    token, logprob = launches.make((rows,), torch.int64), launches.make((rows,), torch.float32)
    shape = (v, logits.stride(0))
    constants = {"GREEDY": greedy, "LANES": tile.lanes, "num_warps": tile.warps}
    numbers = (*shape, parts, per_part * columns)
    launches.launch(parts_kernel, (rows * parts,), (0, 1, 2, figures, tokens), numbers, constants)
    merging = {"PARTS": parts, "MANY": triton.next_power_of_2(parts), "GREEDY": greedy, "num_warps": 1}
    launches.launch(choose_kernel, (rows,), (0, 1, figures, tokens, token, logprob), shape, merging)
    launches.results = (token, logprob)
    return launches
