"""The operators of the loss: cross entropy of a chunk of logits, forward and backward."""

import torch
from torch import Tensor

from octavo.numerics import cross_entropy as spec
from octavo.numerics.formats import get_format
from octavo.ops.register import operator
from octavo.support import has_fp8_tensor_cores


def _nothing() -> None:
    """Result of operators that write to an argument."""


def _cross_entropy_fake(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    return loss, torch.empty_like(loss)


@operator(fake=_cross_entropy_fake)
def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of every token, and the logarithm of its sum of exponentials."""
    if has_fp8_tensor_cores(logits.device):
        from octavo.kernels import cross_entropy as kernels  # brings Triton

        return kernels.cross_entropy(logits, labels)
    return spec.cross_entropy(logits, labels)


@operator(mutates=("logits",), fake=_nothing)
def cross_entropy_backward_(logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor) -> None:
    """Write the gradient of `factor × Σ loss` over the logits."""
    if has_fp8_tensor_cores(logits.device):
        from octavo.kernels import cross_entropy as kernels

        kernels.cross_entropy_backward_(logits, labels, lse, factor)
    else:
        logits.copy_(spec.cross_entropy_backward(logits, labels, lse, factor))


def _cross_entropy_quantize_fake(logits: Tensor, lse: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits, dtype=get_format(format).dtype), lse.new_empty(())


@operator(mutates=("columns",), fake=_cross_entropy_quantize_fake)
def cross_entropy_quantize(
    logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor, columns: Tensor | None, format: str
) -> tuple[Tensor, Tensor]:
    """The same gradient in FP8, as rows `[T, V]`; and with the same scale into `columns[V, T]`, if they are wanted."""
    if has_fp8_tensor_cores(logits.device):
        from octavo.kernels import cross_entropy as kernels

        rows = kernels.cross_entropy_quantize(logits, labels, lse, factor, get_format(format), columns)
    else:
        rows, transposed = spec.cross_entropy_quantize(logits, labels, lse, factor, get_format(format))
        if columns is not None:
            columns.copy_(transposed.data)
    return rows.data, rows.scale


@operator(mutates=("x",), fake=_nothing)
def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply x by the factor; on a GPU it costs nothing where that is 1."""
    if has_fp8_tensor_cores(x.device) and x.is_contiguous():
        from octavo.kernels import cross_entropy as kernels

        kernels.scale_(x, factor)
    else:
        x.mul_(factor)


@operator(mutates=("out",), fake=_nothing)
def product_(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """Write `a · b` to `out`, or add it; out in the dtype of a and b, or in FP32, where nothing is rounded before."""
    if out.dtype != a.dtype and out.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=int(add), out=out)
        return
    a, b = a.to(out.dtype), b.to(out.dtype)
    if add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)
