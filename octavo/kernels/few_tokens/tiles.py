"""Device functions of the few-token kernels: pairs of FP8 bytes to BF16 or FP16, and adapters' outputs.

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


@triton.constexpr_function
def _assembly(format, dtype):
    """PTX that makes of two words (bytes 0 to 3) bytes 0 and 2, and bytes 1 and 3, as pairs of `dtype`.

    FP16 holds all values of both formats, and NaN stays NaN. From there to BF16 it goes through FP32, because the
    instruction that converts one by one has an eighth of the rate.
    """
    name = {"fp8e4nv": "e4m3", "fp8e5": "e5m2"}[str(format)]
    lines = ["prmt.b32 s, $2, 0, 0x3120;", "mov.b32 {p, q}, s;"]
    for source, result in (("p", "$0"), ("q", "$1")):
        if str(dtype) == "fp16":
            lines.append(f"cvt.rn.f16x2.{name}x2 {result}, {source};")
        else:
            lines += [f"cvt.rn.f16x2.{name}x2 a, {source};", "mov.b32 {l, h}, a;"]
            lines += ["cvt.f32.f16 x, l;", "cvt.f32.f16 y, h;", f"cvt.rn.bf16x2.f32 {result}, y, x;"]
    registers = ".reg .b32 a, s; .reg .f16 l, h; .reg .f32 x, y; .reg .b16 p, q;"
    return "{ " + registers + " " + " ".join(lines) + " }"


@triton.jit
def _decoded(byte, FORMAT: tl.constexpr):
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
def from_words(words, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """The lower and the upper byte of each word, as numbers."""
    if tiles.INTERPRETED:
        return _decoded(words, FORMAT).to(dtype), _decoded(words >> 8, FORMAT).to(dtype)
    code: tl.constexpr = _assembly(FORMAT, dtype)
    if dtype == tl.bfloat16:
        pair = tl.inline_asm_elementwise(code, "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        pair = tl.inline_asm_elementwise(code, "=r,=r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2)
    return pair


@triton.jit
def sum_of_parts(ptrs, stride, inside, PARTS: tl.constexpr):
    """The sum of parts that lie `stride` apart, always in the same order."""
    total = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptrs + part * stride, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def adapted(
    total, t_ptr, b_ptr, m, n, first, size, scaling, column, M, ranks, dtype: tl.constexpr, RANK: tl.constexpr,
    T_PARTS: tl.constexpr,
):  # fmt: skip
    """`total[m, n]` plus `scaling · t · Bᵀ`, where this adapter has outputs among n.

    t comes in parts `[M, ranks]`, of which this adapter has the columns from `column` on.
    """
    low, high = tl.min(n), tl.max(n)
    if (low < first + size) & (high >= first):
        PADDED: tl.constexpr = padded(RANK)
        r = tl.arange(0, PADDED)
        inside = (m[:, None] < M) & (r[None, :] < RANK)
        t_ptrs = t_ptr + m[:, None] * ranks + (column + r)[None, :]
        t = tiles.round_to(sum_of_parts(t_ptrs, M * ranks, inside, T_PARTS), dtype)
        row = n - first
        present = (row[:, None] >= 0) & (row[:, None] < size) & (r[None, :] < RANK)
        b = tl.load(b_ptr + row[:, None] * RANK + r[None, :], mask=present, other=0.0)
        # Not what is multiplied by zeros in the place of a B that is not there: t may be infinite.
        mine = (row[None, :] >= 0) & (row[None, :] < size)
        total += tl.where(mine, scaling * product(t, tl.trans(in_dtype(b, dtype))), 0.0)
    return total


@triton.jit
def in_dtype(a, dtype: tl.constexpr):
    """Elements of an adapter's matrix in the dtype of the activations."""
    if a.dtype == dtype:
        return a
    return tiles.round_to(a.to(tl.float32), dtype)
