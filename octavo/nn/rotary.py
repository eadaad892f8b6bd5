"""q, k and v from the product that has them side by side, as one autograd function: `numerics/rotary.py`.

Its backward writes the gradients of q, k and v where the product's backward reads them: nothing is put together first.
Saved are cos and sin, which all layers share, and, only where heads have norms, qkv.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.numerics.rotary import Heads, Norms
from octavo.ops import rotary as ops


def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: Norms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, `[..., heads, D]`, from `qkv[..., (H + 2·G)·D]`, for `[B, S]` tokens or a row of them, `[T]`.

    `cos`, `sin`: `[B, S, D]`, `[1, S, D]` for sequences with the same positions, or `[T, D]`. `norms` of q and k have
    one eps, and weights in the dtype of qkv.
    """
    weights, how = ((None, None), (0.0, False)) if norms is None else ((norms[0].weight, norms[1].weight), norms[0][1:])
    q, k, v = _Rotary.apply(qkv, cos, sin, *weights, heads, how)
    return q, k, v


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        heads: Heads,
        how: tuple[float, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = qkv.reshape(-1, qkv.shape[-1])
        cos, sin = cos.reshape(-1, heads.width), sin.reshape(-1, heads.width)
        weights = [w for w in (q_weight, k_weight) if w is not None]
        found = ops.rotary(rows, cos, sin, weights, list(heads), *how)
        ctx.save_for_backward(rows if weights else None, cos, sin, *weights)
        ctx.heads, ctx.how, ctx.shape = heads, how, qkv.shape
        q, k, v = (x.view(*qkv.shape[:-1], *x.shape[1:]) for x in found)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, *weights = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[3:5])
        dq, dk, dv = (d.reshape(-1, *d.shape[-2:]) for d in (dq, dk, dv))
        eps, shifted = ctx.how
        dqkv, *dweights = ops.rotary_backward(
            dq, dk, dv, qkv, cos, sin, weights, list(ctx.heads), eps, shifted, needs
        )  # fmt: skip
        found = (d if needed else None for d, needed in zip(dweights, needs, strict=True))
        return dqkv.view(ctx.shape), None, None, *found, None, None
