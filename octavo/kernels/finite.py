"""Non-finite values in a tile: maxima skip them, FP8 keeps them as NaN, and the scaling state records them.

v + 0 · v is v where v is finite, else NaN, which the maximum of two passes over: one instruction, or half of one where
two values of 16 bits share a register. (Comparing and selecting takes four.)
"""

import triton
import triton.language as tl

from octavo.kernels.tiles import INFINITY_BITS, INTERPRETED, magnitude_bits


@triton.jit
def magnitude(v, CHECKED: tl.constexpr = False):
    """|v| in FP32 for a maximum that skips non-finite values; a maximum over nothing else is NaN.

    `CHECKED`: v has been through `only`.
    """
    if INTERPRETED:
        size = tl.where(magnitude_bits(v) < INFINITY_BITS, tl.abs(v), 0.0)
    elif CHECKED:
        size = tl.abs(v)
    else:
        size = tl.abs(tl.fma(v, 0.0, v))
    return size


@triton.jit
def raised(top, v):
    """The larger of top and |v| in their own dtype, with non-finite values as 0. Two 16-bit values at a time."""
    if INTERPRETED or v.dtype == tl.float32:
        top = tl.maximum(top.to(tl.float32), magnitude(v.to(tl.float32))).to(v.dtype)
    else:
        top = tl.inline_asm_elementwise(_raise_pair(v.dtype), "=r,r,r", [top, v], dtype=v.dtype, is_pure=True, pack=2)
    return top


@triton.constexpr_function
def _raise_pair(dtype):
    """PTX for max(top, |v + 0 · v|) on packed pairs: NaN where v is not finite, which the maximum skips."""
    pair = {"bf16": "bf16x2", "fp16": "f16x2"}[str(dtype)]
    return (
        "{.reg .b32 magnitude, zero; mov.b32 zero, 0; and.b32 magnitude, $2, 0x7FFF7FFF; "
        f"fma.rn.{pair} magnitude, magnitude, zero, magnitude; max.{pair} $0, $1, magnitude;}}"
    )


@triton.jit
def only(v):
    """v in its own dtype with NaN in place of infinities, so that maxima skip them and products keep them.

    Two 16-bit values at a time. (Interpreted, v as it is: `magnitude` and `saturate` look at each value there.)
    """
    if not INTERPRETED:
        if v.dtype == tl.float32:
            v = tl.fma(v, 0.0, v)
        else:
            v = tl.inline_asm_elementwise(_plus_nothing(v.dtype), "=r,r,r", [v, v], dtype=v.dtype, is_pure=True, pack=2)
    return v


@triton.jit
def only_pairs(words, dtype: tl.constexpr):
    """The same for two values of 16 bits in each word of 32."""
    if INTERPRETED:
        return words
    return tl.inline_asm_elementwise(_plus_nothing(dtype), "=r,r,r", [words, words], tl.int32, is_pure=True, pack=1)


@triton.jit
def add_trouble(trouble, v):
    """Add 0 · v to a running sum: NaN once any value was not finite. In the dtype of v, two 16-bit values at a time."""
    if INTERPRETED or v.dtype == tl.float32:
        trouble = (trouble.to(tl.float32) + v.to(tl.float32) * 0.0).to(v.dtype)
    else:
        trouble = tl.inline_asm_elementwise(
            _plus_nothing(v.dtype), "=r,r,r", [v, trouble], dtype=v.dtype, is_pure=True, pack=2
        )
    return trouble


@triton.constexpr_function
def _plus_nothing(dtype):
    """PTX for `a * 0 + b` on packed pairs: NaN wherever `a` is not finite."""
    pair = {"bf16": "bf16x2", "fp16": "f16x2"}[str(dtype)]
    return f"{{.reg .b32 zero; mov.b32 zero, 0; fma.rn.{pair} $0, $1, zero, $2;}}"


@triton.jit
def trouble_of_eight(v):
    """Sum of 0 · v over every eight neighbours: NaN if any is not finite."""
    return tl.sum(tl.reshape(v * 0.0, [v.shape[0], v.shape[1] // 8, 8]), axis=2)


@triton.jit
def is_trouble(trouble):
    return tl.sum(tl.sum(trouble.to(tl.float32), axis=1), axis=0) != 0.0
