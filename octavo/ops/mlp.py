"""The operators of a gated MLP: y = (act(x · w_gateᵀ) · (x · w_upᵀ)) · w_downᵀ, and the way back.

There are two ways to compute one, for good reasons, and the weights decide which:

    whole       where weights have gradients: dw sums over all tokens in one product, so the activation's kernels also
                quantise, in both layouts (`_whole`)
    in parts    beside frozen weights: gate and up, or their gradient, the largest tensors of all, are there for a part
                of the tokens at a time, and the activation's kernels add the adapters' outputs (`_in_parts`)

Shapes: M tokens, K width, F hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.numerics import Quantized
from octavo.ops.adapters import (
    AdapterGradients,
    Adapters,
    add_to,
    add_to_input,
    fake_gradients,
    fake_projected,
    project_down,
)
from octavo.ops.gated import (
    gated_adapted,
    gated_adapted_backward,
    gated_quantize,
    gated_quantize_backward,
    new_saved,
)
from octavo.ops.gemm import multiply
from octavo.ops.linear import (
    Call,
    LinearSpec,
    empty,
    fake_padded,
    fake_saved_input,
    fake_used_scale,
    first_rows,
    input_columns,
    or_empty,
    padded,
    quantize_gradient,
    quantize_input,
    separate_scale,
)
from octavo.ops.register import operator
from octavo.ops.weight import Weight

PART = 2**27  # elements of gate and up, or of their gradient, that are there at a time: 4,096 tokens of an 8B
TILE = 256  # tokens


@dataclass(frozen=True)
class MLPSpec:
    """How a gated MLP is computed: everything about it but its tensors, its adapters and what it saves."""

    linear: LinearSpec
    activation: str
    saves_fp8: bool = False  # save gate and up in FP8, where weights are trained; beside frozen ones it is always so


class MLPCall(NamedTuple):
    """An `MLPSpec` with what a single call decides, as it crosses into an operator: one string."""

    spec: LinearSpec
    activation: str
    saves_fp8: bool
    in_parts: bool
    save_x: str
    saves_gate_up: bool
    places: tuple[str, ...]  # of the adapters of gate and up, and of down

    @staticmethod
    def encode(
        mlp: MLPSpec, in_parts: bool, save_x: str, saves_gate_up: bool, adapters: Adapters, adapters_down: Adapters
    ) -> str:
        call = Call.encode(mlp.linear, save_x, adapters, adapters_down)
        return f"{mlp.activation}|{int(mlp.saves_fp8)}{int(in_parts)}{int(saves_gate_up)}|{call}"

    @staticmethod
    @cache
    def decode(text: str) -> "MLPCall":
        activation, flags, call = text.split("|", 2)
        spec, save_x, places = Call.decode(call)
        saves_fp8, in_parts, saves_gate_up = (flag == "1" for flag in flags)
        return MLPCall(spec, activation, saves_fp8, in_parts, save_x, saves_gate_up, places)

    def adapters(self, matrices: Sequence[Tensor]) -> tuple[Adapters, Adapters]:
        """Return the adapters of gate and up, and those of down: all A, then all B of each."""
        first = Adapters.decode(self.places[0], matrices)
        return first, Adapters.decode(self.places[1], matrices[2 * len(first.places) :])

    def new_saved(self, like: Tensor, rows: Any, features: Any, dtype: torch.dtype) -> list[Tensor]:
        """Return room for gate and up: in FP8, unless products are in high precision and results in FP32."""
        if self.spec.x is not None or dtype != torch.float32:
            return new_saved(like, rows, features)
        return [like.new_empty([rows, features], dtype=dtype), like.new_empty(0)]


class Side(NamedTuple):
    """One of the two products: gate and up together, or down."""

    weight: Weight
    state: Tensor  # scaling state of its input; in backward, of the gradient of its output
    adapters: Adapters


def _gated_mlp_fake(
    x: Tensor, weights: list[Tensor], down: list[Tensor], matrices: list[Tensor], call: str, dtype: torch.dtype
) -> Any:
    how = MLPCall.decode(call)
    spec, both = how.spec, sum(w.shape[0] for w in weights)
    y = x.new_empty([x.shape[0], down[0].shape[0]], dtype=dtype)
    rows = fake_padded(x, spec).shape[0]
    if how.in_parts:
        saved = how.new_saved(x, rows, both, dtype) if how.saves_gate_up else empty(x, 2)
    elif how.saves_fp8:
        saved = new_saved(x, rows, both)
    else:
        saved = [x.new_empty([rows, both], dtype=dtype), x.new_empty(0)]
    one_scale = not how.in_parts and spec.x is not None and spec.x.granularity == "tensor"
    h_scale = x.new_empty(() if one_scale else 0, dtype=torch.float32)
    projected = [fake_projected(x, adapters, rows, dtype) for adapters in how.adapters(matrices)]
    w_scales = [fake_used_scale(x, w, spec) for w in (weights, down)]
    return y, *fake_saved_input(x, spec, how.save_x), *saved, *projected, h_scale, *w_scales


@operator(mutates=("state_x", "state_h", "state_w", "state_w_down"), fake=_gated_mlp_fake)
def gated_mlp(
    x: Tensor,
    state_x: Tensor,
    state_h: Tensor,
    weights: list[Tensor],
    scales: list[Tensor],
    state_w: Tensor | None,
    down: list[Tensor],
    scales_down: list[Tensor],
    state_w_down: Tensor | None,
    residual: Tensor | None,
    matrices: list[Tensor],
    call: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y plus `residual`; x, and gate and up, as saved, with their scales; `x · Aᵀ` and `h · Aᵀ`; scales for backward.

    Those are the scales of h, of gate and up, and of down; see `Weight.used_scale`. Empty where there is no such thing.
    `weights`: gate and up. `matrices`: of the adapters, all A, then all B, of gate and up, then of down.
    """
    how = MLPCall.decode(call)
    adapters, adapters_down = how.adapters(matrices)
    first = Side(Weight(weights, scales, state_w), state_x, adapters)
    last = Side(Weight(down, scales_down, state_w_down), state_h, adapters_down)
    return (_in_parts if how.in_parts else _whole)(x, first, last, residual, how, dtype)


