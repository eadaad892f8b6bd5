"""The operators of a gated MLP: y = (act(x · w_gateᵀ) · (x · w_upᵀ)) · w_downᵀ, and the way back.

There are two ways to compute one, for good reasons, and the weights decide which:

    whole       where weights have gradients: dw sums over all tokens in one product, so the activation's kernels also
                quantise, in both layouts (`_whole`)
    in chunks   beside frozen weights: gate and up, or their gradient, the largest tensors of all, are there for a chunk
                of the tokens at a time, and the activation's kernels add the adapters' outputs (`_in_chunks`)

Shapes: M tokens, K width, F hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.numerics import Quantized
from octavo.numerics.norm import Norm
from octavo.ops import few_tokens
from octavo.ops.adapters import (
    NO_ADAPTERS,
    AdapterGradients,
    Adapters,
    add_to,
    add_to_input,
    fake_gradients,
    new_projected,
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
    fake_grad_weight,
    fake_padded,
    fake_saved_input,
    fake_used_scale,
    first_rows,
    input_columns,
    padded,
    quantize_gradient,
    quantize_input,
    separate_scale,
    takes_few_tokens,
)
from octavo.ops.norm import rms_norm
from octavo.ops.register import empty, operator, or_empty
from octavo.ops.weight import Weight

CHUNK = 2**27  # elements of gate and up, or of their gradient, that are there at a time: 4,096 tokens of an 8B
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
    saves_fp8: bool  # save gate and up in FP8
    in_chunks: bool
    saves_gate_up: bool  # else nothing is saved at all
    save_x: str
    x_dtype: torch.dtype  # dtype of the gradient of x
    positions: tuple[str, ...]  # of the adapters of gate and up, and of down

    @staticmethod
    def encode(mlp: MLPSpec, in_chunks: bool, save_x: str, saves_gate_up: bool, x: Tensor, *adapters: Adapters) -> str:
        spec = mlp.linear
        # Beside frozen weights always in FP8, unless products are in high precision and results in FP32.
        saves_fp8 = (spec.x is not None or spec.out_dtype != torch.float32) if in_chunks else mlp.saves_fp8
        saves = saves_gate_up or not in_chunks
        return (
            f"{mlp.activation}|{int(saves_fp8)}{int(in_chunks)}|{Call.encode(spec, save_x, saves, x.dtype, *adapters)}"
        )

    @staticmethod
    @cache
    def decode(text: str) -> "MLPCall":
        activation, flags, call = text.split("|", 2)
        spec, save_x, saves_gate_up, x_dtype, positions = Call.decode(call)
        saves_fp8, in_chunks = (flag == "1" for flag in flags)
        return MLPCall(spec, activation, saves_fp8, in_chunks, saves_gate_up, save_x, x_dtype, positions)

    def adapters(self, matrices: Sequence[Tensor]) -> tuple[Adapters, Adapters]:
        """Return the adapters of gate and up, and those of down: all A, then all B of each."""
        gate_up = Adapters.decode(self.positions[0], matrices)
        return gate_up, Adapters.decode(self.positions[1], matrices[2 * len(gate_up.positions) :])

    def new_saved(self, like: Tensor, rows: Any, features: Any) -> list[Tensor]:
        """Return buffers for gate and up; empty if they are not saved."""
        if not self.saves_gate_up:
            return empty(like, 2)
        if self.saves_fp8:
            return new_saved(like, rows, features)
        return [like.new_empty([rows, features], dtype=self.spec.out_dtype), like.new_empty(0)]


class Side(NamedTuple):
    """One of the two products: gate and up together, or down."""

    weight: Weight
    state: Tensor  # scaling state of its input; in backward, of the gradient of its output
    adapters: Adapters


def _mlp_fake(x: Tensor, weights: list[Tensor], down: list[Tensor], matrices: list[Tensor], call: str) -> Any:
    how = MLPCall.decode(call)
    spec, rows = how.spec, fake_padded(x, how.spec).shape[0]
    y = x.new_empty([x.shape[0], down[0].shape[0]], dtype=spec.out_dtype)
    saved = how.new_saved(x, rows, sum(w.shape[0] for w in weights))
    one_scale = not how.in_chunks and spec.x is not None and spec.x.granularity == "tensor"
    h_scale = x.new_empty(() if one_scale else 0, dtype=torch.float32)
    adapters = how.adapters(matrices) if how.saves_gate_up else (NO_ADAPTERS, NO_ADAPTERS)
    projected = [new_projected(x, each, rows, spec.out_dtype) for each in adapters]
    w_scales = [fake_used_scale(x, w, spec) for w in (weights, down)]
    return y, *fake_saved_input(x, spec, how.save_x), *saved, *projected, h_scale, *w_scales


@operator(mutates=("state_x", "state_h", "state_w", "state_w_down"), fake=_mlp_fake)
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
    norm_weight: Tensor | None,
    norm_eps: float,
    matrices: list[Tensor],
    call: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y plus `residual`; x, and gate and up, as saved, with their scales; `x · Aᵀ` and `h · Aᵀ`; scales for backward.

    Those are the scales of h, of gate and up, and of down; see `Weight.used_scale`. Empty where there is no such thing.
    `weights`: gate and up. `norm_weight`: x has yet to go through this norm; given only where nothing is saved.
    `matrices`: of the adapters, all A, then all B, of gate and up, then of down.
    """
    how = MLPCall.decode(call)
    adapters, adapters_down = how.adapters(matrices)
    gate_up_side = Side(Weight(weights, scales, state_w), state_x, adapters)
    down_side = Side(Weight(down, scales_down, state_w_down), state_h, adapters_down)
    norm = None if norm_weight is None else Norm(norm_weight, norm_eps)
    if not how.saves_gate_up and takes_few_tokens(how.spec):
        products = (gate_up_side.weight, down_side.weight), (adapters, adapters_down)
        y = few_tokens.gated_mlp(x, *products, how.activation, residual, norm, how.spec.out_dtype)
        if y is not None:
            return _with_nothing_saved(y, x, how)
    x = x if norm is None else rms_norm(x, None, norm.weight, norm.eps, norm.shifted)[1]
    return (_in_chunks if how.in_chunks else _whole)(x, gate_up_side, down_side, residual, how)


