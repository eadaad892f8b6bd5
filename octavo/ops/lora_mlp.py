"""The gated MLP of a frozen FP8 base with adapters: one operator, either way (see `nn/lora_mlp.py`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.numerics import Quantized
from octavo.numerics import activation as spec
from octavo.ops.adapters import Adapters, Gradients, add_to, add_to_input, narrowed
from octavo.ops.frozen import as_operand, first_rows, lists, side_by_side, times, turn
from octavo.ops.gemm import Product
from octavo.ops.linear import empty, fake_padded, new_kept, padded
from octavo.ops.lora import fake_gradients, fake_kept, fake_narrowed
from octavo.ops.quantize import as_dtype, is_high_precision, pack_scale
from octavo.ops.register import install
from octavo.support import has_fp8_tensor_cores

PART = 2**27  # elements of gate and up, or of their gradient, that are there at a time: 4,096 tokens of an 8B
TILE = 256  # tokens

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
_LIBRARY.define(
    "lora_mlp(Tensor x, Tensor? residual, Tensor(a!) row_x, Tensor(b!) row_h, Tensor[] weights, Tensor[] scales, "
    "Tensor down, Tensor down_scale, Tensor[] downs, Tensor[] ups, str adapters, Tensor[] last_downs, "
    "Tensor[] last_ups, str last_adapters, str recipe_x, str activation, bool record, bool keep, bool keep_x, "
    "ScalarType dtype, "
    "bool fast, bool emulate) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "lora_mlp_backward(Tensor g, Tensor(a!) row_g, Tensor(b!) row_dgate_up, Tensor x, Tensor x_scale, Tensor kept, "
    "Tensor kept_scale, Tensor t, Tensor t_last, Tensor[] weights, Tensor[] scales, Tensor down, Tensor down_scale, "
    "Tensor[] downs, Tensor[] ups, str adapters, Tensor[] last_downs, Tensor[] last_ups, str last_adapters, "
    "str recipe_g, str activation, bool[] needs, ScalarType dtype, bool fast, bool emulate) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def lora_mlp(
    x: Tensor, rows: tuple[Tensor, Tensor], weights: Sequence[Quantized], down: Quantized, adapters: Adapters,
    last: Adapters, how: Product, activation: str, *, keep: bool, keep_x: bool, residual: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y plus `residual`, then what may be kept: x, gate and up in FP8 with their scales, `x · Aᵀ` and `h · Aᵀ`.

    `rows`: of x and of h. `weights`: gate and up. `last`: the adapters of down.
    """
    return torch.ops.octavo.lora_mlp(
        x, residual, *rows, *lists(weights), *down, *adapters.given, *last.given, how.frozen_recipes[0], activation,
        how.record, keep, keep_x, how.out_dtype, how.fast_forward, how.emulate,
    )  # fmt: skip