def _whole(x: Tensor, first: Side, last: Side, residual: Tensor | None, how: MLPCall, dtype: torch.dtype) -> Any:
    spec, weight, weight_down = how.spec, first.weight, last.weight
    assert spec.x is not None
    fast: dict[str, Any] = {"batch": [], "fast": spec.fast_forward, "emulate": spec.emulate}
    x_mk, x_saved = quantize_input(padded(x, spec), first.state, spec, how.save_x, dtype)
    # gu_M2F = x_MK · [w_gate; w_up]ᵀ
    w = weight.forward_operand(spec.w, spec.record, None)
    gate_up = multiply(x_mk, w, None, dtype, **fast)
    w_scale = weight.used_scale(w, spec.w)
    del w
    saved = Quantized(*new_saved(x, *gate_up.shape)) if how.saves_fp8 else None
    h = gated_quantize(gate_up, last.state, spec.x, how.activation, record=spec.record, saved=saved)
    saved = saved or Quantized(gate_up, *empty(x, 1))
    del gate_up
    # y_MK = h_MF · w_down_KFᵀ
    w = weight_down.forward_operand(spec.w, spec.record, None)
    y = first_rows(multiply(h, w, None, dtype, **fast), x.shape[0])
    w_down_scale = weight_down.used_scale(w, spec.w)
    if residual is not None:
        y.add_(residual)
    h_scale = h.scale if spec.x.granularity == "tensor" else last.state.new_empty(0)
    t, t_down = (x.new_empty(0, dtype=dtype) for _ in range(2))
    scales = (h_scale, w_scale, w_down_scale)
    return y, x_saved.data, separate_scale(x_saved, x_mk), *saved, t, t_down, *scales