def _whole(x: Tensor, gate_up_side: Side, down_side: Side, residual: Tensor | None, how: MLPCall) -> Any:
    spec, dtype, weight, weight_down = how.spec, how.spec.out_dtype, gate_up_side.weight, down_side.weight
    assert spec.x is not None
    fast: dict[str, Any] = {"batch": [], "fast": spec.fast_forward, "emulate": spec.emulate}
    x_mk, x_saved = quantize_input(padded(x, spec), gate_up_side.state, spec, how.save_x, weight.parts[0].shape[1])
    # gu_M2F = x_MK · [w_gate; w_up]ᵀ
    w = weight.forward_operand(spec.w, spec.record, None)
    gate_up = multiply(x_mk, w, None, dtype, **fast)
    w_scale = weight.used_scale(w, spec.w)
    del w
    saved = Quantized(*new_saved(x, *gate_up.shape)) if how.saves_fp8 else None
    h = gated_quantize(gate_up, down_side.state, spec.x, how.activation, record=spec.record, saved=saved)
    saved = saved or Quantized(gate_up, *empty(x, 1))
    del gate_up
    # y_MK = h_MF · w_down_KFᵀ
    w = weight_down.forward_operand(spec.w, spec.record, None)
    y = first_rows(multiply(h, w, None, dtype, **fast), x.shape[0])
    w_down_scale = weight_down.used_scale(w, spec.w)
    if residual is not None:
        y.add_(residual)
    h_scale = h.scale if spec.x.granularity == "tensor" else down_side.state.new_empty(0)
    scales = (h_scale, w_scale, w_down_scale)
    return y, x_saved.data, separate_scale(x_saved, x_mk), *saved, *_nothing_projected(x, how), *scales


