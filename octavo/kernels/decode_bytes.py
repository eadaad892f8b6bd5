"""E4M3 of a cache in products: how decode attention (`decode.py`) keeps what meets it within FP16.

Products take E4M3 as it is, in FP16, which holds all of it and is one instruction away (BF16 is four). The
scale of a key multiplies its scores, and the scale w of a value its probability. What else is in FP16 must fit:

    q            by a power of two for each row, which makes its largest element 2^14 to 2^15 (`in_half`)
    exp2(s) · w  relative to the largest of the row, at most 2^14: m = max(s + log2 w) − 14 in place of max(s)

Any m gives the same result, exp2(s − m) divided by its sum; in FP32 the sum has room for it. So the rounding of
probabilities is that of FP16, 2^-11, and what underflows is at most 2^-39 of the largest for each key.
"""

import triton
import triton.language as tl

from octavo.kernels import tiles


@triton.jit
def of_pairs(words):
    """Two E4M3 in each word of 16 bits, apart and in FP16: the lower ones, and the upper ones.

    Threads exchange values for a product that contracts tokens: in bytes one by one, since those of a word belong to
    one token, and in words as fast as FP16. So it is words that they exchange, and then take apart.
    """
    if tiles.INTERPRETED:
        lower = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        upper = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return lower.to(tl.float16), upper.to(tl.float16)
    return tl.inline_asm_elementwise(
        """{.reg .b16 a, b; .reg .b32 w; prmt.b32 w, $2, 0, 0x3120; mov.b32 {a, b}, w;
        cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}""",
        "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def in_half(q, scaling):
    """Rows of q from BF16 to FP16, times powers of two, and `scaling` of each row divided by these.

    All is exact but for elements below 2^-28 of the largest of the row, which lose at most 2^-39 of that.
    """
    q = q.to(tl.float32)
    exponent = tl.max(tiles.magnitude_bits(q), axis=1) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)  # so that both powers are normal numbers
    up, down = tiles.mx_factor(268 - exponent), tiles.mx_factor(exponent - 14)
    return (q * up[:, None]).to(tl.float16), scaling * down