def _in_parts(x: Tensor, first: Side, last: Side, residual: Tensor | None, how: MLPCall, dtype: torch.dtype) -> Any:
    spec, weight, weight_down, adapters, adapters_down = (
        how.spec,
        first.weight,
        last.weight,
        first.adapters,
        last.adapters,
    )
    fast: dict[str, Any] = {"batch": [], "fast": spec.fast_forward, "emulate": spec.emulate}
    tokens, x = x.shape[0], padded(x, spec)
    residual = None if residual is None else padded(residual, spec)
    rows, both = x.shape[0], weight.out_features
    x_q, x_saved = quantize_input(x, first.state, spec, how.save_x, dtype)
    t = project_down(x, adapters, dtype)
    t_down = x.new_empty([rows, sum(adapters_down.ranks)] if adapters_down.downs else [0], dtype=dtype)
    y = x.new_empty([rows, weight_down.out_features], dtype=dtype)
    saved = Quantized(*how.new_saved(x, rows, both, dtype)) if how.saves_gate_up else None
    dequantized = None if spec.x else dtype
    w = weight.forward_operand(spec.w, spec.record, dequantized)
    w_down = weight_down.forward_operand(spec.w, spec.record, dequantized)
    a_down = adapters_down.down(dtype) if adapters_down.downs else None
    for part in _parts(rows, both):
        # gu_M2F = x_MK · [w_gate; w_up]ᵀ
        gate_up = multiply(Quantized(x_q.data[part], _rows_of(x_q.scale, part)), w, None, dtype, **fast)
        room = None if saved is None else Quantized(saved.data[part], _rows_of(saved.scale, part))
        h = gated_adapted(gate_up, t[part], adapters, how.activation, room, spec.emulate)
        del gate_up
        if a_down is not None:
            # t = h · Aᵀ
            torch.mm(h, a_down.t(), out=t_down[part])
        h_q, _ = quantize_input(h, last.state, spec, "", dtype)
        del h
        # y_MK = h_MF · w_down_KFᵀ
        multiply(h_q, w_down, None, dtype, out=y[part], **fast)
        add_to(y[part], t_down[part], adapters_down, None if residual is None else residual[part])
        del h_q
    scale = separate_scale(x_saved, x_q)
    return first_rows(y, tokens), x_saved.data, scale, *(saved or empty(x, 2)), t, t_down, *_no_scales(x)


def _no_scales(like: Tensor) -> list[Tensor]:
    return [like.new_empty(0, dtype=torch.float32) for _ in range(3)]


