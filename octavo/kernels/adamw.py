"""AdamW's step for one parameter in one pass, with its two means in 4 bits, 8 bits, FP8 or plain: `numerics/adamw.py`.

    p, g, both means  →  FP32  →  p rounded (at random, if wanted), both means in their blocks again

Formats are torchao's (`OptimState4bit` and its like). Its own step, compiled, keeps FP32 copies of whole tensors
between its kernels: for the head of an 8B ten GiB, at the moment when all activations are there, and it takes
several times as long as this kernel (docs/LOG.md).

Codes stand for levels in tables, but no table is read: that would be done by other threads than those that have the
numbers. Of 8 bits, torchao's `create_dynamic_map` has the levels of decade j, from 10^(j−D−1) to 10^(j−D), in the
middle of 2^j equal cells, D = 6 with a sign, 7 without; also 0 and 1. So cell c of decade j is the (2^j + c)-th, and j
and c are the exponent and the fraction of that number. Nearest is the middle of one's own cell, but for the lowest
fifth of a decade's first cell: there the last level of the decade below is nearer. 4 bits are cubes of sevenths with
a sign, and powers of two without, rounded at random.

With `low`, p is the upper half of an FP32 master (`numerics/split.py`), and both halves are stepped together.

A non-finite gradient spoils its own weight, and leaves 0 in its states.
"""

import math
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.split import join_bits as join
from octavo.kernels.split import split_bits as split
from octavo.kernels.tiles import (
    INFINITY_BITS,
    INTERPRETED,
    cast,
    divide,
    exp2,
    inverse,
    log2,
    magnitude_bits,
    reciprocal,
    root,
    round_to,
)
from octavo.kernels.tuning import is_known_gpu, tuning_for
from octavo.numerics import adamw as spec
from octavo.numerics.formats import E4M3

