"""The LM head and its cross entropy in chunks of tokens, so that the logits of a batch are never all in memory.

Shapes: T tokens, K width, V vocabulary. For every chunk of tokens:

    l_TV = h · wᵀ      loss, and dl in place of l      dh_TK = dl · w      dw_VK += dlᵀ · h

Both gradients are computed with the loss, while the logits of a chunk are in memory; backward only multiplies them, in
place, by the gradient of the loss, which is 1 as a rule and then costs nothing. With `head`, the three products run in
FP8: h and w with one scale per tensor, dl in E5M2 with a constant one, since it lies in [−1, 1]. dw is then one product
for several chunks, whose dlᵀ in FP8 take as much memory as the logits of one: each addition to dw costs a pass over it.

A sum of several products for dw is in FP32 and rounded once. In BF16 its error would grow with the number of chunks,
from 0.18 % with one to 0.58 % with 32. In FP16 small values vanish, and the loss scale that prevents it comes only with
the gradient of the loss. In FP16, dl is therefore computed times 2¹⁵, its products are in FP32, and backward multiplies
them by the remaining factor before it rounds them to FP16.

With `vocabulary`, the weight is this rank's part of a head that is parallel by columns (`vocabulary.py`). dw is then
that of this part, and dh this rank's part of a sum over ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import ops
from octavo.nn.vocabulary import Vocabulary
from octavo.numerics import E5M2, OperandRecipe
from octavo.numerics.cross_entropy import IGNORED
from octavo.numerics.quantize import Quantized, reciprocal
from octavo.ops import loss as ops_loss

CHUNK_BYTES = 2**30  # of logits, or of their gradient in FP8
LIFT = 2.0**15  # the factor that gives values in [−1, 1] the largest range in FP16
FROZEN_CHUNK_BYTES = 2**27  # without a gradient of the head to add up over chunks, small ones cost nothing


@dataclass(frozen=True)
class FP8Head:
    """Settings of an FP8 head: the recipes of h and w, and the options of a product."""

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
    states: tuple[Tensor, Tensor] | None = None,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Return the mean cross entropy of `hidden[..., K] · weight[V, K]ᵀ` and `labels[...]`; −100 is ignored.

    A label that is neither −100 nor a token is an error; on a GPU the device asserts it, as with torch's losses.
    `count`: divide the sum by this instead of the number of labels. `head` and `states`: an FP8 head, and the scaling
    states of h and w. `vocabulary`: `weight` has the rows of these tokens, and other ranks have the others.
    """
    tokens = weight.shape[0] if vocabulary is None else vocabulary.size
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), _checked(labels.reshape(-1), tokens)
    if len(labels) != len(hidden):
        raise ValueError(f"labels: {len(labels)} of them, for {len(hidden)} tokens; every token needs one, or −100")
    if count is None:
        count = (labels != IGNORED).sum()
    if not isinstance(count, Tensor):
        count = torch.full((), float(count), dtype=torch.float32, device=hidden.device)
    count = count.to(device=hidden.device, dtype=torch.float32)
    ops.check_values("linear_cross_entropy", {"hidden": hidden, "weight": weight, "labels": labels})
    x_state, w_state = states or (None, None)
    # An autograd function cannot tell whether gradients are enabled.
    enabled = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(hidden, weight, labels, count, head, enabled, x_state, w_state, vocabulary)


def _checked(labels: Tensor, vocabulary: int) -> Tensor:
    """Return the labels as the kernels read them: contiguous 64-bit integers, each a token or ignored."""
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels: {labels.dtype}; the loss takes the numbers of tokens, as integers")
    labels = labels.to(torch.int64).contiguous()
    if labels.device.type != "cpu":  # there, the specification raises, and names the label
        known = (labels == IGNORED) | ((labels >= 0) & (labels < vocabulary))
        torch._assert_async(known.all(), f"labels: one is neither {IGNORED} nor a token, 0 to {vocabulary - 1}")
    return labels


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
        x_state: Tensor | None,
        w_state: Tensor | None,
        vocabulary: Vocabulary | None,
    ) -> Tensor:
        factor = torch.where(count > 0, reciprocal(count), 0.0)  # without labels there is no gradient
        needs = tuple(enabled and needed for needed in ctx.needs_input_grad[:2])
        compute = torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype
        later = None
        if compute == torch.float16:
            factor, later = torch.full_like(factor, LIFT), factor / LIFT
        with torch.autocast(hidden.device.type, enabled=False):
            if head is None:
                loss, dh, dw = _chunks(hidden, weight, labels, factor, compute, needs, vocabulary)
            else:
                assert x_state is not None and w_state is not None
                loss, dh, dw = _chunks_fp8(
                    hidden, weight, labels, factor, compute, needs, head, x_state, w_state, vocabulary
                )
        ctx.dtypes = hidden.dtype, weight.dtype
        if later is None:
            dh, dw = _to_dtypes((dh, dw), ctx.dtypes)
        ctx.save_for_backward(dh, dw, later)
        ctx.used = False
        return loss / count  # NaN without labels, as torch has it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise RuntimeError("linear_cross_entropy: backward a second time; its gradients were handed out already")
        ctx.used = True
        dh, dw, later = ctx.saved_tensors
        for gradient in (dh, dw):
            if gradient is not None:
                ops_loss.scale_(gradient, g if later is None else g * later)
        return *_to_dtypes((dh, dw), ctx.dtypes), *[None] * 7


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    factor: Tensor,
    compute: torch.dtype,
    needs: tuple[bool, ...],
    vocabulary: Vocabulary | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    w = weight.to(compute)
    needs_h, needs_w = needs
    chunk = CHUNK_BYTES if needs_w else FROZEN_CHUNK_BYTES
    bounds = chunk_bounds(0, len(labels), _rows(weight, vocabulary) * compute.itemsize, chunk)
    dh = torch.empty_like(hidden, dtype=_dtype_of_sums(hidden, compute, 1)) if needs_h else None
    dw = None
    losses = []
    for start, stop in bounds:
        h, label = hidden[start:stop].to(compute), labels[start:stop]
        logits = h @ w.t()
        loss, lse, label = _cross_entropy(logits, label, vocabulary)
        losses.append(loss.sum())
        if needs_h or needs_w:
            ops_loss.cross_entropy_backward_(logits, label, lse, factor)
            gradient = logits
            if dh is not None:
                ops_loss.product_(dh[start:stop], gradient, w, add=False)
            if needs_w:
                if dw is None:
                    dw = torch.empty_like(weight, dtype=_dtype_of_sums(weight, compute, len(bounds)))
                ops_loss.product_(dw, gradient.t(), h, add=start > 0)
            del gradient
        del logits  # before the next chunk's: theirs is the memory that dw takes in FP32
    return torch.stack(losses).sum(), dh, dw


