"""The LM head and its cross entropy, in chunks of tokens, so that the logits of a batch are never all in memory.

Shapes: T tokens, K width, V vocabulary. For every chunk of tokens:

    l_TV = h · wᵀ      loss, and dl in place of l      dh_TK = dl · w      dw_VK += dlᵀ · h

Both gradients are computed with the loss, while a chunk's logits are there; backward only multiplies them by the
gradient of the loss, in place, which is 1 as a rule and then costs nothing. With `head`, the three products are in FP8:
h and w with one scale per tensor, dl in E5M2 with a constant one, since it lies in [−1, 1]. Then dw is one product for
several chunks, whose dlᵀ in FP8 take the room that the logits of one took: adding up dw costs a pass over it each time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import ops, ops_loss
from octavo.numerics import E5M2, OperandRecipe
from octavo.numerics.cross_entropy import IGNORED
from octavo.numerics.quantize import Quantized, reciprocal

CHUNK_BYTES = 2**30  # of logits, or of their gradient in FP8
FROZEN_CHUNK_BYTES = 2**27  # where no gradient of the head adds up over chunks, small ones cost nothing


@dataclass(frozen=True)
class FP8Head:
    """How an FP8 head is computed: recipes of h and w, and what `Product` says of the rest."""

    x: OperandRecipe
    w: OperandRecipe
    emulate: bool = False
    fast_forward: bool = True
    fast_backward: bool = False


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    count: Tensor | int | None = None,
    head: FP8Head | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The mean cross entropy of `hidden[..., K] · weight[V, K]ᵀ` against `labels[...]`; −100 is ignored.

    `count`: divide the sum by this instead of the number of labels. `head` and `rows`: an FP8 head and its scaling
    state for h and w.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).contiguous()
    if count is None:
        count = (labels != IGNORED).sum()
    if not isinstance(count, Tensor):
        count = torch.full((), float(count), dtype=torch.float32, device=hidden.device)
    count = count.to(device=hidden.device, dtype=torch.float32)
    ops.check_values("linear_cross_entropy", {"hidden": hidden, "weight": weight, "labels": labels})
    row_x, row_w = rows or (None, None)
    # Inside an autograd function nothing tells whether gradients are enabled.
    enabled = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(hidden, weight, labels, count, head, enabled, row_x, row_w)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        count: Tensor,
        head: FP8Head | None,
        enabled: bool,
        row_x: Tensor | None,
        row_w: Tensor | None,
    ) -> Tensor:
        factor = torch.where(count > 0, reciprocal(count), 0.0)  # without labels there is no gradient
        needs_h, needs_w = (enabled and needed for needed in ctx.needs_input_grad[:2])
        compute = torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            if head is None:
                parts = _chunks(hidden, weight, labels, factor, compute, needs_h, needs_w)
            else:
                assert row_x is not None and row_w is not None
                parts = _chunks_fp8(hidden, weight, labels, factor, compute, needs_h, needs_w, head, row_x, row_w)
        loss, dh, dw = parts
        ctx.save_for_backward(dh, dw)
        ctx.used = False
        return loss / count  # NaN without labels, as torch has it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise RuntimeError("linear_cross_entropy: backward a second time; its gradients were handed out already")
        ctx.used = True
        dh, dw = ctx.saved_tensors
        for gradient in (dh, dw):
            if gradient is not None:
                ops_loss.scale_(gradient, g)
        return dh, dw, None, None, None, None, None, None


def _chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, factor: Tensor, compute: torch.dtype, needs_h: bool, needs_w: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    w = weight.to(compute)
    dh = torch.empty_like(hidden) if needs_h else None
    dw = None
    losses = []
    chunk = CHUNK_BYTES if needs_w else FROZEN_CHUNK_BYTES
    for start, stop in chunk_bounds(0, len(labels), weight.shape[0] * compute.itemsize, chunk):
        h, label = hidden[start:stop].to(compute), labels[start:stop]
        logits = h @ w.t()
        loss, lse = ops_loss.cross_entropy(logits, label)
        losses.append(loss.sum())
        if not needs_h and not needs_w:
            continue
        gradient = ops_loss.cross_entropy_backward_(logits, label, lse, factor)
        if dh is not None:
            dh[start:stop] = gradient @ w
        if needs_w:
            dw = _added(dw, gradient.t(), h, weight.dtype)
    return torch.stack(losses).sum(), dh, dw


def _chunks_fp8(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    factor: Tensor,
    compute: torch.dtype,
    needs_h: bool,
    needs_w: bool,
    head: FP8Head,
    row_x: Tensor,
    row_w: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    record = needs_h or needs_w
    w_q = ops.quantize(weight, row_w, head.w, record=record, layout="both" if needs_h else "rows")
    h_q = ops.quantize(hidden, row_x, head.x, record=record, layout="rows")[0]
    dh = torch.empty_like(hidden) if needs_h else None
    dw = None
    how: dict[str, Any] = {"batch": (), "fast": head.fast_backward, "emulate": head.emulate}
    losses = []
    vocabulary = weight.shape[0]
    for first, last in chunk_bounds(0, len(labels), vocabulary * E5M2.dtype.itemsize, CHUNK_BYTES):
        columns = hidden.new_empty(vocabulary, last - first, dtype=E5M2.dtype) if needs_w else None
        logit_bytes = CHUNK_BYTES // 2 if needs_w else FROZEN_CHUNK_BYTES
        for start, stop in chunk_bounds(first, last, vocabulary * compute.itemsize, logit_bytes):
            label = labels[start:stop]
            h = h_q._replace(data=h_q.data[start:stop])
            logits = ops.gemm_nt(h, w_q[0], out_dtype=compute, **(how | {"fast": head.fast_forward}))
            loss, lse = ops_loss.cross_entropy(logits, label)
            losses.append(loss.sum())
            if not record:
                continue
            part = None if columns is None else columns[:, start - first : stop - first]
            rows = ops_loss.cross_entropy_quantize(logits, label, lse, factor, part, E5M2)
            del logits
            if dh is not None:
                dh[start:stop] = ops.gemm_nt(rows, w_q[1], out_dtype=hidden.dtype, **how)
        if columns is not None:
            h_t = ops.quantize(hidden[first:last], row_x, head.x, record=False, layout="columns")[0]
            product = ops.gemm_nt(Quantized(columns, rows.scale), h_t, out_dtype=weight.dtype, **how)
            dw = product if dw is None else dw.add_(product)
    return torch.stack(losses).sum(), dh, dw


def _added(dw: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """dw + a · b; the first chunk is the product itself."""
    if dtype != a.dtype:
        product = (a @ b).to(dtype)
        return product if dw is None else dw.add_(product)
    return a @ b if dw is None else dw.addmm_(a, b)


def chunk_bounds(first: int, last: int, bytes_per_token: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Chunks of about so many bytes, in multiples of 128 tokens."""
    chunk = max(chunk_bytes // bytes_per_token // 128 * 128, 128)
    return [(start, min(start + chunk, last)) for start in range(first, last, chunk)]


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)
