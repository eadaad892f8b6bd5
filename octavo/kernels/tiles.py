"""Scales, rounding and counting for one tile held in registers: shared by the quantising kernels.

Each function says in Triton what `octavo/numerics` says in torch, in the same order of operations: one correctly
rounded reciprocal, then a multiplication (`/` is not correctly rounded in Triton).

What is rare is looked for, not computed: a program keeps the largest bit pattern it saw (NaN and infinities sort above
all finite magnitudes), and only one that saw something beyond the format's range walks over its tiles again to count.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.numerics import formats
from octavo.numerics.quantize import BLOCK, MX_BLOCK

# Slots of a scaling state; see numerics/scaling.py.
SCALE = tl.constexpr(0)
AMAX = tl.constexpr(1)
SEEN = tl.constexpr(2)
NON_FINITE = tl.constexpr(3)
SATURATED = tl.constexpr(4)
UNDERFLOW = tl.constexpr(5)
CALLS = tl.constexpr(6)
RESCALED = tl.constexpr(8)
USED = tl.constexpr(9)

# How a layout's scales are found; `quantize/modes.py` has what each stands for.
NONE = tl.constexpr(0)  # this layout is not wanted
TENSOR = tl.constexpr(1)
CHANNEL = tl.constexpr(2)
BLOCK_1X128 = tl.constexpr(3)
BLOCK_128X128 = tl.constexpr(4)
MX = tl.constexpr(5)

INFINITY_BITS = tl.constexpr(0x7F800000)
LARGEST_SCALE = tl.constexpr(2.0**126)
SMALLEST_SCALE = tl.constexpr(2.0**-126)
E8M0_ONE = tl.constexpr(127)
SAMPLE = tl.constexpr(8)  # counting underflow takes about as many instructions as quantising

# The interpreter's cast to FP8 drops the carry when rounding up to a power of two (1.98 becomes 1), and its cast to
# BF16 truncates: both are given values that are on the grid already.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def group(mode):
    """How many elements along a row share a scale that is found in the tile itself."""
    return {BLOCK_1X128.value: BLOCK, MX.value: MX_BLOCK}[mode]


@triton.constexpr_function
def format_of(dtype):
    """The format that a dtype of Triton's holds."""
    return {"fp8e4nv": formats.E4M3, "fp8e5": formats.E5M2}[str(dtype)]


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Wait for the previous kernel's writes (programmatic dependent launch), then let the next kernel start."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def magnitude_bits(v):
    """|v| as integers, which order like the values, with infinity and NaN on top."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def divide(amax, divisor: tl.constexpr):
    """Divide by a constant, correctly rounded: a quotient, its remainder, and the quotient of that (Markstein).

    Below the smallest scale it may be off. Every thread does this for its own eight elements, so it should be short.
    """
    if INTERPRETED:
        return tl.div_rn(amax, tl.full(amax.shape, divisor, tl.float32))
    inverse: tl.constexpr = 1.0 / divisor
    quotient = amax * inverse
    return tl.fma(tl.fma(-quotient, divisor, amax), inverse, quotient)


@triton.jit
def scale_from_amax(amax, format: tl.constexpr, margin: tl.constexpr):
    """The scale that maps amax to the largest value of a format (`numerics.formats`)."""
    scale = divide(amax, format.max) * margin
    scale = tl.minimum(tl.maximum(scale, SMALLEST_SCALE), LARGEST_SCALE)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def reciprocal(scale):
    """1 / scale, correctly rounded."""
    if INTERPRETED:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def mx_exponent(amax, format: tl.constexpr, margin: tl.constexpr, up: tl.constexpr):
    """The biased exponent of a block's power-of-two scale."""
    if up:
        bits = (divide(amax, format.max) * margin).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    else:
        top: tl.constexpr = format.max_exponent
        exponent = ((amax * margin).to(tl.int32, bitcast=True) >> 23) - top
    exponent = tl.minimum(tl.maximum(exponent, 1), 254)
    return tl.where(amax > 0, exponent, E8M0_ONE)


