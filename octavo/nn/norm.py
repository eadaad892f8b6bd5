"""A norm joined to the product that follows it, in one autograd function: its backward takes x as the product saves it.

Autograd functions take tensors one by one, so a norm comes in as its weight and its eps, or as None and None.
"""

import torch
from torch import Tensor

from octavo.numerics.norm import Norm, rms_norm, rms_norm_backward, weight_gradient
from octavo.numerics.quantize import Quantized
from octavo.ops.quantize import is_high_precision, unpack_scale

NO_NORM = (None, None)


def normed(h: Tensor, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor | None]:
    """Return x, and 1 / rms of each row; h itself and None if there is no norm."""
    return (h, None) if weight is None or eps is None else rms_norm(h, Norm(weight, eps))


def normed_again(h: Tensor, weight: Tensor | None, inverse: Tensor | None) -> Tensor:
    """Return x from what was saved in high precision: the input of the norm, or x itself if there is none.

    Empty if nothing was saved, because nothing needs it.
    """
    return h if weight is None or inverse is None or h.numel() == 0 else weight * (h.float() * inverse).to(h.dtype)


def back_through(
    dx: Tensor, x: Quantized, weight: Tensor | None, eps: float | None, inverse: Tensor, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of h and of the norm's weight, from dx and from x as it was saved, maybe with padding rows.

    In high precision, h was saved in its place. Without a norm, dx is the gradient of h.
    """
    if weight is None or eps is None:
        return dx if needs[0] else None, None
    if not any(needs):  # then nothing was saved for it
        return None, None
    norm = Norm(weight, eps)
    normed = None
    if is_high_precision(x):
        normed = x.data.float() * inverse
        saved = weight.float() * normed
    else:
        saved = Quantized(x.data, unpack_scale(x.scale)).dequantize(torch.float32)[: dx.shape[0]]
    dh = rms_norm_backward(dx, saved, norm, inverse, normed) if needs[0] else None
    return dh, weight_gradient(dx, saved, norm) if needs[1] else None
