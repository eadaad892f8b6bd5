"""The gated MLP of a frozen FP8 base, with adapters: y = (act(x · w_gateᵀ) · (x · w_upᵀ)) · w_downᵀ, as one function.

Shapes: M tokens, K width, F hidden; s, A and B of each adapter as in `lora.py`.

    forward    xq_MK → gu_M2F = xq · [w_gate; w_up]ᵀ → one kernel: adapters, h, gu in FP8 → hq_MF → y = hq · w_downᵀ
    backward   gq_MK → dh_MF = gq · w_down → one kernel: adapters, h again, dgu_M2F → dguq → dx = dguq · [w_gate; w_up]
    kept       xq_MK and guq_M2F in FP8 (1×128, whatever the weights have scales for), and what is narrow

Forward computes h from gate and up in high precision; only backward sees them rounded. Where products are in high
precision (`Product.in_fp8`), weights are dequantised, nothing else is quantised but what is kept of gate and up (not
even that in FP32), and x is kept as in `lora.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.nn.mlp import MLP
from octavo.nn.norm import back_through, normed, normed_again, parts_of
from octavo.nn.versions import check_versions, versions_of
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized
from octavo.ops import lora_mlp as ops_lora_mlp
from octavo.ops.adapters import Adapter, Adapters
from octavo.ops.quantize import as_dtype

Rows = tuple[Tensor, Tensor]


def frozen_mlp(
    x: Tensor,
    weights: Sequence[Quantized],
    down: Quantized,
    mlp: MLP,
    rows: Rows,
    rows_down: Rows,
    adapters: Adapters,
    adapters_down: Adapters,
    *,
    norm: Norm | None = None,
    residual: bool = False,
) -> Tensor:
    """`x[..., K]` through the MLP. `weights`: gate and up. `rows_…`: scaling state of input and gradient.

    `norm`: comes before all that, as in `lora.py`. `residual`: x itself is added to what comes out.
    """
    enabled = torch.is_grad_enabled()
    keep_x = enabled and (any(a.requires_grad for a in adapters.downs) or (norm is not None and x.requires_grad))
    matrices = [m for each in (adapters, adapters_down) for m in (*each.downs, *each.ups)]
    keep = enabled and (x.requires_grad or any(m.requires_grad for m in matrices))
    y = _FrozenMLP.apply(
        x.reshape(-1, x.shape[-1]), *parts_of(norm), residual, mlp,
        (adapters.places, adapters_down.places), (keep, keep_x), *rows, *rows_down,
        *(part for weight in (*weights, down) for part in weight), *matrices,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], y.shape[-1])


class _FrozenMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_eps: float | None,
        residual: bool,
        mlp: MLP,
        places: tuple[tuple[Adapter, ...], tuple[Adapter, ...]],
        keep: tuple[bool, bool],
        row_x: Tensor,
        row_dgate_up: Tensor,
        row_h: Tensor,
        row_g: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        weights = [Quantized(*tensors[i : i + 2]) for i in (0, 2)]
        down, matrices = Quantized(*tensors[4:6]), tensors[6:]
        h, in_fp8 = x, mlp.product.in_fp8
        x, inverse = normed(h, norm_weight, norm_eps)
        x = x if in_fp8 else as_dtype(x, mlp.product.out_dtype)
        y, *saved = ops_lora_mlp.lora_mlp(
            x, (row_x, row_h), weights, down, *_sort(matrices, places), mlp.product, mlp.activation, keep=keep[0],
            keep_x=keep[1] and in_fp8, residual=h if residual else None,
        )  # fmt: skip
        if keep[1] and not in_fp8:
            saved[0] = x if inverse is None else h
        ctx.save_for_backward(*saved, inverse, norm_weight, *matrices)
        ctx.weights, ctx.down, ctx.rows, ctx.mlp, ctx.places = weights, down, (row_g, row_dgate_up), mlp, places
        ctx.versions = versions_of(tensors[:6])
        ctx.x_dtype, ctx.eps, ctx.residual = h.dtype, norm_eps, residual
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        check_versions([part for weight in (*ctx.weights, ctx.down) for part in weight], ctx.versions)
        everything = ctx.saved_tensors
        saved, (inverse, norm_weight), matrices = everything[:6], everything[6:8], everything[8:]
        both = _sort(matrices, ctx.places)
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[17:]
        wanted = [needs_x]
        start = 0
        for places in ctx.places:
            middle, end = start + len(places), start + 2 * len(places)
            wanted += [any(needs[start:middle]), any(needs[middle:end])]
            start = end
        x = saved[0] if ctx.mlp.product.in_fp8 else normed_again(saved[0], norm_weight, inverse)
        dx, *found = ops_lora_mlp.lora_mlp_backward(
            g, ctx.rows, (x, *saved[1:]), ctx.weights, ctx.down, *both, ctx.mlp.product, ctx.mlp.activation,
            needs=wanted, dtype=ctx.x_dtype,
        )  # fmt: skip
        kept = Quantized(*saved[:2])
        dh, _ = back_through(dx, kept, norm_weight, ctx.eps, inverse, needs=(needs_x, False))
        if ctx.residual and dh is not None:
            dh = dh + g
        gradients: list[Tensor | None] = []
        for adapters, pair in zip(both, (found[:2], found[2:]), strict=True):
            gradients += adapters.split(*pair)
        gradients = [d if needed else None for d, needed in zip(gradients, needs, strict=True)]
        return dh, *[None] * 16, *gradients


def _sort(
    matrices: Sequence[Tensor], places: tuple[tuple[Adapter, ...], tuple[Adapter, ...]]
) -> tuple[Adapters, Adapters]:
    """All A of gate and up, all their B; then those of down."""
    n, last = len(places[0]), len(places[1])
    first = Adapters(places[0], tuple(matrices[:n]), tuple(matrices[n : 2 * n]))
    rest = matrices[2 * n :]
    return first, Adapters(places[1], tuple(rest[:last]), tuple(rest[last:]))
