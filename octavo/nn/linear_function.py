"""Linears that share one input as one product: y = x · [w₁; w₂; …]ᵀ + b, as one autograd function.

Shapes: M tokens, K inputs, N outputs of all the weights together, R the rank of an adapter, ΣR of all of them.

    forward    x_MK → xq_MK, xqT_KM        y_MN  = xq · wqᵀ
    backward   g_MN → gq_MN, gqT_NM        dx_MK = gq · wq
                                           dw_NK = gqT · xqTᵀ
    saved      xqT_KM in FP8, and the weights themselves, which are in memory anyway and quantised anew; unless they are
               FP8-only (`groups.py`): then wq_NK is all there is

A linear alone is a group of one; q, k and v are a group of three with one quantised input and one GEMM. Each weight
stays a Parameter of its own: quantising writes a new buffer anyway, so it writes them side by side. Per tensor the
group has one scale, from the amax of all, because dx contracts over all of N. `ops.weight.Weight` says what becomes of
a weight that is FP8-only or frozen.

With a norm before it, x = norm(h), and h need not be saved: xq_MK serves the norm's backward, too (`numerics/norm.py`),
and is transposed for dw. That takes one scale for all of x.

LoRA adapters, each for a part of the outputs, read x once, whatever state the weight is in:

    forward    t_MΣR = x · [A₁; A₂; …]ᵀ        yᵢ += sᵢ · tᵢ · Bᵢᵀ
    backward   uᵢ = sᵢ · gᵢ · Bᵢ               dx += u · [A₁; A₂; …]
               dBᵢ = sᵢ · gᵢᵀ · tᵢ             dA = uᵀ · xq
    saved      xq_MK in FP8 and t_MΣR, which is narrow; x itself only where something else saves it anyway

They multiply in the dtype of the activations. Where products are in high precision (`LinearSpec.x` is None), w is what
the frozen wq dequantises to, x and g are taken as they are, and x is saved, or in its place the input of the norm.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.nn.gathered import gathered_again, is_gathered
from octavo.nn.norm import NO_NORM, back_through, normed, normed_again
from octavo.nn.shapes import with_leading
from octavo.nn.versions import check_versions, versions_of, viewed
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized
from octavo.ops import linear as ops
from octavo.ops.adapters import NO_ADAPTERS, Adapter, Adapters
from octavo.ops.linear import Call, LinearSpec
from octavo.ops.quantize import as_dtype
from octavo.ops.weight import Weight

States = tuple[Tensor, Tensor]
AS_IS = "as it is"  # x is saved in high precision, or the input of the norm before it


def linear(
    x: Tensor,
    weight: Weight,
    spec: LinearSpec,
    states: States,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    adapters: Adapters = NO_ADAPTERS,
    residual: Tensor | None = None,
    x_is_saved: bool = False,
) -> Tensor:
    """Compute `x[..., K]` times the weights `[Nᵢ, K]` side by side, `[..., N]`.

    `states`: scaling state of x and of the gradient. `norm`: x goes through it first. `residual[..., N]`: is added to
    the result. `x_is_saved`: something else saves x for its own backward, so that it costs no memory here, either.
    """
    return linear_and_input(
        x, weight, spec, states, bias=bias, norm=norm, adapters=adapters, residual=residual, x_is_saved=x_is_saved
    )[0]


def linear_and_input(
    x: Tensor,
    weight: Weight,
    spec: LinearSpec,
    states: States,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    adapters: Adapters = NO_ADAPTERS,
    residual: Tensor | None = None,
    x_is_saved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `linear` does, and x, to be used in the place of the given one.

    If there is a norm, the gradients of both come back to one place, and are added where the norm's is computed.
    """
    flat = None if residual is None else residual.reshape(-1, residual.shape[-1])
    if not torch.is_grad_enabled():
        return _without_gradients(x, weight, spec, states[0], bias, norm, adapters, flat), x
    save_x = how_to_save(x, weight, spec, norm, adapters, x_is_saved=x_is_saved)
    stored = (*weight.parts, *weight.scales) if weight.is_stored else ()
    trained = weight.trained
    counts = len(trained), len(adapters.positions), len(weight.parts)
    y, h = _Linear.apply(
        x.reshape(-1, x.shape[-1]), bias, flat, *(NO_NORM if norm is None else norm[:2]), spec, save_x,
        adapters.positions, counts, tuple(weight.sources), *states, weight.state, *trained, *adapters.downs,
        *adapters.ups, *stored,
    )  # fmt: skip
    return with_leading(y, x.shape[:-1]), x if h is None else h.reshape(x.shape)


