"""The operations of frozen FP8 linears with adapters: one operator, either way. (`ops_lora_mlp.py` has the MLP.)

    y = x · wᵀ + b,   yᵢ += sᵢ · (x · Aᵢᵀ) · Bᵢᵀ     for each adapter i, which has a part of the outputs

Shapes: M tokens, K inputs, N outputs, F hidden, R the rank of an adapter, ΣR of several. The adapters multiply in the
dtype of the activations. Their down-projections read x once; their up-projections add in the epilogue of their product,
and in the MLP's hidden layer, where outputs are widest, within the kernel of the activation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
from octavo.ops.adapters import Adapters, Gradients, add_to, add_to_input, narrowed
from octavo.ops.frozen import as_operand, first_rows, lists, side_by_side, times, turn
from octavo.ops.gemm import Product
from octavo.ops.linear import empty, fake_padded, padded
from octavo.ops.quantize import fake_quantize, pack_scale
from octavo.ops.register import install

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
_LIBRARY.define(
    "lora_linear(Tensor x, Tensor(a!) row_x, Tensor[] weights, Tensor[] scales, Tensor? bias, Tensor? residual, "
    "Tensor[] downs, Tensor[] ups, str adapters, str recipe_x, bool record, bool keep, ScalarType dtype, bool fast, "
    "bool emulate) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "lora_linear_backward(Tensor g, Tensor(a!) row_g, Tensor x, Tensor x_scale, Tensor t, Tensor[] weights, "
    "Tensor[] scales, Tensor[] downs, Tensor[] ups, str adapters, str recipe_g, bool[] needs, ScalarType dtype, "
    "bool fast, bool emulate) -> (Tensor, Tensor, Tensor)"
)


def lora_linear(
    x: Tensor, weights: Sequence[Quantized], bias: Tensor | None, row_x: Tensor, adapters: Adapters, how: Product,
    *, keep: bool, residual: Tensor | None = None,
) -> tuple[Tensor, Quantized, Tensor]:  # fmt: skip
    """y of `x[M, K]`, plus `residual`; x as rows in FP8 if it is to be kept so; `x · Aᵀ` of all adapters."""
    y, data, scale, t = torch.ops.octavo.lora_linear(
        x, row_x, *lists(weights), bias, residual, *adapters.given, how.frozen_recipes[0], how.record, keep,
        how.out_dtype, how.fast_forward, how.emulate,
    )  # fmt: skip
    return y, Quantized(data, scale), t


def lora_linear_backward(
    g: Tensor, row_g: Tensor, x: Quantized, t: Tensor, weights: Sequence[Quantized], adapters: Adapters, how: Product,
    *, needs: Sequence[bool], dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx in `dtype`, and the gradients of all A and of all B: see `Adapters.split`. Empty where not needed.

    x: what was kept, or in high precision with an empty scale. `needs`: of x, of any A, of any B.
    """
    return torch.ops.octavo.lora_linear_backward(
        g, row_g, *x, t, *lists(weights), *adapters.given, how.frozen_recipes[1], list(needs), dtype, how.fast_backward,
        how.emulate,
    )  # fmt: skip


def _lora_linear(
    x: Tensor, row_x: Tensor, weights: list[Tensor], scales: list[Tensor], bias: Tensor | None,
    residual: Tensor | None, downs: list[Tensor], ups: list[Tensor], adapters: str, recipe_x: str, record: bool,
    keep: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    low = Adapters.decode(downs, ups, adapters)
    x_q = as_operand(padded(x, emulate or not recipe_x), row_x, recipe_x, record, dtype)
    # y = x · wᵀ
    y = times(x_q, side_by_side(weights, scales, recipe_x, dtype), bias, dtype, fast, emulate)
    y = first_rows(y, x.shape[0])
    t = narrowed(x, low, dtype)
    add_to(y, t, low, residual)
    kept = (x_q.data, pack_scale(x_q.scale)) if keep else empty(x, 2)
    return y, *kept, t


def _lora_linear_backward(
    g: Tensor, row_g: Tensor, x: Tensor, x_scale: Tensor, t: Tensor, weights: list[Tensor], scales: list[Tensor],
    downs: list[Tensor], ups: list[Tensor], adapters: str, recipe_g: str, needs: list[bool], dtype: torch.dtype,
    fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    low = Adapters.decode(downs, ups, adapters)
    needs_x, needs_a, needs_b = needs
    gradients = Gradients(low, g, needs_a=needs_a, needs_b=needs_b)
    u = gradients.widen(g, t)
    if needs_a:
        gradients.add_a(u, Quantized(x, x_scale))
    if needs_x:
        turned = turn(side_by_side(weights, scales, recipe_g, g.dtype))
        dx = turned.dgrad(g, row_g, recipe_g, dtype, fast, emulate)
        if downs:
            add_to_input(dx, u, low.down(dtype))
    else:
        (dx,) = empty(g, 1)
    return dx, *gradients.result()


def fake_kept(x: Tensor, recipe: str, keep: bool, emulate: bool) -> tuple[Tensor, Tensor]:
    if not keep:
        return x.new_empty(0), x.new_empty(0)
    return fake_quantize(fake_padded(x, emulate), OperandRecipe.decode(recipe), transpose=False)


def fake_narrowed(x: Tensor, downs: list[Tensor], rows: int | torch.SymInt, dtype: torch.dtype) -> Tensor:
    return x.new_empty([rows, sum(a.shape[0] for a in downs)] if downs else [0], dtype=dtype)


def fake_gradients(
    like: Tensor, downs: list[Tensor], ups: list[Tensor], needs_a: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    k = downs[0].shape[1] if downs else 0
    shape = [sum(a.shape[0] for a in downs), k] if needs_a else [0]
    size = [sum(b.numel() for b in ups)] if needs_b else [0]
    a_dtype, b_dtype = (downs[0].dtype if needs_a else like.dtype), (ups[0].dtype if needs_b else like.dtype)
    return like.new_empty(shape, dtype=a_dtype), like.new_empty(size, dtype=b_dtype)


def _lora_linear_fake(
    x: Tensor, row_x: Tensor, weights: list[Tensor], scales: list[Tensor], bias: Tensor | None,
    residual: Tensor | None, downs: list[Tensor], ups: list[Tensor], adapters: str, recipe_x: str, record: bool,
    keep: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    y = x.new_empty([x.shape[0], sum(w.shape[0] for w in weights)], dtype=dtype)
    return y, *fake_kept(x, recipe_x, keep, emulate), fake_narrowed(x, downs, x.shape[0], dtype)


def _lora_linear_backward_fake(
    g: Tensor, row_g: Tensor, x: Tensor, x_scale: Tensor, t: Tensor, weights: list[Tensor], scales: list[Tensor],
    downs: list[Tensor], ups: list[Tensor], adapters: str, recipe_g: str, needs: list[bool], dtype: torch.dtype,
    fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = g.new_empty([g.shape[0], weights[0].shape[1]], dtype=dtype) if needs[0] else g.new_empty(0)
    return dx, *fake_gradients(g, downs, ups, *needs[1:])


for _name, _implementation, _fake in (
    ("lora_linear", _lora_linear, _lora_linear_fake),
    ("lora_linear_backward", _lora_linear_backward, _lora_linear_backward_fake),
):
    install(_LIBRARY, _name, _implementation, _fake)
