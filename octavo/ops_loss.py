"""The operations of the loss, beside those of `ops.py`: cross entropy of a chunk of logits, forward and backward."""

import torch
from torch import Tensor

from octavo.numerics import Quantized
from octavo.numerics import cross_entropy as spec
from octavo.numerics.formats import Format, get_format
from octavo.ops import install
from octavo.support import has_fp8_tensor_cores

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
_LIBRARY.define("cross_entropy(Tensor logits, Tensor labels) -> (Tensor, Tensor)")
_LIBRARY.define("cross_entropy_backward_(Tensor(a!) logits, Tensor labels, Tensor lse, Tensor factor) -> ()")
_LIBRARY.define(
    "cross_entropy_quantize(Tensor logits, Tensor labels, Tensor lse, Tensor factor, Tensor(a!)? columns, str format) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define("scale_(Tensor(a!) x, Tensor factor) -> ()")


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every token, and the logarithm of its sum of exponentials."""
    return torch.ops.octavo.cross_entropy(logits, labels)


def cross_entropy_backward_(logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor) -> Tensor:
    """The gradient of `factor × Σ loss`, in place of the logits."""
    torch.ops.octavo.cross_entropy_backward_(logits, labels, lse, factor)
    return logits


def cross_entropy_quantize(
    logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor, columns: Tensor | None, format: Format
) -> Quantized:
    """The same gradient in FP8, as rows `[T, V]`; and with the same scale into `columns[V, T]`, if they are wanted."""
    return Quantized(*torch.ops.octavo.cross_entropy_quantize(logits, labels, lse, factor, columns, format.name))


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """`x *= factor`; on a GPU it costs nothing where the factor is 1."""
    torch.ops.octavo.scale_(x, factor)
    return x


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if has_fp8_tensor_cores(logits.device):
        from octavo.kernels import cross_entropy as kernels  # brings Triton

        return kernels.cross_entropy(logits, labels)
    return spec.cross_entropy(logits, labels)


def _cross_entropy_backward_(logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor) -> None:
    if has_fp8_tensor_cores(logits.device):
        from octavo.kernels import cross_entropy as kernels

        kernels.cross_entropy_backward_(logits, labels, lse, factor)
    else:
        logits.copy_(spec.cross_entropy_backward(logits, labels, lse, factor))


def _cross_entropy_quantize(
    logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor, columns: Tensor | None, format: str
) -> tuple[Tensor, Tensor]:
    if has_fp8_tensor_cores(logits.device):
        from octavo.kernels import cross_entropy as kernels

        rows = kernels.cross_entropy_quantize(logits, labels, lse, factor, get_format(format), columns)
    else:
        rows, turned = spec.cross_entropy_quantize(logits, labels, lse, factor, get_format(format))
        if columns is not None:
            columns.copy_(turned.data)
    return rows.data, rows.scale


def _scale_(x: Tensor, factor: Tensor) -> None:
    if has_fp8_tensor_cores(x.device) and x.is_contiguous():
        from octavo.kernels import cross_entropy as kernels

        kernels.scale_(x, factor)
    else:
        x.mul_(factor)


def _cross_entropy_fake(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    return loss, torch.empty_like(loss)


def _cross_entropy_quantize_fake(
    logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor, columns: Tensor | None, format: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits, dtype=get_format(format).dtype), lse.new_empty(())


for _name, _implementation, _fake in (
    ("cross_entropy", _cross_entropy, _cross_entropy_fake),
    ("cross_entropy_backward_", _cross_entropy_backward_, lambda *_: None),
    ("cross_entropy_quantize", _cross_entropy_quantize, _cross_entropy_quantize_fake),
    ("scale_", _scale_, lambda *_: None),
):
    install(_LIBRARY, _name, _implementation, _fake)
