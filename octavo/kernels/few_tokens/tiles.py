"""Device functions of the few-token kernels: pairs of FP8 bytes to FP16, programs that wait for others, adapters.

A weight is read as 16-bit words of two bytes. Tensor cores want 16-bit operands in a certain arrangement over threads,
which `ldmatrix` gives to words, but not to bytes: those would come from shared memory two by two. Each word becomes two
numbers in the place it has, so the even columns of a weight are one operand, and the odd ones another:

    x · wᵀ = x_even · w_evenᵀ + x_odd · w_oddᵀ

x is laid out to match (`lay_out_kernel`): of every 128 columns, the 64 even ones first, then the 64 odd ones.
"""

import triton
import triton.language as tl

from octavo.kernels import tiles
from octavo.kernels.adapters.tiles import padded, product

# How a weight is scaled.
TENSOR = tl.constexpr(0)
CHANNEL = tl.constexpr(1)
BLOCKS = tl.constexpr(2)
_TOP = tl.constexpr(127 + 127 + 14)  # of this, less an exponent (biased, as is the result), 14 is left


@triton.constexpr_function
def _assembly(format):
    """PTX that makes of two words (bytes 0 to 3) bytes 0 and 2, and bytes 1 and 3, as pairs of FP16.

    FP16 holds all values of both formats, and NaN stays NaN. It is one instruction for two elements; to BF16 it would
    be four, with which conversions, not memory, set the time of a product.
    """
    name = {"fp8e4nv": "e4m3", "fp8e5": "e5m2"}[str(format)]
    lines = ["prmt.b32 s, $2, 0, 0x3120;", "mov.b32 {p, q}, s;"]
    lines += [f"cvt.rn.f16x2.{name}x2 {result}, {source};" for source, result in (("p", "$0"), ("q", "$1"))]
    return "{ .reg .b32 s; .reg .b16 p, q; " + " ".join(lines) + " }"


@triton.jit
def decoded(byte, FORMAT: tl.constexpr):
    """Bytes as FP32. The interpreter's own conversion knows neither NaN nor infinity."""
    bits = byte.to(tl.int32) & 0x7F
    is_e4m3: tl.constexpr = FORMAT == tl.float8e4nv  # noqa: SIM300
    if is_e4m3:
        value = (bits << 20).to(tl.float32, bitcast=True) * 2.0**120
        value = tl.where(bits == 0x7F, float("nan"), value)
    else:
        value = (bits << 21).to(tl.float32, bitcast=True) * 2.0**112
        value = tl.where(bits == 0x7C, float("inf"), tl.where(bits > 0x7C, float("nan"), value))
    return tl.where((byte & 0x80) != 0, -value, value)


@triton.jit
def from_words(words, FORMAT: tl.constexpr):
    """The lower and the upper byte of each word, as FP16."""
    if tiles.INTERPRETED:
        return decoded(words, FORMAT).to(tl.float16), decoded(words >> 8, FORMAT).to(tl.float16)
    code: tl.constexpr = _assembly(FORMAT)
    return tl.inline_asm_elementwise(code, "=r,=r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def power_for(magnitudes, axis: tl.constexpr):
    """The power of two that takes the largest of these magnitudes (bits of FP32) to 2¹⁴ or more, below 2¹⁵.

    Also returns the inverse. Both are normal numbers, whatever the magnitudes: beside infinity or NaN, which stay what
    they are, it does not matter what becomes of the others.
    """
    exponent = tl.minimum(_TOP - (tl.max(magnitudes, axis=axis) >> 23), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def prefetch(ptrs, bytes):
    """Have L2 read so many bytes from each address: whole 16, at addresses of whole 16. Nothing waits for it."""
    if not tiles.INTERPRETED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [ptrs.to(tl.int64), bytes],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def arrive(counter_ptr):
    """Count this program in, after all that it has stored. Returns how many came before."""
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def wait_for(counter_ptr, count):
    """Wait until so many programs have arrived; what they have stored before can be read then, past L1 (`.cg`)."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < count:
        pass
    tl.debug_barrier()


@triton.jit
def sum_of_parts(ptrs, stride, parts):
    """The sum of parts that lie `stride` apart, always in the same order. A few at a time are on their way."""
    total = tl.load(ptrs, cache_modifier=".cg")
    for part in tl.range(1, parts, num_stages=1, loop_unroll_factor=4):
        total += tl.load(ptrs + part * stride, cache_modifier=".cg")
    return total


@triton.jit
def adapted(
    total, t_ptr, b_ptr, n, m, low, high, first, size, scaling, column, ranks, RANK: tl.constexpr,
):  # fmt: skip
    """`total[n, m]` plus `scaling · B · tᵀ`, where this adapter has outputs among n, which lie in `low` to `high`.

    t is `[TILE_M, ranks]`, of which this adapter has the columns from `column` on.
    """
    if (low < first + size) & (high >= first):
        dtype: tl.constexpr = t_ptr.dtype.element_ty
        PADDED: tl.constexpr = padded(RANK)
        r = tl.arange(0, PADDED)
        t_ptrs = t_ptr + m[:, None] * ranks + (column + r)[None, :]
        t = tl.load(t_ptrs, mask=r[None, :] < RANK, other=0.0, cache_modifier=".cg")
        row = n - first
        mine = (row >= 0) & (row < size)
        present = mine[:, None] & (r[None, :] < RANK)
        b = tl.load(b_ptr + row[:, None] * RANK + r[None, :], mask=present, other=0.0)
        # Not what is multiplied by zeros in the place of a B that is not there: t may be infinite.
        total += tl.where(mine[:, None], scaling * product(in_dtype(b, dtype), tl.trans(t)), 0.0)
    return total


@triton.jit
def in_dtype(a, dtype: tl.constexpr):
    """Elements of an adapter's matrix in the dtype of the activations."""
    if a.dtype == dtype:
        return a
    return tiles.round_to(a.to(tl.float32), dtype)