def _chunks_fp8(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    factor: Tensor,
    compute: torch.dtype,
    needs: tuple[bool, ...],
    head: FP8Head,
    x_state: Tensor,
    w_state: Tensor,
    vocabulary: Vocabulary | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    needs_h, needs_w = needs
    record = needs_h or needs_w
    w_q = ops.quantize(weight, w_state, head.w, record=record, layout="both" if needs_h else "rows")
    h_q = ops.quantize(hidden, x_state, head.x, record=record, layout="rows")[0]
    dh = torch.empty_like(hidden, dtype=_dtype_of_sums(hidden, compute, 1)) if needs_h else None
    dw = None
    how: dict[str, Any] = {"bias": None, "batch": [], "fast": head.fast_backward, "emulate": head.emulate}
    losses = []
    rows = _rows(weight, vocabulary)
    groups = chunk_bounds(0, len(labels), rows * E5M2.dtype.itemsize, CHUNK_BYTES)
    for begin, end in groups:
        columns = hidden.new_empty(weight.shape[0], end - begin, dtype=E5M2.dtype) if needs_w else None
        logit_bytes = CHUNK_BYTES // 2 if needs_w else FROZEN_CHUNK_BYTES
        for start, stop in chunk_bounds(begin, end, rows * compute.itemsize, logit_bytes):
            label = labels[start:stop]
            h = h_q._replace(data=h_q.data[start:stop])
            logits = ops.gemm_nt(*h, *w_q[0], out_dtype=compute, **(how | {"fast": head.fast_forward}))
            loss, lse, label = _cross_entropy(logits, label, vocabulary)
            losses.append(loss.sum())
            if not record:
                continue
            columns_chunk = None if columns is None else columns[:, start - begin : stop - begin]
            dl = Quantized(*ops_loss.cross_entropy_quantize(logits, label, lse, factor, columns_chunk, E5M2.name))
            del logits
            if dh is not None:
                dh[start:stop] = ops.gemm_nt(*dl, *w_q[1], out_dtype=dh.dtype, **how)
        if columns is not None:
            h_t = ops.quantize(hidden[begin:end], x_state, head.x, record=False, layout="columns")[0]
            scaled = Quantized(columns, dl.scale)
            product = ops.gemm_nt(*scaled, *h_t, out_dtype=_dtype_of_sums(weight, compute, 1), **how)
            dw = product.to(_dtype_of_sums(weight, compute, len(groups))) if dw is None else dw.add_(product)
            del columns, scaled, product
    return torch.stack(losses).sum(), dh, dw


def _cross_entropy(logits: Tensor, labels: Tensor, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, logarithm of the sum of exponentials, and the labels that backward takes."""
    if vocabulary is not None:
        return vocabulary.cross_entropy(logits, labels)
    return *ops_loss.cross_entropy(logits, labels), labels


def _rows(weight: Tensor, vocabulary: Vocabulary | None) -> int:
    return weight.shape[0] if vocabulary is None else vocabulary.most_rows


def _dtype_of_sums(x: Tensor, compute: torch.dtype, products: int) -> torch.dtype:
    """Return the dtype for summing the gradient of x from `products` products in `compute`."""
    direct = products == 1 and x.dtype == compute != torch.float16
    return compute if direct else torch.promote_types(compute, torch.float32)


def _to_dtypes(gradients: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...]) -> list[Tensor | None]:
    return [None if x is None else x.to(dtype) for x, dtype in zip(gradients, dtypes, strict=True)]


def chunk_bounds(begin: int, end: int, bytes_per_token: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return the bounds of chunks of about `chunk_bytes`, in multiples of 128 tokens."""
    chunk = max(chunk_bytes // bytes_per_token // 128 * 128, 128)
    return [(start, min(start + chunk, end)) for start in range(begin, end, chunk)]


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)
