"""The gated MLP of a decoder: y = (act(x · w_gateᵀ) · (x · w_upᵀ)) · w_downᵀ, as one autograd function.

Shapes: M tokens, K width, F hidden. With weights that are trained:

    forward    xq_MK → gu_M2F = xq · [w_gate; w_up]ᵀ → hq_MF (activation and quantising: one kernel) → y = hq · w_downᵀ
    backward   gq_MK → dh_MF = gq · w_down
               one kernel: dgu_M2F in both layouts, and h again, transposed
               dw_down = gqT · hqTᵀ     dx = dguq · [w_gate; w_up]     dw_gate_up = dguqT · xqTᵀ
    saved      xqT_KM in FP8 and gu_M2F, in FP8 if asked for; h is computed again in backward, where gate and up are
               read anyway

With frozen weights, and adapters (s, A and B as in `linear_function.py`):

    forward    xq_MK → gu_M2F = xq · [w_gate; w_up]ᵀ → one kernel: adapters, h, gu in FP8 → hq_MF → y = hq · w_downᵀ
    backward   gq_MK → dh_MF = gq · w_down → one kernel: adapters, h again, dgu_M2F → dguq → dx = dguq · [w_gate; w_up]
    saved      xq_MK and guq_M2F in FP8 (1×128, whatever the weights have scales for), and t, which is narrow

Forward computes h from gate and up in high precision; only backward sees them rounded. Where products are in high
precision (`LinearSpec.x` is None), frozen weights are dequantised, nothing else is quantised but the saved gate and up
(not even those in FP32), and x is saved as in `linear_function.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.nn.gathered import gathered_again, is_gathered
from octavo.nn.linear_function import AS_IS, States, how_to_save
from octavo.nn.norm import NO_NORM, back_through, normed, normed_again
from octavo.nn.shapes import with_leading
from octavo.nn.versions import check_versions, versions_of, viewed
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized
from octavo.ops import mlp as ops
from octavo.ops.adapters import NO_ADAPTERS, Adapter, Adapters
from octavo.ops.mlp import MLPCall, MLPSpec
from octavo.ops.quantize import as_dtype
from octavo.ops.weight import Weight

Positions = tuple[tuple[Adapter, ...], tuple[Adapter, ...]]


def gated_mlp(
    x: Tensor,
    gate_up: Weight,
    down: Weight,
    mlp: MLPSpec,
    states: States,
    states_down: States,
    *,
    norm: Norm | None = None,
    adapters: Adapters = NO_ADAPTERS,
    adapters_down: Adapters = NO_ADAPTERS,
    residual: bool = False,
) -> Tensor:
    """Compute `x[..., K]` through the MLP.

    `states`, `states_down`: scaling state of the input and of the gradient of each product. `norm`: x goes through it
    first. `residual`: x itself is added to the result. Adapters go beside frozen weights only.
    """
    trained = (*gate_up.trained, *down.trained)
    low = len(adapters.positions), len(adapters_down.positions)
    if trained and any(low):
        raise ValueError("adapters in an MLP of trained weights: compute its linears one by one (nn.linear_function)")
    matrices = (*adapters.downs, *adapters.ups, *adapters_down.downs, *adapters_down.ups)
    if not torch.is_grad_enabled():
        return _without_gradients(
            x, gate_up, down, mlp, (states[0], states_down[0]), norm, (adapters, adapters_down), residual
        )
    saves = x.requires_grad or any(m.requires_grad for m in matrices)
    save_x = how_to_save(x, gate_up, mlp.linear, norm, adapters)
    stored = tuple(t for w in (gate_up, down) if w.is_stored for t in (*w.parts, *w.scales))
    sizes = tuple((len(w.parts), len(w.scales)) if w.is_stored else (0, 0) for w in (gate_up, down))
    y = _GatedMLP.apply(
        x.reshape(-1, x.shape[-1]), *(NO_NORM if norm is None else norm[:2]), residual, mlp, (save_x, saves),
        (adapters.positions, adapters_down.positions), (len(trained), *sizes), (*gate_up.sources, *down.sources),
        *states, *states_down, gate_up.state, down.state, *trained, *matrices, *stored,
    )  # fmt: skip
    return with_leading(y, x.shape[:-1])


def _without_gradients(
    x: Tensor,
    gate_up: Weight,
    down: Weight,
    mlp: MLPSpec,
    states: States,
    norm: Norm | None,
    adapters: tuple[Adapters, Adapters],
    residual: bool,
) -> Tensor:
    """Nothing is saved, and the norm is part of the operator. `states`: of x and of h."""
    rows = x.reshape(-1, x.shape[-1])
    norm_weight, eps = (None, 0.0) if norm is None else norm[:2]
    call = MLPCall.encode(mlp, not (gate_up.trained or down.trained), "", False, x, *adapters)
    matrices = [*adapters[0].matrices, *adapters[1].matrices]
    given = rows if mlp.linear.x or norm else as_dtype(rows, mlp.linear.out_dtype)
    y = ops.gated_mlp(
        given, *states, list(gate_up.parts), list(gate_up.scales), gate_up.state, list(down.parts), list(down.scales),
        down.state, rows if residual else None, norm_weight, eps, matrices, call,
    )[0]  # fmt: skip
    return with_leading(y, x.shape[:-1])


Sizes = tuple[int, tuple[int, int], tuple[int, int]]  # trained tensors; parts and scales of each product, if stored
_BEFORE = 15  # arguments of `forward` before the trained tensors


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_eps: float | None,
        residual: bool,
        mlp: MLPSpec,
        saves: tuple[str, bool],
        positions: Positions,
        sizes: Sizes,
        sources: tuple[Tensor, ...],
        state_x: Tensor,
        state_dgate_up: Tensor,
        state_h: Tensor,
        state_g: Tensor,
        state_w: Tensor | None,
        state_w_down: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        low = 2 * (len(positions[0]) + len(positions[1]))
        trained, matrices, stored = tensors[: sizes[0]], tensors[sizes[0] : sizes[0] + low], tensors[sizes[0] + low :]
        adapters = _sort(matrices, positions)
        weights = _weights(trained, stored, sizes)
        spec, (save_x, saves_gate_up) = mlp.linear, saves
        h = x
        x, inverse = normed(h, norm_weight, norm_eps)
        x = x if spec.x else as_dtype(x, spec.out_dtype)
        call = MLPCall.encode(mlp, sizes[0] == 0, "" if save_x == AS_IS else save_x, saves_gate_up, h, *adapters)
        y, *saved, w_scale, w_down_scale = ops.gated_mlp(
            x, state_x, state_h, *weights[0], state_w, *weights[1], state_w_down, h if residual else None,
            None, 0.0, list(matrices), call,
        )  # fmt: skip
        if save_x == AS_IS:
            saved = [x if inverse is None else h, *saved[1:]]
        parts = (*weights[0][0], *weights[1][0])
        # Frozen weights and scaling state are not saved as tensors are; `linear_function.py` says why.
        ctx.save_for_backward(
            *saved, w_scale, w_down_scale, inverse, norm_weight, *matrices,
            *(parts if trained and not is_gathered(trained) else ()),
        )  # fmt: skip
        ctx.gathered = trained if is_gathered(trained) else ()
        ctx.frozen, ctx.scales = () if trained else parts, (weights[0][1], weights[1][1])
        ctx.versions = () if trained else versions_of((*parts, *weights[0][1], *weights[1][1]))
        ctx.sources, ctx.dtypes, ctx.sizes = sources, (), sizes
        if sources:
            ctx.frozen, ctx.scales, ctx.versions = (), ((), ()), versions_of(sources)
            ctx.dtypes = tuple(tensor.dtype for tensor in stored)
        ctx.states = (state_g, state_dgate_up), (state_w, state_w_down)
        ctx.spec, ctx.call, ctx.save_x, ctx.positions, ctx.trained = spec, call, save_x, positions, sizes[0]
        ctx.eps, ctx.residual = norm_eps, residual
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        everything = ctx.saved_tensors
        saved, (*w_scales, inverse, norm_weight), rest = list(everything[:7]), everything[7:11], everything[11:]
        low = 2 * (len(ctx.positions[0]) + len(ctx.positions[1]))
        check_versions(ctx.sources or (*ctx.frozen, *ctx.scales[0], *ctx.scales[1]), ctx.versions)
        matrices, given = rest[:low], ctx.scales
        if ctx.sources:
            ((gate, up), of_gate_up), ((down,), of_down) = _weights((), viewed(ctx.sources, ctx.dtypes), ctx.sizes)
            given = (of_gate_up, of_down)
        elif ctx.gathered:
            ((gate, up), first), ((down,), second) = map(gathered_again, (ctx.gathered[:2], ctx.gathered[2:]))
            given = (first, second)
        else:
            gate, up, down = rest[low:] or ctx.frozen
        adapters = _sort(matrices, ctx.positions)
        needs_x, needs_norm = ctx.needs_input_grad[:2]
        needs_trained = ctx.needs_input_grad[_BEFORE : _BEFORE + ctx.trained] or (False, False, False)
        needs_low = ctx.needs_input_grad[_BEFORE + ctx.trained :][:low]
        needs = [needs_x or needs_norm, needs_trained[0] or needs_trained[1], needs_trained[2]]
        x_saved = Quantized(*saved[:2])
        if ctx.save_x == AS_IS:
            saved[0] = normed_again(saved[0], norm_weight, inverse)
        scales = [[used] if used.numel() else list(known) for used, known in zip(w_scales, given, strict=True)]
        (state_g, state_dgate_up), (state_w, state_w_down) = ctx.states
        dx, dgate_up, ddown, *of_adapters = ops.gated_mlp_backward(
            g, state_g, state_dgate_up, saved, [gate, up], scales[0], state_w, [down], scales[1], state_w_down,
            list(matrices), ctx.call, [*needs, *_any_of(needs_low, ctx.positions)],
        )  # fmt: skip
        along = g if ctx.residual else None
        dh, dnorm = back_through(dx, x_saved, norm_weight, ctx.eps, inverse, along, needs=(needs_x, needs_norm))
        gradients: list[Tensor | None] = [None] * ctx.trained
        if needs[1]:
            gradients[:2] = dgate_up.split([gate.shape[0], up.shape[0]])
        if needs[2]:
            gradients[2] = ddown
        for each, pair in zip(adapters, (of_adapters[:2], of_adapters[2:]), strict=True):
            gradients += each.split(*pair)
        wanted = (*needs_trained[: ctx.trained], *needs_low)
        gradients = [d if needed else None for d, needed in zip(gradients, wanted, strict=True)]
        unused = len(ctx.needs_input_grad) - _BEFORE - len(gradients)
        return dh, dnorm, *[None] * (_BEFORE - 2), *gradients, *[None] * unused


def _weights(
    trained: Sequence[Tensor], stored: Sequence[Tensor], sizes: Sizes
) -> tuple[tuple[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]:
    """Return the parts and scales of gate and up, and those of down."""
    (parts, scales), (parts_down, _) = sizes[1:]
    of_gate_up, of_down = stored[: parts + scales], stored[parts + scales :]
    gate_up = (list(of_gate_up[:parts]), list(of_gate_up[parts:])) if parts else (list(trained[:2]), [])
    return gate_up, (list(of_down[:parts_down]), list(of_down[parts_down:])) if parts_down else (list(trained[2:]), [])


def _sort(matrices: Sequence[Tensor], positions: Positions) -> tuple[Adapters, Adapters]:
    """Return the adapters of gate and up, and those of down, from all A, then all B of each."""
    n, n_down = len(positions[0]), len(positions[1])
    gate_up = Adapters(positions[0], tuple(matrices[:n]), tuple(matrices[n : 2 * n]))
    rest = matrices[2 * n :]
    return gate_up, Adapters(positions[1], tuple(rest[:n_down]), tuple(rest[n_down:]))


def _any_of(needs: Sequence[bool], positions: Positions) -> list[bool]:
    """Say for any A and any B of gate and up, and of down, whether its gradient is needed."""
    needed, start = [], 0
    for each in positions:
        middle, end = start + len(each), start + 2 * len(each)
        needed += [any(needs[start:middle]), any(needs[middle:end])]
        start = end
    return needed