PLAIN, BITS_8, BITS_4, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_KINDS = {"OptimState8bit": BITS_8, "OptimState4bit": BITS_4, "OptimStateFp8": FP8}
_GOLDEN = tl.constexpr(spec.GOLDEN)
_E4M3_MAX = tl.constexpr(E4M3.max)
_LOG2_10, _LOG2_9 = tl.constexpr(3.3219280948873623), tl.constexpr(3.1699250014423122)
_PLAIN_BLOCK = 256
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["phase", "phase_of_p", "first"])
def adamw_kernel(
    p_ptr, low_ptr, g_ptr, mean_ptr, mean_scale_ptr, square_ptr, square_scale_ptr, n, rate, decay, weight_1, weight_2,
    root_correction, eps, bound, phase, phase_of_p, first, SPLIT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BOUNDED: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`rate`: with the mean's correction; `decay`: what is left of p; `weight_1`, `_2`: of the new in the means.

    `first`: index of the first element in the whole parameter, of which p may be a shard. `SPLIT`: p and low are the
    halves of an FP32 number, as 16 bits.
    """
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    where = row[:, None] * BLOCK + column[None, :]
    inside = where < n
    p, g = _load(p_ptr + where, inside, EVEN), _load(g_ptr + where, inside, EVEN).to(tl.float32)
    p = join(p, _load(low_ptr + where, inside, EVEN)) if SPLIT else p.to(tl.float32)
    mean = _read(mean_ptr, mean_scale_ptr, row, where, inside, n, True, KIND, BLOCK, EVEN)
    square = _read(square_ptr, square_scale_ptr, row, where, inside, n, False, KIND, BLOCK, EVEN)
    mean += (g - mean) * weight_1
    square += (g * g - square) * weight_2
    size = root(square)
    moved = tl.minimum(tl.maximum(mean, -size * bound), size * bound) if BOUNDED else mean
    p = p * decay - rate * moved * inverse(size * root_correction + eps)
    start = _start(where, first)
    noise = start + phase.to(tl.uint32, bitcast=True)
    _write(mean, noise, mean_ptr, mean_scale_ptr, row, where, inside, n, True, KIND, BLOCK, EVEN)
    _write(square, noise, square_ptr, square_scale_ptr, row, where, inside, n, False, KIND, BLOCK, EVEN)
    if SPLIT:
        bits = split(p)
        _store(low_ptr + where, bits.to(tl.int16), inside, EVEN)
        rounded = (bits >> 16).to(tl.int16)
    elif STOCHASTIC:
        rounded = _to_bf16_at_random(p, ((start * _GOLDEN) >> 16) + phase_of_p.to(tl.uint32, bitcast=True))
    else:
        rounded = round_to(p, p_ptr.dtype.element_ty)
    _store(p_ptr + where, rounded, inside, EVEN)


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _store(pointers, values, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=inside)


@triton.jit
def _read(
    state_ptr, scale_ptr, row, where, inside, n, SIGNED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    if KIND == BITS_4:
        pair = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        codes = _load(state_ptr + pair, pair * 2 < n, EVEN).to(tl.int32)
        codes = tl.reshape(tl.join(codes >> 4, codes & 15), where.shape)
    else:
        codes = _load(state_ptr + where, inside, EVEN)
    if KIND == BITS_4 and SIGNED:
        # 2²³ + code as FP32. Converted, the 7 would be taken off in pairs of 16 bits: see `_write`.
        k = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 7.0)
        x = k * k * k * (1 / 343)
    elif KIND == BITS_4:
        x = ((codes << 23) + (112 << 23)).to(tl.float32, bitcast=True)
    else:
        x = codes.to(tl.float32)
    if KIND == BITS_8:
        x = _level(x - 127, 6) if SIGNED else _level(x + 1, 7)
    if KIND != PLAIN:
        x *= _load(scale_ptr + row, row * BLOCK < n, EVEN)[:, None]
    return x


@triton.jit
def _write(
    x, noise, state_ptr, scale_ptr, row, where, inside, n, SIGNED: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    if KIND == PLAIN:
        _store(state_ptr + where, round_to(x, state_ptr.dtype.element_ty), inside, EVEN)
    else:
        x = tl.where(magnitude_bits(x) < INFINITY_BITS, x, 0.0)
        scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-12)
        if KIND == FP8:
            scale = divide(scale, _E4M3_MAX)
        _store(scale_ptr + row, scale, row * BLOCK < n, EVEN)
        x = x * reciprocal(scale)[:, None]
        if KIND == BITS_4:
            codes = _cube_at_random(x, noise) if SIGNED else _power_at_random(x, noise)
            # In 32 bits: of bytes in pairs, some halves of which are undefined, ptxas (12.9) got every second wrong.
            high, low = tl.split(tl.reshape(codes, [x.shape[0], BLOCK // 2, 2]))
            pair = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            _store(state_ptr + pair, ((high << 4) | low).to(tl.uint8), pair * 2 < n, EVEN)
        elif KIND == BITS_8:
            codes = 127 + _nearest(x, 6) if SIGNED else _nearest(x, 7) - 1
            _store(state_ptr + where, codes.to(tl.uint8), inside, EVEN)
        else:
            _store(state_ptr + where, cast(tl.clamp(x, -_E4M3_MAX, _E4M3_MAX), tl.float8e4nv, tl.float32), inside, EVEN)


@triton.jit
def _level(number, D: tl.constexpr):
    """The number-th level, negative ones below zero. The first without a sign (D = 7) is 0."""
    bits = (tl.abs(number) + 0.5).to(tl.int32, bitcast=True)
    decade = ((bits >> 23) - 127).to(tl.float32)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)  # 1 to 2
    size = tl.minimum((fraction * 0.9 - 0.8) * exp2((decade - D) * _LOG2_10), 1.0)
    size = tl.where(tl.abs(number) > (1 if D == 7 else 0), size, 0.0)
    return size if D == 7 else tl.where(number < 0, -size, size)


@triton.jit
def _nearest(x, D: tl.constexpr):
    """The number of the level that is nearest, of x between −1 and 1."""
    lowest: tl.constexpr = 1 if D == 7 else 0
    least: tl.constexpr = 0.13888889 if D == 7 else 0.19444444  # as a share of its cell: half of the first level
    size = tl.abs(x)
    decade = tl.floor(log2(size) * (1 / _LOG2_10)) + (D + 1)
    decade = tl.minimum(tl.maximum(decade, lowest), D)
    start = exp2(decade)
    # 2^j + (10^(D+1−j) · size − 1) / 9 · 2^j
    position = size * exp2(decade * (1 - _LOG2_10) + ((D + 1) * _LOG2_10 - _LOG2_9)) + start * (8 / 9)
    number = tl.minimum(tl.maximum(tl.floor(position), start), start * 2 - 1)
    number -= tl.where(position < start + tl.where(decade > lowest, 0.2, least), 1.0, 0.0)
    above = number + tl.where(size >= 1 - 0.225 / 2**D, 1.0, 0.0)  # 1, which −1 is no counterpart of
    return above if D == 7 else tl.where(x < 0, -number, above)


@triton.jit
def _start(where, first):
    """Start of the dither at each index; see `numerics.adamw.noise_of`."""
    x = (where.to(tl.uint32) + first.to(tl.uint32, bitcast=True)) * _GOLDEN
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _power_at_random(x, noise):
    """The code of a power of two below or above x, by the upper half of the noise."""
    bits = x.to(tl.int32, bitcast=True) + ((noise >> 16) << 7).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(bits >> 23, 112), 127) & 15  # 112, the exponent of 2⁻¹⁵, is a multiple of 16


@triton.jit
def _cube_at_random(x, noise):
    """The code of a cube of sevenths towards zero or away from it, by the lower half of the noise."""
    size = tl.abs(x) * 343
    k = tl.minimum(tl.floor(exp2(log2(size) * (1 / 3))), 6.0)
    share = 1 - (noise & 0xFFFF).to(tl.float32) * (1 / 65536)
    k += tl.where(size - k * k * k >= (3 * k * k + 3 * k + 1) * share, 1.0, 0.0)
    return tl.where(x < 0, 7 - k, 7 + k).to(tl.int32)


@triton.jit
def _to_bf16_at_random(p, noise):
    """Away from zero with the probability that the bits to be cut off say; on average, p. Not NaN: it would carry."""
    up = tl.where(magnitude_bits(p) < INFINITY_BITS, (noise & 0xFFFF).to(tl.int32, bitcast=True), 0)
    return ((p.to(tl.int32, bitcast=True) + up) & -0x10000).to(tl.float32, bitcast=True).to(tl.bfloat16)


def can_step(p: Tensor, mean: Tensor, square: Tensor) -> bool:
    """Whether there is a kernel for this parameter and its states."""
    if type(p.detach()) is not Tensor or not p.is_contiguous() or p.dtype not in _FLOATS or not p.numel():
        return False
    alike = type(mean) is type(square) and mean.shape == square.shape == p.shape
    if not alike or not mean.device == square.device == p.device or not (INTERPRETED or p.is_cuda):
        return False
    kind = PLAIN if type(mean) is Tensor else _KINDS.get(type(mean).__name__)
    if p.is_cuda and not is_known_gpu(p.device, fp8=kind is FP8):
        return False
    if kind is PLAIN:
        return all(x.dtype in _FLOATS and x.is_contiguous() for x in (mean, square))
    block = getattr(mean, "block_size", 0)
    whole = block == getattr(square, "block_size", 0) and block >= 2 and block & (block - 1) == 0
    return kind is not None and whole and (kind is not BITS_8 or has_known_levels())


@cache
def has_known_levels() -> bool:
    """Whether torchao's levels of 8 bits are those that the kernel computes."""
    from torchao.optim import subclass_8bit

    expected = [
        (subclass_8bit.get_qmap_signed(), _signed(6)),
        (subclass_8bit.get_qmap_unsigned(), [0.0, *_levels(range(1, 8), 7)]),
    ]
    return all(
        len(theirs) == len(levels) and all(abs(a - b) <= 1e-6 * abs(b) for a, b in zip(theirs, levels, strict=True))
        for theirs, levels in expected
    )


def _levels(decades: range, highest: int) -> list[float]:
    return [10.0 ** (j - highest) * (0.1 + 0.9 * (c + 0.5) / 2**j) for j in decades for c in range(2**j)] + [1.0]


def _signed(highest: int) -> list[float]:
    above = _levels(range(highest + 1), highest)
    return [-level for level in reversed(above[:-1])] + [0.0] + above


def apply(
    step: spec.Step, p: Tensor, g: Tensor, mean: Any, square: Any, low: Tensor | None = None, *, first: int = 0
) -> None:
    """Step one parameter; see `numerics.adamw.apply`. `low`: the lower half of its master."""
    kind = _KINDS.get(type(mean).__name__, PLAIN)
    block = _PLAIN_BLOCK if kind is PLAIN else mean.block_size
    elements, warps = tuning_for(p.device).adamw
    rows = max(elements // block, 1)
    n = p.numel()
    constants = {"KIND": kind, "BLOCK": block, "ROWS": rows, "EVEN": n % (rows * block) == 0}
    weights = 1 - step.betas[0], 1 - step.betas[1]
    bounded = kind is not PLAIN and math.isfinite(step.bound)
    constants |= {"BOUNDED": bounded, "STOCHASTIC": low is None and step.rounds_at_random(p), "SPLIT": low is not None}
    halves = (p.detach(), p.detach()) if low is None else (p.detach().view(torch.int16), low.view(torch.int16))
    bound = step.bound if bounded else 0.0
    numbers = map(float, (step.rate, step.decay, *weights, step.root_correction, step.eps, bound))
    with torch.cuda.device(p.device) if p.is_cuda else nullcontext():
        adamw_kernel[(-(-n // (rows * block)),)](
            *halves, g.contiguous(), *_codes_and_scale(mean), *_codes_and_scale(square), n, *numbers,
            spec.phase_of(step.count), step.count * spec.PHASE_STEP_OF_P & 0xFFFF, spec.as_int32(first), **constants,
            num_warps=warps,
        )  # fmt: skip


def _codes_and_scale(state: Any) -> tuple[Tensor, Tensor]:
    """Values or codes, and their scales; where there are none, something that is not read."""
    return (state, state) if type(state) is Tensor else (state.codes, state.scale)