def _without_gradients(
    x: Tensor,
    weight: Weight,
    spec: LinearSpec,
    state_x: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    adapters: Adapters,
    residual: Tensor | None,
) -> Tensor:
    """Nothing is saved, and the norm is part of the operator."""
    rows = x.reshape(-1, x.shape[-1])
    norm_weight, eps = (None, 0.0) if norm is None else norm[:2]
    call = Call.encode(spec, "", False, x.dtype, adapters)
    y = ops.linear(
        rows if spec.x or norm else as_dtype(rows, spec.out_dtype), state_x, list(weight.parts), list(weight.scales),
        weight.state, bias, residual, norm_weight, eps, adapters.matrices, call,
    )[0]  # fmt: skip
    return with_leading(y, x.shape[:-1])


def how_to_save(
    x: Tensor, weight: Weight, spec: LinearSpec, norm: Norm | None, adapters: Adapters, *, x_is_saved: bool = False
) -> str:
    """Say how x is to be saved: "rows" or "columns" in FP8, `AS_IS`, or "" for not at all.

    Not asked inside an autograd function: there, gradients are never enabled.
    """
    if not torch.is_grad_enabled():
        return ""
    is_trained = any(w.requires_grad for w in weight.trained)
    for_norm = norm is not None and (x.requires_grad or norm.weight.requires_grad)
    if for_norm or any(a.requires_grad for a in adapters.downs):
        # Columns for dw can be had from rows that share one scale, or from x.
        if spec.x is None or (is_trained and spec.x.granularity != "tensor" and adapters.downs):
            return AS_IS
        return AS_IS if x_is_saved and norm is None and not is_trained else "rows"
    return "columns" if is_trained else ""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_eps: float | None,
        spec: LinearSpec,
        save_x: str,
        positions: tuple[Adapter, ...],
        counts: tuple[int, int, int],
        sources: tuple[Tensor, ...],
        state_x: Tensor,
        state_g: Tensor,
        state_w: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """y, and x if a norm comes before: what else is added to that gradient costs no pass of its own."""
        trained, adapters, stored = _sort(tensors, counts, positions)
        parts, scales = (stored[: counts[2]], stored[counts[2] :]) if stored else (trained, [])
        h = x
        x, inverse = (h, None) if norm_weight is None else normed(h, norm_weight, norm_eps)
        x = x if spec.x else as_dtype(x, spec.out_dtype)
        call = Call.encode(spec, "" if save_x == AS_IS else save_x, True, h.dtype, adapters)
        y, *saved, t, w_scale = ops.linear(
            x, state_x, list(parts), list(scales), state_w, bias, residual, None, 0.0, adapters.matrices, call
        )
        if save_x == AS_IS:
            saved = [x if inverse is None else h, *saved[1:]]
        # Nothing is saved that is empty: each tensor costs time.
        used = w_scale if trained and spec.w is not None and spec.w.delayed and not stored else None
        # A trained weight is saved as tensors are. A frozen one is not: `versions.py` says why. Scaling state is not,
        # either: it changes with every use, which autograd's version check would take for a mistake.
        ctx.save_for_backward(
            *(saved if save_x else (None, None)), t if positions else None, used, inverse, norm_weight,
            *adapters.downs, *adapters.ups, *(parts if trained and not is_gathered(trained) else ()),
        )  # fmt: skip
        ctx.frozen, ctx.scales = (sources, ()) if sources else (() if trained else parts, scales)
        ctx.dtypes = tuple(tensor.dtype for tensor in stored) if sources else ()
        ctx.gathered = trained if is_gathered(trained) else ()
        ctx.states = state_g, state_w
        ctx.versions = () if trained else versions_of(sources or stored)
        ctx.spec, ctx.call, ctx.save_x, ctx.eps = spec, call, save_x, norm_eps
        ctx.positions, ctx.counts = positions, counts
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y, h if inverse is not None else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, passing: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return passing, *[None] * (len(ctx.needs_input_grad) - 1)
        x_data, x_scale, t, w_scale, inverse, norm_weight, *rest = ctx.saved_tensors
        count, low, _ = ctx.counts
        matrices, parts, given = rest[: 2 * low], rest[2 * low :] or ctx.frozen, ctx.scales
        if ctx.gathered:
            parts, given = gathered_again(ctx.gathered)
        needs_x, needs_bias, needs_residual, needs_norm = ctx.needs_input_grad[:4]
        needs_w, needs_a, needs_b = _split(ctx.needs_input_grad[_BEFORE:], count, low)
        needs = [needs_x or needs_norm, any(needs_w), any(needs_a), any(needs_b)]
        dx = dnorm = dbias = None
        dws: Sequence[Tensor | None] = [None] * count
        dmatrices: list[Tensor | None] = [None] * (2 * low)
        if any(needs):
            check_versions((*ctx.frozen, *ctx.scales), ctx.versions)
            x = normed_again(x_data, norm_weight, inverse) if ctx.save_x == AS_IS else x_data
            if ctx.dtypes:
                seen = viewed(ctx.frozen, ctx.dtypes)
                parts, given = seen[: ctx.counts[2]], seen[ctx.counts[2] :]
            scales = list(given) if w_scale is None else [w_scale]
            state_g, state_w = ctx.states
            dx, dw, da, db = ops.linear_backward(
                g, state_g, [x, x_scale, t], list(parts), scales, state_w, list(matrices), ctx.call, needs
            )
            if any(needs_w):
                dws = _needed(dw.split([part.shape[0] for part in parts]), needs_w)
            if low:
                adapters = Adapters(ctx.positions, tuple(matrices[:low]), tuple(matrices[low:]))
                dmatrices = _needed(adapters.split(da, db), (*needs_a, *needs_b))
            saved = Quantized(x_data, x_scale)
            dx, dnorm = back_through(dx, saved, norm_weight, ctx.eps, inverse, passing, needs=(needs_x, needs_norm))
        if needs_bias:
            dbias = g.float().sum(dim=0).to(ctx.bias_dtype)
        unused = len(ctx.needs_input_grad) - _BEFORE - count - 2 * low
        before = (dx, dbias, g if needs_residual else None, dnorm, *[None] * (_BEFORE - 4))
        return *before, *dws, *dmatrices, *[None] * unused


_BEFORE = 13  # arguments of `forward` before the trained tensors


def _sort(
    tensors: Sequence[Tensor], counts: tuple[int, int, int], positions: tuple[Adapter, ...]
) -> tuple[Sequence[Tensor], Adapters, Sequence[Tensor]]:
    """Return the trained tensors, the adapters, and the stored weights with their scales."""
    if not counts[1]:
        return tensors[: counts[0]], NO_ADAPTERS, tensors[counts[0] :]
    trained, downs, ups = _split(tensors, *counts[:2])
    return trained, Adapters(positions, tuple(downs), tuple(ups)), tensors[counts[0] + 2 * counts[1] :]


def _split(values: Sequence[Any], trained: int, low: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return what belongs to the trained tensors, to all A, and to all B."""
    return values[:trained], values[trained : trained + low], values[trained + low : trained + 2 * low]


def _needed(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    return [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
