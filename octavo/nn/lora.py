"""LoRA beside weights frozen in FP8: y = x · wᵀ + b + s · (x · Aᵀ) · Bᵀ, as one autograd function.

Shapes: M tokens, K inputs, N outputs, R the rank of an adapter, ΣR of all of them.

    forward    xq_MK → y_MN = xq · wqᵀ                 t_MΣR = x · [A₁; A₂; …]ᵀ        yᵢ += sᵢ · tᵢ · Bᵢᵀ
    backward   gq_MN → dx_MK = gq · wq                 uᵢ = sᵢ · gᵢ · Bᵢ               dx += u · [A₁; A₂; …]
                                                       dBᵢ = sᵢ · gᵢᵀ · tᵢ             dA = uᵀ · xq
    kept       xq_MK in FP8 and t_MΣR, which is narrow; never x itself

Each adapter has a part of the outputs: q, k and v are one weight with three adapters, whose down-projections read x
once. The adapters multiply in the dtype of the activations, whatever they are kept in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import ops_frozen
from octavo.numerics.quantize import Quantized
from octavo.ops import Product


@dataclass(frozen=True)
class Adapter:
    """Outputs `first` to `last` have an adapter, times `scaling`."""

    first: int
    last: int
    scaling: float


def frozen_lora(
    x: Tensor,
    weights: Sequence[Quantized],
    bias: Tensor | None,
    product: Product,
    rows: tuple[Tensor, Tensor],
    adapters: Sequence[Adapter],
    matrices: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """`x[..., K]` times frozen weights `[Nᵢ, K]` side by side, plus adapters.

    `rows`: of x and of g. `matrices`: A and B of each adapter.
    """
    flat = [matrix for pair in matrices for matrix in pair]
    keep = torch.is_grad_enabled() and any(a.requires_grad for a, _ in matrices)
    y = _FrozenLora.apply(
        x.reshape(-1, x.shape[-1]), bias, product, tuple(adapters), keep, *rows, len(weights),
        *(part for weight in weights for part in weight), *flat,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _parts(t: Tensor, downs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Each adapter's columns of `x · [A₁; A₂; …]ᵀ`."""
    return t.split([a.shape[0] for a in downs], dim=1) if downs else ()


class _FrozenLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        product: Product,
        adapters: tuple[Adapter, ...],
        keep: bool,
        row_x: Tensor,
        row_g: Tensor,
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        weights = [Quantized(*tensors[2 * i : 2 * i + 2]) for i in range(count)]
        matrices = tensors[2 * count :]
        y, x_q = ops_frozen.frozen_linear(x, weights, bias, row_x, product, keep=keep)
        downs, ups = matrices[::2], matrices[1::2]
        # t = x · Aᵀ
        t = x.to(y.dtype) @ torch.cat(downs).to(y.dtype).t() if downs else y.new_empty(0)
        for adapter, up, part in zip(adapters, ups, _parts(t, downs), strict=True):
            y[:, adapter.first : adapter.last].addmm_(part, up.to(y.dtype).t(), alpha=adapter.scaling)
        ctx.save_for_backward(*x_q, t, *matrices)
        ctx.weights, ctx.row_g, ctx.product, ctx.adapters = weights, row_g, product, adapters
        ctx.like = (x.dtype, bias.dtype if bias is not None else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, t, *matrices = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.like
        downs, ups = matrices[::2], matrices[1::2]
        ranks = [a.shape[0] for a in downs]
        before = 8 + 2 * len(ctx.weights)
        needs = ctx.needs_input_grad[before:]
        gradients: list[Tensor | None] = [None] * len(matrices)
        us = []
        for i, (adapter, up, part) in enumerate(zip(ctx.adapters, ups, _parts(t, downs), strict=True)):
            mine = g[:, adapter.first : adapter.last]
            # u = s · g · B
            us.append(mine @ up.to(g.dtype) * adapter.scaling)
            if needs[2 * i + 1]:
                # dB = s · gᵀ · t
                gradients[2 * i + 1] = (mine.t() @ part * adapter.scaling).to(up.dtype)
        u = torch.cat(us, dim=1) if us else None
        if u is not None and any(needs[::2]):
            da = ops_frozen.adapter_gradient(u, Quantized(x_data, x_scale))
            gradients[::2] = [
                part.to(a.dtype) if needed else None
                for part, a, needed in zip(da.split(ranks), downs, needs[::2], strict=True)
            ]
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            # dx = g · w + u · A
            dx = ops_frozen.frozen_linear_backward(g, ctx.weights, ctx.row_g, ctx.product, x_dtype)
            if u is not None:
                dx = dx.addmm_(u.to(x_dtype), torch.cat(downs).to(x_dtype))
        if ctx.needs_input_grad[1]:
            dbias = g.float().sum(dim=0).to(bias_dtype)
        return dx, dbias, *[None] * (before - 2), *gradients