def part_rows(rows: int, width: int) -> int:
    """Return how many tokens to take at a time: equal parts, as few as there can be, of whole tiles."""
    parts = max(1, -(-rows * width // PART))
    return max(1, -(-rows // (parts * TILE))) * TILE


def _parts(rows: int, width: int) -> list[slice]:
    size = part_rows(rows, width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _rows_of(scale: Tensor, part: slice) -> Tensor:
    return scale[part] if scale.dim() and scale.numel() else scale


def _gated_mlp_backward_fake(
    g: Tensor,
    weights: list[Tensor],
    down: list[Tensor],
    matrices: list[Tensor],
    call: str,
    needs: list[bool],
    dtype: torch.dtype,
) -> Any:
    needs_x, needs_w, needs_w_down = needs[:3]
    k, both = weights[0].shape[1], sum(w.shape[0] for w in weights)
    dx = g.new_empty([g.shape[0], k], dtype=dtype) if needs_x else g.new_empty(0)
    dw = g.new_empty([both, k], dtype=Weight(weights).gradient_dtype(g)) if needs_w else g.new_empty(0)
    ddown = g.new_empty(down[0].shape, dtype=Weight(down).gradient_dtype(g)) if needs_w_down else g.new_empty(0)
    first, last = MLPCall.decode(call).adapters(matrices)
    return dx, dw, ddown, *fake_gradients(g, first, *needs[3:5]), *fake_gradients(g, last, *needs[5:])


@operator(mutates=("state_g", "state_dgate_up"), fake=_gated_mlp_backward_fake)
def gated_mlp_backward(
    g: Tensor,
    state_g: Tensor,
    state_dgate_up: Tensor,
    saved: list[Tensor],
    weights: list[Tensor],
    scales: list[Tensor],
    state_w: Tensor | None,
    down: list[Tensor],
    scales_down: list[Tensor],
    state_w_down: Tensor | None,
    matrices: list[Tensor],
    call: str,
    needs: list[bool],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx in `dtype`; dw of gate and up, of down; dA and dB of gate and up, and of down. Empty where not needed.

    `saved`: x, gate and up, each with its scale, `x · Aᵀ`, `h · Aᵀ`, and the scale of h, as `gated_mlp` gave them; x
    may be in high precision, with an empty scale. `needs`: of x, of gate or up, of down, then of any A and B.
    """
    how = MLPCall.decode(call)
    adapters, adapters_down = how.adapters(matrices)
    first = Side(Weight(weights, scales, state_w), state_dgate_up, adapters)
    last = Side(Weight(down, scales_down, state_w_down), state_g, adapters_down)
    return (_in_parts_backward if how.in_parts else _whole_backward)(g, first, last, saved, how, needs, dtype)


def _whole_backward(
    g: Tensor, first: Side, last: Side, saved: Sequence[Tensor], how: MLPCall, needs: Sequence[bool], dtype: torch.dtype
) -> Any:
    spec, weight, weight_down = how.spec, first.weight, last.weight
    x, x_scale, gate_up, gate_up_scale, _, _, h_scale = saved
    needs_x, needs_w, needs_w_down = needs[:3]
    assert spec.x is not None and spec.g is not None
    fast: dict[str, Any] = {"batch": [], "fast": spec.fast_backward, "emulate": spec.emulate}
    dx = dw = ddown = None
    g_q = quantize_gradient(padded(g, spec), last.state, spec, "both" if needs_w_down else "rows")
    # dh_MF = g_MK · w_down_KF
    in_fp8 = gate_up_scale.numel() > 0
    w = weight_down.dgrad_operand(spec.w, None)
    dh = multiply(g_q[0], w, None, g.dtype if in_fp8 else gate_up.dtype, **fast)
    del w
    d_rows, d_columns, h = gated_quantize_backward(
        dh, gate_up, h_scale, first.state, spec.g, spec.x, how.activation, gate_up_scale if in_fp8 else None
    )
    del dh
    if needs_w_down:
        # dw_down_KF = g_MKᵀ · h_MF
        ddown = multiply(g_q[-1], h, None, weight_down.gradient_dtype(g), **fast)
    del g_q, h
    if needs_x:
        # dx_MK = dgu_M2F · [w_gate; w_up]
        w = weight.dgrad_operand(spec.w, None)
        dx = first_rows(multiply(d_rows, w, None, dtype, **fast), g.shape[0])
        del w
    del d_rows
    if needs_w:
        # dw_2FK = dgu_M2Fᵀ · x_MK
        x_km = input_columns(Quantized(x, x_scale), last.state, spec, how.save_x)
        dw = multiply(d_columns, x_km, None, weight.gradient_dtype(g), **fast)
    return or_empty(dx, g), or_empty(dw, g), or_empty(ddown, g), *empty(g, 4)


def _in_parts_backward(
    g: Tensor, first: Side, last: Side, saved: Sequence[Tensor], how: MLPCall, needs: Sequence[bool], dtype: torch.dtype
) -> Any:
    spec, weight, weight_down, adapters, adapters_down = (
        how.spec,
        first.weight,
        last.weight,
        first.adapters,
        last.adapters,
    )
    x, x_scale, gate_up, gate_up_scale, t, t_down, _ = saved
    needs_x, _, _, needs_a, needs_b, needs_a_down, needs_b_down = needs
    fast: dict[str, Any] = {"batch": [], "fast": spec.fast_backward, "emulate": spec.emulate}
    tokens, g = g.shape[0], padded(g, spec)
    dequantized = None if spec.g else g.dtype
    factor, factor_down = (each.row_factor(spec.w, dequantized) for each in (weight, weight_down))
    w_down, w = (each.dgrad_operand(spec.w, dequantized) for each in (weight_down, weight))
    dx = g.new_empty([g.shape[0], weight.parts[0].shape[1]], dtype=dtype) if needs_x else g.new_empty(0)
    gradients_down = AdapterGradients(adapters_down, g, needs_a=needs_a_down, needs_b=needs_b_down)
    gradients = AdapterGradients(adapters, g, needs_a=needs_a, needs_b=needs_b, factor=factor)
    a, a_down = (each.down(dtype) if each.downs else None for each in (adapters, adapters_down))
    for part in _parts(g.shape[0], weight.out_features):
        u_down = gradients_down.grad_projected(g[part], t_down[part])
        # dh_MF = g_MK · w_down_KF + u · A
        g_q = quantize_gradient(g[part], last.state, spec, "rows", factor_down)[0]
        dh = multiply(g_q, w_down, None, g.dtype, **fast)
        del g_q
        saved_part = Quantized(gate_up[part], _rows_of(gate_up_scale, part))
        how_gated: dict[str, Any] = {"factor": factor, "wants_h": needs_a_down, "emulate": spec.emulate}
        gradient = gated_adapted_backward(dh, saved_part, u_down, a_down, how.activation, **how_gated)
        if needs_a_down:
            gradients_down.add_a(u_down, Quantized(dh, dh.new_empty(0)))  # where h is now
        del dh
        u = gradients.grad_projected(gradient, t[part])
        if needs_a:
            gradients.add_a(u, Quantized(x[part], _rows_of(x_scale, part)))
        if needs_x:
            # dx_MK = dgu_M2F · [w_gate; w_up] + u · A
            d_q = quantize_gradient(gradient, first.state, spec, "rows")[0]
            multiply(d_q, w, None, dtype, out=dx[part], **fast)
            del d_q
            if a is not None:
                add_to_input(dx[part], u, a)
        del gradient
    dx = first_rows(dx, tokens) if needs_x else dx
    return dx, *empty(g, 2), *gradients.result(), *gradients_down.result()