@triton.jit
def mx_factor(exponent):
    """2^(exponent − 127)."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled(x, inverse, careful: tl.constexpr = True):
    """x × inverse, where `inverse` may be that of a scale too small for x: what overflows saturates then.

    `careful`: infinities of x become NaN before that (x + 0 · x is x if x is finite).
    """
    if careful:
        x = tl.fma(x, 0.0, x)
    return x * inverse


@triton.jit
def saturate(v, seed, offset, format: tl.constexpr, stochastic: tl.constexpr, careful: tl.constexpr = True):
    """Prepare scaled values for the cast to FP8, which saturates: only rounding at random is done here.

    `careful`: infinities become NaN (v + 0 · v is v if v is finite). Without it there must be none.
    """
    if careful:
        v = tl.fma(v, 0.0, v)
    if INTERPRETED or stochastic:
        maximum: tl.constexpr = format.max
        v = tl.clamp(v, -maximum, maximum, propagate_nan=tl.PropagateNan.ALL)
    if stochastic:
        v = _stochastic(v, seed, offset, format.mantissa_bits, format.min_exponent)
    return v


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x))."""
    return inverse(1.0 + exp2(x * -1.4426950408889634))


# These use approximate instructions, without the handling of subnormals in Triton's own functions.


@triton.jit
def exp2(x):
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def log2(x):
    if INTERPRETED:
        return tl.log2(tl.maximum(x, 2.0**-126))
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def root(x):
    if INTERPRETED:
        return tl.sqrt(x)
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def inverse(x):
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def place(tile, down, across, BAND: tl.constexpr, BACKWARDS: tl.constexpr):
    """Row and column of a tile among `down × across`: the order in which programs go over a matrix.

    `BAND`: not row by row, but that many rows at a time, so that what programs write at the same time as columns makes
    longer runs. `BACKWARDS`: what an earlier pass has read last, and a cache may still hold, comes first.
    """
    if BACKWARDS:
        tile = down * across - 1 - tile
    if BAND == 1:
        return tile // across, tile % across
    band = tile // (BAND * across) * BAND
    high = tl.minimum(down - band, BAND)
    within = tile - band * across
    return band + within % high, within // high


@triton.jit
def sample_step(tiles):
    """Underflow is counted on each of a program's tiles if there are few, else on the first and every eighth after."""
    return tl.where(tiles >= 4 * tl.num_programs(0), SAMPLE, 1)


@triton.jit
def is_sampled(tile, step):
    return tile // tl.num_programs(0) % step == 0


@triton.jit
def from_sample(lost, tiles, step):
    """The count on a program's sampled tiles, scaled up to all of its tiles."""
    mine = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    return tl.sum(tl.sum(lost, axis=1), axis=0) * tl.div_rn(mine.to(tl.float32), tl.cdiv(mine, step).to(tl.float32))


@triton.jit
def needs_care(top_bits, limit):
    """Whether a program saw anything beyond a limit, or not finite: then it has to look again, at every element."""
    return (top_bits >= INFINITY_BITS) | (top_bits.to(tl.float32, bitcast=True) > limit)


@triton.jit
def cast(v, dtype: tl.constexpr, source: tl.constexpr):
    """FP32 to FP8, to nearest even. `source`: of what the tile was made, FP32 if it was rounded at random since.

    On its way to memory a tile may change hands between threads (to be transposed, to suit a store), which Triton lets
    happen in its narrowest form. That must not be FP8: ptxas 12.9, which Triton 3.6 brings, then makes wrong code on
    Hopper (triton-lang/triton#11111). Tiles made of 16 bits change hands in 16 bits; others get such a form here, and
    FP16 holds all FP8 values.
    """
    if source == tl.float32 and not INTERPRETED:
        v = _cast(v, dtype).to(tl.float16).to(tl.float32)
    return _cast(v, dtype)


@triton.jit
def _cast(v, dtype: tl.constexpr):
    if INTERPRETED:
        bits: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
        exponent = tl.maximum((v.to(tl.int32, bitcast=True) >> 23) & 0xFF, (-6 if bits == 3 else -14) + 127)
        # Adding 1.5 × 2^23 steps leaves no room for anything below a step.
        shift = ((exponent - bits + 23) << 23).to(tl.float32, bitcast=True) * 1.5
        sign = v.to(tl.int32, bitcast=True) & -0x80000000
        rounded = ((tl.abs(v) + shift) - shift).to(tl.int32, bitcast=True) | sign
        v = tl.where(v == v, rounded, 0x7FF00000 if bits == 3 else 0x7FE00000).to(
            tl.float32, bitcast=True
        )  # a NaN that is one in FP8, too
    return v.to(dtype)