def _in_chunks(x: Tensor, gate_up_side: Side, down_side: Side, residual: Tensor | None, how: MLPCall) -> Any:
    spec, dtype = how.spec, how.spec.out_dtype
    (weight, _, adapters), (weight_down, _, adapters_down) = gate_up_side, down_side
    fast: dict[str, Any] = {"batch": [], "fast": spec.fast_forward, "emulate": spec.emulate}
    tokens, x = x.shape[0], padded(x, spec)
    residual = None if residual is None else padded(residual, spec)
    rows, both = x.shape[0], weight.out_features
    x_q, x_saved = quantize_input(x, gate_up_side.state, spec, how.save_x)
    t = project_down(x, adapters, dtype)
    t_down = new_projected(x, adapters_down, rows, dtype)
    y = x.new_empty([rows, weight_down.out_features], dtype=dtype)
    saved = Quantized(*how.new_saved(x, rows, both)) if how.saves_gate_up else None
    dequantized = None if spec.x else dtype
    w = weight.forward_operand(spec.w, spec.record, dequantized)
    w_down = weight_down.forward_operand(spec.w, spec.record, dequantized)
    a_down = adapters_down.down(dtype) if adapters_down.downs else None
    for chunk in _chunks(rows, both):
        # gu_M2F = x_MK · [w_gate; w_up]ᵀ
        gate_up = multiply(Quantized(x_q.data[chunk], _rows_of(x_q.scale, chunk)), w, None, dtype, **fast)
        saved_chunk = None if saved is None else Quantized(saved.data[chunk], _rows_of(saved.scale, chunk))
        h = gated_adapted(gate_up, t[chunk], adapters, how.activation, saved_chunk, spec.emulate)
        del gate_up
        if a_down is not None:
            # t = h · Aᵀ
            torch.mm(h, a_down.t(), out=t_down[chunk])
        h_q, _ = quantize_input(h, down_side.state, spec, "")
        del h
        # y_MK = h_MF · w_down_KFᵀ
        multiply(h_q, w_down, None, dtype, out=y[chunk], **fast)
        add_to(y[chunk], t_down[chunk], adapters_down, None if residual is None else residual[chunk])
        del h_q
    scale = separate_scale(x_saved, x_q)
    projected = (t, t_down) if how.saves_gate_up else _nothing_projected(x, how)
    return first_rows(y, tokens), x_saved.data, scale, *(saved or empty(x, 2)), *projected, *_no_scales(x)


def _nothing_projected(like: Tensor, how: MLPCall) -> list[Tensor]:
    return [like.new_empty(0, dtype=how.spec.out_dtype) for _ in range(2)]


def _with_nothing_saved(y: Tensor, like: Tensor, how: MLPCall) -> Any:
    return y, *empty(like, 4), *_nothing_projected(like, how), *_no_scales(like)


def _no_scales(like: Tensor) -> list[Tensor]:
    return [like.new_empty(0, dtype=torch.float32) for _ in range(3)]


