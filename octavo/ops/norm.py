"""RMS norm, and its gradients: by the kernel on a GPU, else by the specification."""

import torch
from torch import Tensor

from octavo.numerics import norm as spec
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized
from octavo.ops.quantize import unpack_scale
from octavo.ops.register import operator, or_empty
from octavo.support import has_fp8_tensor_cores


def _rms_norm_fake(h: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    total = h.new_empty(0) if y is None else h.new_empty(h.shape)
    return total, h.new_empty(h.shape), h.new_empty([h.shape[0], 1], dtype=torch.float32)


@operator(fake=_rms_norm_fake)
def rms_norm(h: Tensor, y: Tensor | None, weight: Tensor, eps: float, shifted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """h + y, empty if there is no y; x of that, or of `h[M, K]`; and 1 / rms of each row.

    All in the dtype of h, which y and the weight have, too.
    """
    norm = Norm(weight, eps, shifted)
    if has_fp8_tensor_cores(h.device):
        from octavo.kernels import norm as kernels  # brings Triton

        if kernels.can_norm(h, weight, y):
            if y is None:
                return h.new_empty(0), *kernels.rms_norm(h, norm)
            return kernels.add_rms_norm(h, y, norm)
    return (h.new_empty(0), *spec.rms_norm(h, norm)) if y is None else spec.add_rms_norm(h, y, norm)


def _norm_gradients_fake(g: Tensor, weight: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor]:
    dh = g.new_empty(g.shape) if needs[0] else g.new_empty(0)
    return dh, weight.new_empty(weight.shape) if needs[1] else g.new_empty(0)


@operator(fake=_norm_gradients_fake)
def norm_gradients(
    g: Tensor,
    saved: Tensor,
    scale: Tensor,
    weight: Tensor,
    eps: float,
    shifted: bool,
    inverse: Tensor,
    residual: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """dh plus `residual`, and the gradient of the weight; empty where not needed; see `numerics.norm.norm_gradients`.

    `saved`, `scale`: x in FP8 and its packed scale, or h and an empty one.
    """
    norm, kept = Norm(weight, eps, shifted), Quantized(saved, unpack_scale(scale))
    wanted = (needs[0], needs[1])
    found = None
    if has_fp8_tensor_cores(g.device):
        from octavo.kernels import norm as kernels

        g = g.contiguous()
        if kernels.can_norm(g, weight, residual) and kernels.can_read(kept):
            found = kernels.norm_gradients(g, kept, norm, inverse, residual, needs=wanted)
    dh, dweight = found or spec.norm_gradients(g, kept, norm, inverse, residual, needs=wanted)
    return or_empty(dh, g), or_empty(dweight, g)
