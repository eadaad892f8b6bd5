"""LoRA beside weights frozen in FP8: y = x · wᵀ + b + s · (x · Aᵀ) · Bᵀ, as one autograd function.

Shapes: M tokens, K inputs, N outputs, R the rank of an adapter, ΣR of all of them.

    forward    xq_MK → y_MN = xq · wqᵀ                 t_MΣR = x · [A₁; A₂; …]ᵀ        yᵢ += sᵢ · tᵢ · Bᵢᵀ
    backward   gq_MN → dx_MK = gq · wq                 uᵢ = sᵢ · gᵢ · Bᵢ               dx += u · [A₁; A₂; …]
                                                       dBᵢ = sᵢ · gᵢᵀ · tᵢ             dA = uᵀ · xq
    kept       xq_MK in FP8 and t_MΣR, which is narrow; x itself only where something else keeps it anyway

Where products are in high precision (`Product.in_fp8`), w is what wq dequantises to, x and g are taken as they are, and
x is kept, or in its place what went into the norm.

With a norm before it, x = norm(h), and h need not be kept: xq serves the norm's backward, too (`numerics/norm.py`).

Each adapter has a part of the outputs: q, k and v are one weight with three adapters, whose down-projections read x
once. The adapters multiply in the dtype of the activations, whatever they are kept in.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.nn.norm import back_through, normed, normed_again, parts_of
from octavo.nn.versions import check_versions, versions_of
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized
from octavo.ops import lora as ops_lora
from octavo.ops.adapters import Adapter, Adapters
from octavo.ops.gemm import Product
from octavo.ops.quantize import as_dtype

__all__ = ["Adapter", "Adapters", "frozen_lora"]


def frozen_lora(
    x: Tensor,
    weights: Sequence[Quantized],
    bias: Tensor | None,
    product: Product,
    rows: tuple[Tensor, Tensor],
    adapters: Adapters,
    *,
    x_is_kept: bool = False,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`x[..., K]` times frozen weights `[Nᵢ, K]` side by side, plus adapters.

    `rows`: of x and of g. `x_is_kept`: something else keeps x for its own backward, so it costs no memory here, either.
    `norm`: comes before all that; its weight is not trained. `residual[..., ΣN]`: is added to what comes out.
    """
    needed = any(a.requires_grad for a in adapters.downs) or (norm is not None and x.requires_grad)
    keep = torch.is_grad_enabled() and needed
    count = len(weights), len(adapters.places)
    flat = None if residual is None else residual.reshape(-1, residual.shape[-1])
    as_it_is = not product.in_fp8 or (x_is_kept and norm is None)
    y = _FrozenLora.apply(
        x.reshape(-1, x.shape[-1]), bias, flat, *parts_of(norm), product, adapters.places,
        (keep, as_it_is), *rows, count, *(part for weight in weights for part in weight),
        *adapters.downs, *adapters.ups,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], y.shape[-1])


class _FrozenLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_eps: float | None,
        product: Product,
        places: tuple[Adapter, ...],
        keep: tuple[bool, bool],
        row_x: Tensor,
        row_g: Tensor,
        count: tuple[int, int],
        *tensors: Tensor,
    ) -> Tensor:
        weights, adapters = _sort(tensors, *count, places)
        keep_x, as_it_is = keep
        h, x_dtype = x, x.dtype
        x, inverse = normed(h, norm_weight, norm_eps)
        x = x if product.in_fp8 else as_dtype(x, product.out_dtype)
        y, x_q, t = ops_lora.lora_linear(
            x, weights, bias, row_x, adapters, product, keep=keep_x and not as_it_is, residual=residual
        )
        kept = (x if inverse is None else h, x_q.scale) if keep_x and as_it_is else x_q
        ctx.save_for_backward(*kept, t, inverse, norm_weight, *adapters.downs, *adapters.ups)
        ctx.weights, ctx.row_g, ctx.product, ctx.places, ctx.eps = weights, row_g, product, places, norm_eps
        ctx.versions = versions_of(tensors[: 2 * len(weights)])
        ctx.like = (x_dtype, bias.dtype if bias is not None else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        check_versions([part for weight in ctx.weights for part in weight], ctx.versions)
        x_data, x_scale, t, inverse, norm_weight, *matrices = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.like
        _, adapters = _sort(matrices, 0, len(ctx.places), ctx.places)
        before = 11 + 2 * len(ctx.weights)
        needs = ctx.needs_input_grad[before:]
        needs_x, needs_bias, needs_residual = ctx.needs_input_grad[:3]
        half = len(ctx.places)
        x = x_data if ctx.product.in_fp8 else normed_again(x_data, norm_weight, inverse)
        dx, da, db = ops_lora.lora_linear_backward(
            g, ctx.row_g, Quantized(x, x_scale), t, ctx.weights, adapters, ctx.product,
            needs=(needs_x, any(needs[:half]), any(needs[half:])), dtype=x_dtype,
        )  # fmt: skip
        kept = Quantized(x_data, x_scale)
        dh, _ = back_through(dx, kept, norm_weight, ctx.eps, inverse, needs=(needs_x, False))
        found = adapters.split(da, db)
        gradients = [d if needed else None for d, needed in zip(found, needs, strict=True)]
        dbias = g.float().sum(dim=0).to(bias_dtype) if needs_bias else None
        dresidual = g if needs_residual else None
        return dh, dbias, dresidual, *[None] * (before - 3), *gradients


def _sort(
    tensors: Sequence[Tensor], weights: int, adapters: int, places: tuple[Adapter, ...]
) -> tuple[list[Quantized], Adapters]:
    """Weights with their scales, then all A, then all B."""
    first = 2 * weights
    downs, ups = tensors[first : first + adapters], tensors[first + adapters :]
    return [Quantized(*tensors[2 * i : 2 * i + 2]) for i in range(weights)], Adapters(places, tuple(downs), tuple(ups))
