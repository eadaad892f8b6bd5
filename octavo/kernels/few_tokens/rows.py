"""The kernels for a single token: rows of a weight by one x, on the FP32 units.

    project     x after an RMS norm, if there is one, and parts of tᵢ = x · Aᵢᵀ: a program for rows of all Aᵢ
    rows        y = x · wᵀ · scales + Σᵢ sᵢ · tᵢ · Bᵢᵀ + bias + residual: a program for a few rows of w; or, of gate and
                up, h = act(gate) · up

Tensor cores multiply 16 tokens or more, for which x is laid out and a weight's columns are shared between programs that
wait for each other. One token needs none of it: a program reads whole rows, of which several steps are on their way to
shared memory, and adds up in FP32.

Both kernels read weights before they wait for the launch in front of them, which writes none. So the first of their
launches never begins early: what is in front of that may be an optimiser.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import tiles
from octavo.kernels.adapters.tiles import choose, padded
from octavo.kernels.few_tokens.tiles import BLOCKS, CHANNEL, TENSOR, decoded, in_dtype
from octavo.kernels.norm import inverse_rms, weighted
from octavo.numerics.quantize import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(16)  # columns of a row that a thread reads at a time; they have one scale


@triton.jit
def project_kernel(
    h_ptr, weight_ptr, x_ptr, a0_ptr, a1_ptr, a2_ptr, t_ptr, eps,
    NORM: tl.constexpr, SHIFTED: tl.constexpr, RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs: parts of the rows of all A, then, after a norm, one that writes x. `WIDTH`: of a part."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    pid = tl.program_id(0)
    line, part = pid // PARTS, pid % PARTS
    c = part * WIDTH + tl.arange(0, WIDTH)
    i = tl.where(line >= RANK0 + RANK1, 2, tl.where(line >= RANK0, 1, 0))
    row = line - tl.where(i == 2, RANK0 + RANK1, tl.where(i == 1, RANK0, 0))
    projects = line < RANKS
    if OVERLAPS:
        gdc_launch_dependents()
    a_ptrs = choose(i, a0_ptr, a1_ptr, a2_ptr) + row * K + c
    a = tl.load(a_ptrs, mask=(c < K) & projects, other=0.0)
    if OVERLAPS:
        gdc_wait()
    x = tl.load(h_ptr + c, mask=c < K, other=0.0)
    if NORM:
        weight = tl.load(weight_ptr + c, mask=c < K, other=0.0).to(tl.float32)
        h = x.to(tl.float32)
        x = weighted(h, inverse_rms(tl.sum(h * h, axis=0), eps, K), weight, SHIFTED, dtype)
        if not projects:
            tl.store(x_ptr + c, x, mask=c < K)
    if projects:
        t = tl.sum(in_dtype(a, dtype).to(tl.float32) * x.to(tl.float32), axis=0)
        tl.store(t_ptr + part * RANKS + line, t)


@triton.jit
def _rounded(v, dtype: tl.constexpr):
    """FP32 to `dtype`, of so few elements that threads have no pairs (`tiles.round_to`)."""
    if tiles.INTERPRETED:
        return tiles.round_to(v, dtype)
    return v.to(dtype)


@triton.jit
def _weights(ptrs, mask, EVEN: tl.constexpr):
    if tiles.INTERPRETED:
        return tl.load(ptrs.to(tl.pointer_type(tl.uint8)), mask=mask, other=0)
    if EVEN:
        return tl.load(ptrs, eviction_policy="evict_first")
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _times(w, x, FORMAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The products of groups of columns, `[ROWS, WIDTH / 16]`."""
    if tiles.INTERPRETED:
        wide = decoded(w, FORMAT)
    else:
        wide = w.to(tl.float16).to(tl.float32)
    return tl.sum(tl.reshape(wide * x[None, :], [ROWS, WIDTH // _GROUP, _GROUP]), axis=2)


@triton.jit
def _loaded_b(b_ptr, n, first, size, RANK: tl.constexpr):
    """Rows of B for those outputs n that this adapter has, and zeros for the others."""
    r, row = tl.arange(0, padded(RANK)), n - first
    mine = (row >= 0) & (row < size)
    return tl.load(b_ptr + row[:, None] * RANK + r[None, :], mask=mine[:, None] & (r < RANK)[None, :], other=0.0)


@triton.jit
def _loaded_t(t_ptr, RANK: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr):
    r = tl.arange(0, padded(RANK))
    t = tl.load(t_ptr + r, mask=r < RANK, other=0.0)
    for part in tl.static_range(1, PARTS):
        t += tl.load(t_ptr + part * RANKS + r, mask=r < RANK, other=0.0)
    return t


@triton.jit
def _adapted(total, b, t, n, first, size, scaling, dtype: tl.constexpr):
    """`total` plus `scaling · B · t`."""
    t = _rounded(t, dtype).to(tl.float32)
    added = tl.sum(in_dtype(b, dtype).to(tl.float32) * t[None, :], axis=1)
    # Not what is multiplied by zeros in the place of a B that is not there: t may be infinite.
    return total + tl.where((n >= first) & (n < first + size), scaling * added, 0.0)


@triton.jit
def whole_rows_kernel(
    x_ptr, w_ptr, scale_ptr, t_ptr, b0_ptr, b1_ptr, b2_ptr, bias_ptr, residual_ptr, y_ptr,
    N, stride_scale, first0, first1, first2, size0, size1, size2, scaling0, scaling1, scaling2,
    FORMAT: tl.constexpr, MODE: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs: `ROWS` outputs each, which lie in one row of blocks.

    With an activation, rows of gate, and as many of up, which make as many of h.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    EVEN: tl.constexpr = K % WIDTH == 0
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8)) if tiles.INTERPRETED else w_ptr.to(tl.pointer_type(FORMAT))
    features = N // HALVES
    low = tl.program_id(0) * ROWS
    i, c = tl.arange(0, HALVES * ROWS), tl.arange(0, WIDTH)
    n = tl.minimum(low + i % ROWS, features - 1)  # a whole tile is read, wherever there are fewer outputs
    if HALVES == 2:
        n += i // ROWS * features
    if OVERLAPS:
        gdc_launch_dependents()
    # What is added at the end is asked for at the beginning.
    scale, bias, residual = 1.0, 0.0, 0.0
    if MODE == CHANNEL:
        scale = tl.load(scale_ptr + n)
    if MODE == TENSOR:
        scale = tl.load(scale_ptr)
    if BIAS:
        bias = tl.load(bias_ptr + n).to(tl.float32)
    if RANK0 > 0:
        b0 = _loaded_b(b0_ptr, n, first0, size0, RANK0)
    if RANK1 > 0:
        b1 = _loaded_b(b1_ptr, n, first1, size1, RANK1)
    if RANK2 > 0:
        b2 = _loaded_b(b2_ptr, n, first2, size2, RANK2)
    if OVERLAPS:
        gdc_wait()
    if RESIDUAL:
        residual = tl.load(residual_ptr + n).to(tl.float32)
    if RANK0 > 0:
        t0 = _loaded_t(t_ptr, RANK0, RANKS, PARTS)
    if RANK1 > 0:
        t1 = _loaded_t(t_ptr + RANK0, RANK1, RANKS, PARTS)
    if RANK2 > 0:
        t2 = _loaded_t(t_ptr + RANK0 + RANK1, RANK2, RANKS, PARTS)
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * K + c[None, :]
    scales_ptr = scale_ptr + low // _BLOCK * stride_scale
    others_ptr = scale_ptr + (low + features) // _BLOCK * stride_scale
    total = tl.zeros([HALVES * ROWS, WIDTH // _GROUP], tl.float32)
    for k in tl.range(0, K, WIDTH, num_stages=STAGES):
        x = tl.load(x_ptr + k + c, mask=k + c < K, other=0.0).to(tl.float32)
        part = _times(_weights(w_ptrs + k, (k + c < K)[None, :], EVEN), x, FORMAT, HALVES * ROWS, WIDTH)
        if MODE == BLOCKS:
            block = tl.minimum(k + _GROUP * tl.arange(0, WIDTH // _GROUP), K - 1) // _BLOCK
            of_block = tl.load(scales_ptr + block)[None, :]
            if HALVES == 2:
                of_block = tl.where((i < ROWS)[:, None], of_block, tl.load(others_ptr + block)[None, :])
            part *= of_block
        total += part
    y = tl.sum(total, axis=1) * scale
    if RANK0 > 0:
        y = _adapted(y, b0, t0, n, first0, size0, scaling0, dtype)
    if RANK1 > 0:
        y = _adapted(y, b1, t1, n, first1, size1, scaling1, dtype)
    if RANK2 > 0:
        y = _adapted(y, b2, t2, n, first2, size2, scaling2, dtype)
    y = y + bias + residual
    if ACTIVATION is not None:
        gate, up = tl.split(tl.trans(tl.reshape(y, [HALVES, ROWS])))
        value, _ = ACTIVATION(gate)
        y = value * up
    to = low + tl.arange(0, ROWS)
    tl.store(y_ptr + to, _rounded(y, dtype), mask=to < features)
