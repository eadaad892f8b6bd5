"""q, k and v from the product that has them side by side, and back: the kernels behind `numerics.rotary`.

A program holds one head of a few tokens, in two halves: rotating takes an element of each. Backward writes the
gradients of q, k and v side by side, as the product's backward reads them. With norms of heads, a program walks over
tokens and adds up its part of the gradient of its norm's weight, which a second launch sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.norm import DTYPES, add_sum, inverse_rms, weighted
from octavo.kernels.tiles import multiprocessors, round_to
from octavo.kernels.tuning import tuning_for
from octavo.numerics.rotary import Heads, Norms

WIDEST = 512  # of a head
_LAUNCHES = LaunchCache()


@triton.jit
def product_of(a, b, dtype: tl.constexpr):
    """a · b rounded to `dtype`, as FP32."""
    return round_to(a * b, dtype).to(tl.float32)


@triton.jit
def load_halves(ptr, where, inside, D: tl.constexpr):
    """Both halves of rows of D, in FP32."""
    a, b = tl.load(ptr + where, mask=inside, other=0.0), tl.load(ptr + where + D // 2, mask=inside, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def rotary_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr, v_ptr, T, R, H, G, eps,
    NORMED: tl.constexpr, SHIFTED: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    t, c = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, HALF)[None, :]
    inside = (t[:, None] < T) & (c < D // 2)
    token = t[:, None].to(tl.int64)
    where = (token * (H + 2 * G) + head) * D + c
    dtype = qkv_ptr.dtype.element_ty
    a, b = load_halves(qkv_ptr, where, inside, D)
    if head >= H + G:
        out = v_ptr + (token * G + head - H - G) * D + c
    else:
        if NORMED:
            if head < H:
                weight_ptr = q_weight_ptr
            else:
                weight_ptr = k_weight_ptr
            wa, wb = load_halves(weight_ptr, c, c < D // 2, D)
            inverse = inverse_rms(tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1), eps, D)[:, None]
            a = weighted(a, inverse, wa, SHIFTED, dtype).to(tl.float32)
            b = weighted(b, inverse, wb, SHIFTED, dtype).to(tl.float32)
        cos_a, cos_b = load_halves(cos_ptr, token % R * D + c, inside, D)
        sin_a, sin_b = load_halves(sin_ptr, token % R * D + c, inside, D)
        rotated = product_of(a, cos_a, dtype) + product_of(-b, sin_a, dtype)
        b = product_of(b, cos_b, dtype) + product_of(a, sin_b, dtype)
        a = rotated
        if head < H:
            out = q_ptr + (token * H + head) * D + c
        else:
            out = k_ptr + (token * G + head - H) * D + c
    tl.store(out, round_to(a, dtype), mask=inside)
    tl.store(out + D // 2, round_to(b, dtype), mask=inside)


@triton.jit
def rotary_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, dqkv_ptr, parts_ptr, T, R, H, G,
    q_token, q_head, k_token, k_head, v_token, v_head, eps,
    NORMED: tl.constexpr, NEEDS_W: tl.constexpr, SHIFTED: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """`q_token`, `q_head`, …: strides of the gradients."""
    head = tl.program_id(0)
    c = tl.arange(0, HALF)[None, :]
    dtype = dqkv_ptr.dtype.element_ty
    is_v = head >= H + G
    if head < H:
        ptr, stride, weight_ptr = dq_ptr + head * q_head, q_token, q_weight_ptr
    elif is_v:
        ptr, stride, weight_ptr = dv_ptr + (head - H - G) * v_head, v_token, k_weight_ptr
    else:
        ptr, stride, weight_ptr = dk_ptr + (head - H) * k_head, k_token, k_weight_ptr
    if NORMED:
        wa, wb = load_halves(weight_ptr, c, c < D // 2, D)
        if SHIFTED:
            wa += 1.0
            wb += 1.0
        sum_a, sum_b = tl.zeros([TILE, HALF], tl.float32), tl.zeros([TILE, HALF], tl.float32)
    for start in range(tl.program_id(1) * TILE, T, tl.num_programs(1) * TILE):
        t = start + tl.arange(0, TILE)
        inside = (t[:, None] < T) & (c < D // 2)
        token = t[:, None].to(tl.int64)
        where = (token * (H + 2 * G) + head) * D + c
        a, b = load_halves(ptr, token * stride + c, inside, D)
        if not is_v:
            cos_a, cos_b = load_halves(cos_ptr, token % R * D + c, inside, D)
            sin_a, sin_b = load_halves(sin_ptr, token % R * D + c, inside, D)
            turned = product_of(a, cos_a, dtype) + product_of(b, sin_b, dtype)
            b = product_of(b, cos_b, dtype) - product_of(a, sin_a, dtype)
            a = turned
            if NORMED:
                a, b = round_to(a, dtype).to(tl.float32), round_to(b, dtype).to(tl.float32)
                na, nb = load_halves(qkv_ptr, where, inside, D)
                inverse = inverse_rms(tl.sum(na * na, axis=1) + tl.sum(nb * nb, axis=1), eps, D)[:, None]
                na, nb = na * inverse, nb * inverse
                if NEEDS_W:
                    sum_a += tl.where(inside, a * na, 0.0)
                    sum_b += tl.where(inside, b * nb, 0.0)
                sums = tl.sum(a * (wa * na), axis=1) + tl.sum(b * (wb * nb), axis=1)
                along = tl.div_rn(sums, tl.full(sums.shape, D, tl.float32))[:, None]
                a = (wa * a - na * along) * inverse
                b = (wb * b - nb * along) * inverse
        tl.store(dqkv_ptr + where, round_to(a, dtype), mask=inside)
        tl.store(dqkv_ptr + where + D // 2, round_to(b, dtype), mask=inside)
    if NEEDS_W:
        part = parts_ptr + (head * tl.num_programs(1) + tl.program_id(1)) * D + tl.arange(0, HALF)
        tl.store(part, tl.sum(sum_a, axis=0), mask=tl.arange(0, HALF) < D // 2)
        tl.store(part + D // 2, tl.sum(sum_b, axis=0), mask=tl.arange(0, HALF) < D // 2)


def can_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: Norms | None) -> bool:
    """Whether there is a kernel for these tensors."""
    tensors = (qkv, cos, sin)
    weights = () if norms is None else (norms[0].weight, norms[1].weight)
    return (
        all(x.is_contiguous() and x.dtype == qkv.dtype for x in tensors)
        and qkv.dtype in DTYPES
        and all(weight.is_contiguous() and weight.dtype in DTYPES for weight in weights)
        and (norms is None or norms[0][1:] == norms[1][1:])
        and heads.width % 2 == 0
        and heads.width <= WIDEST
        and qkv.numel() > 0
    )


def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: Norms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `numerics.rotary.rotary`."""
    given = (qkv, cos, sin, *_weights(norms))
    key = (heads, _how(norms), kind(*given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(qkv, cos, heads, norms))
    q, k, v = launches.run(*given)
    return q, k, v


def _build(qkv: Tensor, cos: Tensor, heads: Heads, norms: Norms | None) -> Launches:
    tokens, (h, g, d) = qkv.shape[0], heads
    launches = Launches(given=3 if norms is None else 5)
    results = tuple(launches.make((tokens, count, d), qkv.dtype) for count in (h, g, g))
    tile, constants = _tile(heads, norms, qkv.device)
    constants |= apart(qkv.dtype)
    weights = (0, 0) if norms is None else (3, 4)
    eps = 0.0 if norms is None else float(norms[0].eps)
    grid = (h + 2 * g, -(-tokens // tile))  # the heads of a token lie side by side
    numbers = (tokens, cos.shape[0], h, g, eps)
    launches.launch(rotary_kernel, grid, (0, 1, 2, *weights, *results), numbers, constants)
    launches.results = results
    return launches


def apart(dtype: torch.dtype) -> dict[str, bool]:
    """Keep products and their sum apart: joined into one instruction, a product would not be rounded.

    To BF16 they are rounded by an instruction of their own, which nothing is joined with.
    """
    return {} if dtype == torch.bfloat16 else {"enable_fp_fusion": False}


def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor, heads: Heads,
    norms: Norms | None = None, *, needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The kernel of `numerics.rotary.rotary_backward`. Gradients may have any strides but the last."""
    dq, dk, dv = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk, dv))
    needs = needs if norms is not None else (False, False)
    given = (dq, dk, dv, cos, sin, *(() if qkv is None or norms is None else (qkv, *_weights(norms))))
    key = (heads, needs, _how(norms), kind(*given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_backward(dq, dk, dv, cos, heads, norms, needs))
    dqkv, *rest = launches.run(*given)
    gradients = iter(rest)
    return dqkv, next(gradients) if needs[0] else None, next(gradients) if needs[1] else None


def _build_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, heads: Heads, norms: Norms | None, needs: tuple[bool, bool]
) -> Launches:
    tokens, (h, g, d) = dq.shape[0], heads
    launches = Launches(given=5 if norms is None else 8)
    dqkv = launches.make((tokens, heads.features), dq.dtype)
    tile, constants = _tile(heads, norms, dq.device)
    programs = -(-tokens // tile)
    if norms is not None:
        each = tuning_for(dq.device).rotary_programs * multiprocessors(dq.device)
        programs = min(programs, max(1, each // (h + 2 * g)))
    parts = launches.make(((h + 2 * g) * programs, d), torch.float32) if any(needs) else dqkv
    tensors = (0, 1, 2, *((0, 3, 4, 0, 0) if norms is None else (5, 3, 4, 6, 7)), dqkv, parts)
    strides = (dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1))
    eps = 0.0 if norms is None else float(norms[0].eps)
    constants |= {"NEEDS_W": any(needs)} | apart(dq.dtype)
    grid = (h + 2 * g, programs)
    numbers = (tokens, cos.shape[0], h, g, *strides, eps)
    launches.launch(rotary_backward_kernel, grid, tensors, numbers, constants)
    launches.results = (dqkv,)
    ranges = ((0, h * programs), (h * programs, (h + g) * programs))
    for i, norm in enumerate(norms or ()):
        if needs[i]:
            launches.results += (add_sum(launches, parts, 6 + i, norm, ranges[i], fp8=False, device=dq.device),)
    return launches


def _weights(norms: Norms | None) -> tuple[Tensor, ...]:
    return () if norms is None else (norms[0].weight, norms[1].weight)


def _how(norms: Norms | None) -> tuple[float, bool] | None:
    return None if norms is None else norms[0][1:]


def _tile(heads: Heads, norms: Norms | None, device: torch.device) -> tuple[int, dict[str, object]]:
    """Tokens of a program, and what a kernel knows when it is compiled."""
    elements, warps = tuning_for(device).rotary
    half = triton.next_power_of_2(heads.width // 2)
    tile = max(1, elements // (2 * half))
    shifted = norms is not None and norms[0].shifted
    constants = {"NORMED": norms is not None, "SHIFTED": shifted, "D": heads.width, "HALF": half, "TILE": tile}
    return tile, constants | {"num_warps": warps}
