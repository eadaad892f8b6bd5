"""RMS norms: one by itself, after an addition if there is one; and one joined to the product that follows it.

A norm by itself is one autograd function, which hands on the residual stream beside what comes out of the norm: so the
gradients of both come back to one place, and are added where the norm's is computed.

Joined, it is part of the autograd function of the product: its backward takes x as the product saves it. Autograd
functions take tensors one by one, so a norm comes in as its weight and its eps, or as None and None.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized
from octavo.ops import norm as ops


def rms_norm(h: Tensor, norm: Norm, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return h + y, or h if there is no y, and x, the norm of it.

    The norm's weight has the dtype of h. Use the returned h in the place of the given one: then its gradient costs no
    addition.
    """
    total, x = _RMSNorm.apply(h, y, *norm)
    return total, x


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, y: Tensor | None, weight: Tensor, eps: float, shifted: bool
    ) -> tuple[Tensor, Tensor]:
        # The width of h is the weight's, but under `dynamic=True` torch 2.11 loses a size that becomes a constant.
        width = weight.shape[0]
        rows, more = h.reshape(-1, width), None if y is None else y.reshape(-1, width)
        total, x, inverse = ops.rms_norm(rows, more, weight, eps, shifted)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows if y is None else total, inverse, weight)
        ctx.how = eps, shifted
        return h if y is None else total.view(h.shape), x.view(h.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, residual: Tensor | None, g: Tensor | None) -> tuple[Tensor | None, ...]:
        h, inverse, weight = ctx.saved_tensors
        needs_h, needs_y, needs_weight = ctx.needs_input_grad[:3]
        if g is None:
            return residual if needs_h else None, residual if needs_y else None, None, None, None
        needs = [needs_h or needs_y, needs_weight]
        along = None if residual is None else residual.reshape(h.shape)
        dx, empty, (eps, shifted) = g.reshape(h.shape), h.new_empty(0), ctx.how
        dh, dweight = ops.norm_gradients(dx, h, empty, weight, eps, shifted, inverse, along, needs)
        dh = dh.view(g.shape) if needs[0] else dh
        return dh if needs_h else None, dh if needs_y else None, dweight if needs_weight else None, None, None


NO_NORM = (None, None)


def normed(h: Tensor, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor | None]:
    """Return x, and 1 / rms of each row; h itself and None if there is no norm."""
    if weight is None or eps is None:
        return h, None
    _, x, inverse = ops.rms_norm(h, None, weight, eps, False)
    return x, inverse


def normed_again(h: Tensor, weight: Tensor | None, inverse: Tensor | None) -> Tensor:
    """Return x from what was saved in high precision: the input of the norm, or x itself if there is none.

    Empty if nothing was saved, because nothing needs it.
    """
    return h if weight is None or inverse is None or h.numel() == 0 else weight * (h.float() * inverse).to(h.dtype)


def back_through(
    dx: Tensor,
    x: Quantized,
    weight: Tensor | None,
    eps: float | None,
    inverse: Tensor,
    residual: Tensor | None,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of h, plus `residual`, and of the norm's weight; x as it was saved, maybe with padding rows.

    In high precision, h was saved in its place. Without a norm, dx is the gradient of h.
    """
    if weight is None or eps is None:
        return _sum(dx, residual) if needs[0] else None, None
    if not any(needs):  # then nothing was saved for it
        return None, None
    dh, dweight = ops.norm_gradients(dx, x.data, x.scale, weight, eps, False, inverse, residual, list(needs))
    return dh if needs[0] else None, dweight if needs[1] else None


def _sum(dx: Tensor, residual: Tensor | None) -> Tensor:
    return dx if residual is None else dx + residual
