"""The torch functions that the autocast replaces, each in terms of one `multiply`.

`multiply(op, a, b, bias=..., b_is_nk=...)` returns `a @ b + bias` (`a @ bᵀ`) in FP8, or a string: the reason why it
cannot run in FP8. Each function here has the signature of the torch function it replaces, after `multiply`, and returns
a tensor or such a reason; torch then computes the function, or raises its own error. Arguments that torch refuses are
therefore a reason as well: `mm` of three dimensions could be multiplied, but is a mistake. `FUNCTIONS` maps each torch
function to its replacement.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.nn.attention import fp8_attention
from octavo.nn.einsum import VECTOR, einsum

Multiply = Callable[..., "Tensor | str"]
OUT = "out= names the result's memory"
MISFIT = "arguments that do not fit, or that torch alone takes"


def _matmul(
    multiply: Multiply, input: Tensor, other: Tensor, *extra: Any, out: Tensor | None = None, **more: Any
) -> Tensor | str:
    return _refused(out, extra, more) or multiply("matmul", input, other)


def _rmatmul(multiply: Multiply, input: Tensor, other: Tensor) -> Tensor | str:
    return multiply("matmul", other, input)


def _mm(
    multiply: Multiply, input: Tensor, mat2: Tensor, *extra: Any, out: Tensor | None = None, **more: Any
) -> Tensor | str:
    return _refused(out, extra, more) or _misfits(2, input, mat2) or multiply("mm", input, mat2)


def _bmm(
    multiply: Multiply, input: Tensor, mat2: Tensor, *extra: Any, out: Tensor | None = None, **more: Any
) -> Tensor | str:
    return _refused(out, extra, more) or _misfits(3, input, mat2) or multiply("bmm", input, mat2)


def _addmm(
    multiply: Multiply,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *extra: Any,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    **more: Any,
) -> Tensor | str:
    reason = _refused(out, extra, more) or _misfits(2, mat1, mat2) or _cannot_add(input, mat1, mat2, beta, alpha)
    return reason or _add(input, multiply("addmm", mat1, mat2), beta, alpha)


def _baddbmm(
    multiply: Multiply,
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *extra: Any,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    **more: Any,
) -> Tensor | str:
    reason = (
        _refused(out, extra, more) or _misfits(3, batch1, batch2) or _cannot_add(input, batch1, batch2, beta, alpha)
    )
    return reason or _add(input, multiply("baddbmm", batch1, batch2), beta, alpha)


def _linear(multiply: Multiply, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | str:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or (bias is not None and not _is_bias(bias, input, weight)):
        return MISFIT
    return multiply("linear", input, weight, bias=bias, b_is_nk=True)


def _einsum(multiply: Multiply, *args: Any) -> Tensor | str:
    operands = args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    return einsum(partial(multiply, "einsum"), args[0], list(operands))


def _attention(multiply: Multiply, *args: Any, **kwargs: Any) -> Tensor | str:
    return fp8_attention(partial(multiply, "attention"), *args, **kwargs)


def _refused(out: Tensor | None, extra: tuple[Any, ...], more: dict[str, Any]) -> str:
    """Return why arguments beyond the operands leave the call to torch: `out=`, a dtype, or an old signature."""
    return OUT if out is not None else MISFIT if extra or more else ""


def _misfits(dim: int, a: Tensor, b: Tensor) -> str:
    """Return a reason unless both are matrices (`dim` 2) or batches (3) of equal size: only matmul broadcasts."""
    fits = (
        isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim() == dim and a.shape[:-2] == b.shape[:-2]
    )
    return "" if fits else MISFIT


def _cannot_add(input: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> str:
    """Return a reason unless `beta * input` can be added to `alpha * a @ b` as torch does."""
    shape = (*a.shape[:-1], b.shape[-1])
    fits = (
        all(isinstance(factor, int | float) for factor in (beta, alpha))
        and _is_like(input, a)
        and input.dim() <= len(shape)
        and all(n in (1, wanted) for n, wanted in zip(reversed(input.shape), reversed(shape), strict=False))
    )
    return "" if fits else MISFIT


def _is_bias(bias: Tensor, input: Tensor, weight: Tensor) -> bool:
    return _is_like(bias, input) and bias.shape == weight.shape[:1]


def _is_like(x: Tensor, other: Tensor) -> bool:
    """Return True if the two can be added: on one device, and of one dtype unless torch's autocast casts them."""
    if not isinstance(x, Tensor) or not isinstance(other, Tensor) or x.device != other.device:
        return False
    return x.dtype == other.dtype or (x.is_floating_point() and torch.is_autocast_enabled(x.device.type))


def _add(input: Tensor, product: Tensor | str, beta: float, alpha: float) -> Tensor | str:
    if isinstance(product, str):
        return product
    product = product if alpha == 1 else product * alpha
    # With beta = 0 torch does not read the input: a NaN in it does not propagate.
    return product if beta == 0 else product + (beta * input).to(product.dtype)


def _not_taken(reason: str) -> Callable[..., str]:
    return lambda *_, **__: reason


_IN_PLACE = "in place: write it as addmm or baddbmm"
_UNWRITTEN = "not covered: write it as matmul or einsum"
_RECURRENT = "recurrent layers compute inside one call"
_CONVOLUTION = "convolutions stay in high precision"

FUNCTIONS: dict[Callable[..., Any], Callable[..., "Tensor | str"]] = {
    torch.matmul: _matmul,
    torch.linalg.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    torch.einsum: _einsum,
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.mv, Tensor.mv, torch.addmv, Tensor.addmv), _not_taken(VECTOR)),
    **dict.fromkeys((Tensor.addmm_, Tensor.baddbmm_, Tensor.addbmm_), _not_taken(_IN_PLACE)),
    **dict.fromkeys(
        (
            torch.addbmm,
            Tensor.addbmm,
            torch.tensordot,
            F.bilinear,
            torch.inner,
            torch.chain_matmul,
            torch.linalg.multi_dot,
        ),
        _not_taken(_UNWRITTEN),
    ),
    **dict.fromkeys(
        (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.gru_cell), _not_taken(_RECURRENT)
    ),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _not_taken(_CONVOLUTION)),
    F.multi_head_attention_forward: _not_taken("nn.MultiheadAttention computes inside one call"),
}