def chunk_rows(rows: int, width: int) -> int:
    """Return how many tokens to take at a time: equal chunks, as few as there can be, of whole tiles."""
    chunks = max(1, -(-rows * width // CHUNK))
    return max(1, -(-rows // (chunks * TILE))) * TILE


def _chunks(rows: int, width: int) -> list[slice]:
    size = chunk_rows(rows, width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _rows_of(scale: Tensor, chunk: slice) -> Tensor:
    return scale[chunk] if scale.dim() and scale.numel() else scale


def _backward_fake(
    g: Tensor, weights: list[Tensor], down: list[Tensor], matrices: list[Tensor], call: str, needs: list[bool]
) -> Any:
    how = MLPCall.decode(call)
    dx = g.new_empty([g.shape[0], weights[0].shape[1]], dtype=how.x_dtype) if needs[0] else g.new_empty(0)
    dws = [fake_grad_weight(g, w, how.spec, needed) for w, needed in zip((weights, down), needs[1:3], strict=True)]
    adapters, adapters_down = how.adapters(matrices)
    return dx, *dws, *fake_gradients(g, adapters, *needs[3:5]), *fake_gradients(g, adapters_down, *needs[5:])


@operator(mutates=("state_g", "state_dgate_up"), fake=_backward_fake)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx in the dtype of x; dw of gate and up, of down; dA and dB of gate and up, and of down. Empty where not needed.

    `saved`: x, gate and up, each with its scale, `x · Aᵀ`, `h · Aᵀ`, and the scale of h, as `gated_mlp` gave them; x
    may be in high precision, with an empty scale. `needs`: of x, of gate or up, of down, then of any A and B.
    """
    how = MLPCall.decode(call)
    adapters, adapters_down = how.adapters(matrices)
    gate_up_side = Side(Weight(weights, scales, state_w), state_dgate_up, adapters)
    down_side = Side(Weight(down, scales_down, state_w_down), state_g, adapters_down)
    return (_in_chunks_backward if how.in_chunks else _whole_backward)(g, gate_up_side, down_side, saved, how, needs)


def _whole_backward(
    g: Tensor, gate_up_side: Side, down_side: Side, saved: Sequence[Tensor], how: MLPCall, needs: Sequence[bool]
) -> Any:
    spec, weight, weight_down = how.spec, gate_up_side.weight, down_side.weight
    x, x_scale, gate_up, gate_up_scale, _, _, h_scale = saved
    needs_x, needs_w, needs_w_down = needs[:3]
    assert spec.x is not None and spec.g is not None
    fast: dict[str, Any] = {"batch": [], "fast": spec.fast_backward, "emulate": spec.emulate}
    dx = dw = ddown = None
    g_q = quantize_gradient(padded(g, spec), down_side.state, spec, "both" if needs_w_down else "rows")
    # dh_MF = g_MK · w_down_KF
    is_fp8 = gate_up_scale.numel() > 0
    w = weight_down.dgrad_operand(spec.w, None)
    dh = multiply(g_q[0], w, None, g.dtype if is_fp8 else gate_up.dtype, **fast)
    del w
    d_rows, d_columns, h = gated_quantize_backward(
        dh, gate_up, h_scale, gate_up_side.state, spec.g, spec.x, how.activation, gate_up_scale if is_fp8 else None
    )
    del dh
    if needs_w_down:
        # dw_down_KF = g_MKᵀ · h_MF
        ddown = multiply(g_q[-1], h, None, spec.dw_dtype or weight_down.gradient_dtype(g), **fast)
    del g_q, h
    if needs_x:
        # dx_MK = dgu_M2F · [w_gate; w_up]
        w = weight.dgrad_operand(spec.w, None)
        dx = first_rows(multiply(d_rows, w, None, how.x_dtype, **fast), g.shape[0])
        del w
    del d_rows
    if needs_w:
        # dw_2FK = dgu_M2Fᵀ · x_MK
        x_km = input_columns(Quantized(x, x_scale), down_side.state, spec, how.save_x)
        dw = multiply(d_columns, x_km, None, spec.dw_dtype or weight.gradient_dtype(g), **fast)
    return or_empty(dx, g), or_empty(dw, g), or_empty(ddown, g), *empty(g, 4)


def _in_chunks_backward(
    g: Tensor, gate_up_side: Side, down_side: Side, saved: Sequence[Tensor], how: MLPCall, needs: Sequence[bool]
) -> Any:
    spec, dtype = how.spec, how.x_dtype
    (weight, _, adapters), (weight_down, _, adapters_down) = gate_up_side, down_side
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
    for chunk in _chunks(g.shape[0], weight.out_features):
        u_down = gradients_down.grad_projected(g[chunk], t_down[chunk])
        # dh_MF = g_MK · w_down_KF + u · A
        g_q = quantize_gradient(g[chunk], down_side.state, spec, "rows", factor_down)[0]
        dh = multiply(g_q, w_down, None, g.dtype, **fast)
        del g_q
        saved_chunk = Quantized(gate_up[chunk], _rows_of(gate_up_scale, chunk))
        how_gated: dict[str, Any] = {"factor": factor, "wants_h": needs_a_down, "emulate": spec.emulate}
        gradient = gated_adapted_backward(dh, saved_chunk, u_down, a_down, how.activation, **how_gated)
        if needs_a_down:
            gradients_down.add_a(u_down, Quantized(dh, dh.new_empty(0)))  # where h is now
        del dh
        u = gradients.grad_projected(gradient, t[chunk])
        if needs_a:
            gradients.add_a(u, Quantized(x[chunk], _rows_of(x_scale, chunk)))
        if needs_x:
            # dx_MK = dgu_M2F · [w_gate; w_up] + u · A
            d_q = quantize_gradient(gradient, gate_up_side.state, spec, "rows")[0]
            multiply(d_q, w, None, dtype, out=dx[chunk], **fast)
            del d_q
            if a is not None:
                add_to_input(dx[chunk], u, a)
        del gradient
    dx = first_rows(dx, tokens) if needs_x else dx
    return dx, *empty(g, 2), *gradients.result(), *gradients_down.result()