@triton.jit
def round_to(v, dtype: tl.constexpr):
    """FP32 to BF16 (or what `dtype` is), to nearest even.

    To BF16 by pairs: rounded one by one, they would pass through the slow unit that does exponentials.
    """
    if dtype == tl.bfloat16:
        if INTERPRETED:
            bits = v.to(tl.int32, bitcast=True)
            v = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        else:
            return tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [v], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    return v.to(dtype)


@triton.jit
def _stochastic(v, seed, offset, mantissa_bits: tl.constexpr, min_exponent: tl.constexpr):
    exponent = tl.maximum((v.to(tl.int32, bitcast=True) >> 23) & 0xFF, min_exponent + 127)
    step = ((exponent - mantissa_bits) << 23).to(tl.float32, bitcast=True)
    inverse_step = ((254 - exponent + mantissa_bits) << 23).to(tl.float32, bitcast=True)
    scaled = v * inverse_step
    whole = tl.floor(scaled)
    noise = tl.rand(seed, offset)
    rounded = (whole + tl.where(noise < scaled - whole, 1.0, 0.0)) * step
    return tl.where(v == v, rounded, v)


@triton.jit
def is_lost(x, v, format: tl.constexpr):
    """Which elements become zero without having been it; `v` is what goes into the cast to FP8.

    Rounding to nearest even makes zero of what is at most half the smallest subnormal.
    """
    half: tl.constexpr = format.smallest_subnormal / 2
    return (tl.abs(v) <= half) & (x != 0.0)


@triton.jit
def is_clipped(x, scale, format: tl.constexpr):
    """Which finite elements the clamp changes."""
    beyond: tl.constexpr = format.saturation_threshold
    return (tl.abs(x) > scale * beyond) & (magnitude_bits(x) < INFINITY_BITS)


@triton.jit
def largest_of_eight(bits):
    """The maximum of every eight neighbours: they sit in one thread, so no thread waits for another."""
    return tl.max(tl.reshape(bits, [bits.shape[0], bits.shape[1] // 8, 8]), axis=2)


@triton.jit
def count_of_eight(flags):
    """How many of every eight neighbours are set."""
    return tl.sum(tl.reshape(tl.where(flags, 1, 0), [flags.shape[0], flags.shape[1] // 8, 8]), axis=2)


@triton.jit
def count(flags):
    return tl.sum(tl.sum(tl.where(flags, 1, 0), axis=1), axis=0)


@triton.jit
def largest(values):
    return tl.max(tl.max(values, axis=1), axis=0)


@triton.jit
def record(state_ptr, top, non_finite, lost, clipped, per_element):
    """Record what one program saw in the scaling state. Looking first saves nearly all atomics on the maximum."""
    if top > tl.load(state_ptr + AMAX):
        tl.atomic_max(state_ptr + AMAX, top, sem="relaxed")
    if non_finite:
        tl.atomic_max(state_ptr + NON_FINITE, 1.0, sem="relaxed")
    if lost != 0:
        tl.atomic_add(state_ptr + UNDERFLOW, lost * per_element, sem="relaxed")
    if clipped != 0:
        tl.atomic_add(state_ptr + SATURATED, clipped * per_element, sem="relaxed")


@triton.jit
def raise_to(amax_ptr, amax, inside):
    """Raise maxima in memory to these, which may be NaN where nothing was finite.

    Without looking first: a loop that waits for what it reads here takes longer than the atomics.
    """
    tl.atomic_max(amax_ptr, amax, mask=inside & (amax > 0.0), sem="relaxed")


@triton.jit
def record_scale(state_ptr, scale, amax):
    """Record the scale of this use, from one program only; a tensor of zeros has none."""
    if amax > 0:
        tl.store(state_ptr + SCALE, scale)


@triton.jit
def record_use(state_ptr):
    """Count one more use, from one program only."""
    tl.store(state_ptr + SEEN, tl.load(state_ptr + SEEN) + 1.0)
    tl.store(state_ptr + CALLS, tl.load(state_ptr + CALLS) + 1.0)


def programs_in_strips(strips: int, tiles: int, programs: int) -> int:
    """How many programs: a multiple of `strips` (columns of tiles), near `programs`, no more than there are tiles."""
    return strips * max(1, min(programs, tiles) // strips)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