def lora_mlp_backward(
    g: Tensor, rows: tuple[Tensor, Tensor], saved: Sequence[Tensor], weights: Sequence[Quantized], down: Quantized,
    adapters: Adapters, last: Adapters, how: Product, activation: str, *, needs: Sequence[bool], dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dx, and the gradients of all A and B of gate and up, and of down: see `Adapters.split`.

    `rows`: of g and of the gradient of gate and up. `saved`: as `lora_mlp` gave it. `needs`: of x, of A and B of gate
    and up, of A and B of down.
    """
    return torch.ops.octavo.lora_mlp_backward(
        g, *rows, *saved, *lists(weights), *down, *adapters.given, *last.given, how.frozen_recipes[1], activation,
        list(needs), dtype, how.fast_backward, how.emulate,
    )  # fmt: skip


def _lora_mlp(
    x: Tensor, residual: Tensor | None, row_x: Tensor, row_h: Tensor, weights: list[Tensor], scales: list[Tensor],
    down: Tensor, down_scale: Tensor, downs: list[Tensor], ups: list[Tensor], adapters: str, last_downs: list[Tensor],
    last_ups: list[Tensor], last_adapters: str, recipe_x: str, activation: str, record: bool, keep: bool,
    keep_x: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    low, low_last = Adapters.decode(downs, ups, adapters), Adapters.decode(last_downs, last_ups, last_adapters)
    as_it_is = emulate or not recipe_x
    tokens, x = x.shape[0], padded(x, as_it_is)
    residual = None if residual is None else padded(residual, as_it_is)
    rows, both = x.shape[0], sum(w.shape[0] for w in weights)
    x_q = as_operand(x, row_x, recipe_x, record, dtype)
    t = narrowed(x, low, dtype)
    t_last = x.new_empty([rows, sum(low_last.ranks)] if last_downs else [0], dtype=dtype)
    y = x.new_empty([rows, down.shape[0]], dtype=dtype)
    kept = Quantized(*_new_kept(x, rows, both, recipe_x, dtype)) if keep else None
    w = side_by_side(weights, scales, recipe_x, dtype)
    w_down = side_by_side([down], [down_scale], recipe_x, dtype)
    a_last = low_last.down(dtype) if last_downs else None
    for part in _parts(rows, both):
        # gu = x · [w_gate; w_up]ᵀ
        x_m = Quantized(x_q.data[part], _rows_of(x_q.scale, part))
        gate_up = times(x_m, w, None, dtype, fast, emulate)
        into = None if kept is None else Quantized(kept.data[part], _rows_of(kept.scale, part))
        h = _gated(gate_up, t[part], low, activation, into, emulate)
        del gate_up
        if a_last is not None:
            # t = h · Aᵀ
            torch.mm(h, a_last.t(), out=t_last[part])
        h_q = as_operand(h, row_h, recipe_x, record, dtype)
        del h
        # y = h · w_downᵀ
        times(h_q, w_down, None, dtype, fast, emulate, out=y[part])
        add_to(y[part], t_last[part], low_last, None if residual is None else residual[part])
        del h_q
    kept_x = (x_q.data, pack_scale(x_q.scale)) if keep_x else empty(x, 2)
    return first_rows(y, tokens), *kept_x, *(kept or empty(x, 2)), t, t_last


def _new_kept(like: Tensor, rows: Any, both: Any, recipe: str, dtype: torch.dtype) -> list[Tensor]:
    """Room for gate and up: in FP8, but as they are where nothing else is quantised, either, and FP32 was asked for."""
    if recipe or dtype != torch.float32:
        return new_kept(like, rows, both)
    return [like.new_empty([rows, both], dtype=dtype), like.new_empty(0)]


def part_rows(rows: int, width: int) -> int:
    """How many at a time: equal parts, as few as there can be, of whole tiles."""
    parts = max(1, -(-rows * width // PART))
    return max(1, -(-rows // (parts * TILE))) * TILE


def _parts(rows: int, width: int) -> list[slice]:
    size = part_rows(rows, width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _rows_of(scale: Tensor, part: slice) -> Tensor:
    return scale[part] if scale.dim() and scale.numel() else scale


def _gated(gate_up: Tensor, t: Tensor, low: Adapters, activation: str, into: Quantized | None, emulate: bool) -> Tensor:
    """h; and gate and up with their adapters' outputs `into` FP8, if they are to be kept."""
    wide = into is not None and is_high_precision(into)
    if not wide and not emulate and has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels.gated import low_rank as kernel

        halves = _halves(t, low, gate_up.shape[1] // 2, kernel.Low)
        if halves is not None and kernel.can_gate(gate_up, gate_up.shape[1] // 2, *halves):
            return kernel.gated(gate_up, halves[0], halves[1], activation, into)
    add_to(gate_up, t, low)
    if wide and into is not None:
        into.data.copy_(gate_up)
    elif into is not None:
        for room, found in zip(into, spec.keep(gate_up), strict=True):
            room.copy_(found)
    return spec.gated(gate_up, activation)


def _halves(t: Tensor, low: Adapters, features: int, of: Any) -> list[Any] | None:
    """What is added to gate and to up; None if it is not at most one product each."""
    found: list[Any] = [None, None]
    for place, up, part in zip(low.places, low.ups, low.parts(t), strict=True):
        half = place.first // features
        if found[half] is not None or place.last - place.first != features:
            return None
        found[half] = of(part, up, place.scaling)
    return found


def _gated_backward(
    dh: Tensor, kept: Quantized, u: Tensor, a: Tensor | None, activation: str, factor: Tensor | None, wants_h: bool,
    emulate: bool,
) -> Tensor:  # fmt: skip
    """The gradient of gate and up, times `factor`, from that of h without its adapters' part, `u · a`.

    If h is wanted, it takes the place of its gradient.
    """
    if not emulate and not is_high_precision(kept) and has_fp8_tensor_cores(dh.device):
        from octavo.kernels.gated import low_rank as kernel

        added = None if a is None else kernel.Low(u, a)
        if kernel.can_gate(dh, dh.shape[1], added):
            return kernel.gated_backward(dh, kept, added, activation, factor=factor, h=wants_h)
    if a is not None:
        dh.addmm_(as_dtype(u, dh.dtype), a.to(dh.dtype))
    gate_up = kept.data if is_high_precision(kept) else spec.from_kept(kept)
    gradient = spec.gated_backward(dh, gate_up, activation)
    if factor is not None:
        gradient = gradient * factor
    if wants_h:
        dh.copy_(spec.gated(gate_up, activation))
    return gradient.to(dh.dtype)


def _lora_mlp_backward(
    g: Tensor, row_g: Tensor, row_dgate_up: Tensor, x: Tensor, x_scale: Tensor, kept: Tensor, kept_scale: Tensor,
    t: Tensor, t_last: Tensor, weights: list[Tensor], scales: list[Tensor], down: Tensor, down_scale: Tensor,
    downs: list[Tensor], ups: list[Tensor], adapters: str, last_downs: list[Tensor], last_ups: list[Tensor],
    last_adapters: str, recipe_g: str, activation: str, needs: list[bool], dtype: torch.dtype, fast: bool,
    emulate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    low, low_last = Adapters.decode(downs, ups, adapters), Adapters.decode(last_downs, last_ups, last_adapters)
    needs_x, needs_a, needs_b, needs_last_a, needs_last_b = needs
    tokens, g = g.shape[0], padded(g, emulate or not recipe_g)
    turned_down = turn(side_by_side([down], [down_scale], recipe_g, g.dtype))
    turned = turn(side_by_side(weights, scales, recipe_g, g.dtype))
    dx = g.new_empty([g.shape[0], weights[0].shape[1]], dtype=dtype) if needs_x else g.new_empty(0)
    last = Gradients(low_last, g, needs_a=needs_last_a, needs_b=needs_last_b)
    first = Gradients(low, g, needs_a=needs_a, needs_b=needs_b, factor=turned.factor)
    a, a_last = (each.down(dtype) if each.downs else None for each in (low, low_last))
    # In parts, so that the gradient of gate and up, the largest tensor of all, is never there as a whole.
    for part in _parts(g.shape[0], sum(w.shape[0] for w in weights)):
        u_last = last.widen(g[part], t_last[part])
        # dh = g · w_down + u · A
        dh = turned_down.dgrad(g[part], row_g, recipe_g, g.dtype, fast, emulate)
        gradient = _gated_backward(
            dh, Quantized(kept[part], _rows_of(kept_scale, part)), u_last, a_last, activation, turned.factor,
            needs_last_a, emulate,
        )  # fmt: skip
        if needs_last_a:
            last.add_a(u_last, Quantized(dh, dh.new_empty(0)))  # where h is now
        del dh
        u = first.widen(gradient, t[part])
        if needs_a:
            first.add_a(u, Quantized(x[part], _rows_of(x_scale, part)))
        if needs_x:
            # dx = dgu · [w_gate; w_up] + u · A
            turned.dgrad(gradient, row_dgate_up, recipe_g, dtype, fast, emulate, folded=True, out=dx[part])
            if a is not None:
                add_to_input(dx[part], u, a)
        del gradient
    return first_rows(dx, tokens) if needs_x else dx, *first.result(), *last.result()


def _lora_mlp_fake(
    x: Tensor, residual: Tensor | None, row_x: Tensor, row_h: Tensor, weights: list[Tensor], scales: list[Tensor],
    down: Tensor, down_scale: Tensor, downs: list[Tensor], ups: list[Tensor], adapters: str, last_downs: list[Tensor],
    last_ups: list[Tensor], last_adapters: str, recipe_x: str, activation: str, record: bool, keep: bool,
    keep_x: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    y = x.new_empty([x.shape[0], down.shape[0]], dtype=dtype)
    rows, both = fake_padded(x, emulate or not recipe_x).shape[0], sum(w.shape[0] for w in weights)
    kept = _new_kept(x, rows, both, recipe_x, dtype)
    narrowed = [fake_narrowed(x, matrices, rows, dtype) for matrices in (downs, last_downs)]
    return y, *fake_kept(x, recipe_x, keep_x, emulate), *(kept if keep else empty(x, 2)), *narrowed


def _lora_mlp_backward_fake(
    g: Tensor, row_g: Tensor, row_dgate_up: Tensor, x: Tensor, x_scale: Tensor, kept: Tensor, kept_scale: Tensor,
    t: Tensor, t_last: Tensor, weights: list[Tensor], scales: list[Tensor], down: Tensor, down_scale: Tensor,
    downs: list[Tensor], ups: list[Tensor], adapters: str, last_downs: list[Tensor], last_ups: list[Tensor],
    last_adapters: str, recipe_g: str, activation: str, needs: list[bool], dtype: torch.dtype, fast: bool,
    emulate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx = g.new_empty([g.shape[0], weights[0].shape[1]], dtype=dtype) if needs[0] else g.new_empty(0)
    first = fake_gradients(g, downs, ups, *needs[1:3])
    return dx, *first, *fake_gradients(g, last_downs, last_ups, *needs[3:])


for _name, _implementation, _fake in (
    ("lora_mlp", _lora_mlp, _lora_mlp_fake),
    ("lora_mlp_backward", _lora_mlp_backward, _lora_mlp_backward_fake),
):
    install(_LIBRARY, _name, _implementation, _fake)
