"""The activation of a gated MLP, with what is computed around it: by kernels where there are some, else by the spec.

gate and up lie side by side, `gate_up[M, 2F]`. h is `act(gate) · up`. For backward they may be saved in FP8, by
`numerics.activation.save_gate_up` (E4M3, 1×128): `saved` is their buffers, a `Quantized` whose scales are bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics import activation as spec
from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import BLOCK
from octavo.ops.adapters import Adapters, add_to
from octavo.ops.quantize import as_dtype, is_high_precision, quantize_group
from octavo.support import has_fp8_tensor_cores


def new_saved(like: Tensor, rows: Any, features: Any) -> list[Tensor]:
    """Return buffers for gate and up together, in FP8."""
    shape = [rows, -(-features // BLOCK)]
    return [like.new_empty([rows, features], dtype=E4M3.dtype), like.new_empty(shape, dtype=torch.uint8)]


def gated_quantize(
    gate_up: Tensor,
    state: Tensor,
    recipe: OperandRecipe,
    activation: str,
    *,
    record: bool,
    saved: Quantized | None = None,
) -> Quantized:
    """Compute h, quantised as rows; save gate and up, if there are buffers for them."""
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels import gated
        from octavo.kernels.gated import blocks

        if gated.can_quantize(gate_up, recipe) and (saved is None or gated.can_save(gate_up)):
            return gated.gated_quantize(gate_up, state, recipe, activation, record=record, into=saved)
        if saved is None and blocks.can_quantize(gate_up, recipe):
            return blocks.gated_quantize(gate_up, state, recipe, activation, record=record)
    return quantize_group([_gated(gate_up, activation, saved)], state, recipe, record, "rows")[0]


def _gated(gate_up: Tensor, activation: str, saved: Quantized | None) -> Tensor:
    """Compute h in high precision; save gate and up, if there are buffers for them."""
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels import gated
        from octavo.kernels.gated import low_rank

        if saved is None and gated.can_gate(gate_up):
            return gated.gated(gate_up, activation)
        if saved is not None and low_rank.can_gate(gate_up, gate_up.shape[1] // 2):
            return low_rank.gated(gate_up, None, None, activation, saved)
    if saved is not None:
        _save(gate_up, saved)
    return spec.gated(gate_up, activation)


def _save(gate_up: Tensor, saved: Quantized) -> None:
    for buffer, values in zip(saved, spec.save_gate_up(gate_up), strict=True):
        buffer.copy_(values)


def gated_quantize_backward(
    dh: Tensor,
    gate_up: Tensor,
    h_scale: Tensor,
    state: Tensor,
    recipe: OperandRecipe,
    recipe_h: OperandRecipe,
    activation: str,
    saved_scale: Tensor | None = None,
) -> Sequence[Quantized]:
    """Compute the gradient of `gate_up` as rows and as columns, and h as columns.

    `h_scale` is what forward quantised h with; a granularity other than `tensor` finds its own for the columns.
    `saved_scale`: `gate_up` is as it was saved, in FP8.
    """
    if has_fp8_tensor_cores(dh.device):
        from octavo.kernels import gated
        from octavo.kernels.gated import blocks

        if saved_scale is not None and gated.can_quantize(dh, recipe, recipe_h) and gated.can_save(gate_up):
            how = (h_scale, state, recipe, recipe_h, activation)
            return gated.gated_quantize_backward(dh, gate_up, *how, saved_scale=saved_scale)
        if saved_scale is not None:
            gate_up, saved_scale = spec.dequantize_gate_up(Quantized(gate_up, saved_scale)).to(dh.dtype), None
        if gated.can_quantize(gate_up, recipe, recipe_h):
            return gated.gated_quantize_backward(dh, gate_up, h_scale, state, recipe, recipe_h, activation)
        if blocks.can_quantize_backward(gate_up, recipe, recipe_h):
            return blocks.gated_quantize_backward(dh, gate_up, state, recipe, recipe_h, activation)
    if saved_scale is not None:
        gate_up = spec.dequantize_gate_up(Quantized(gate_up, saved_scale)).to(dh.dtype)
    gradient, h = _gated_backward(dh, gate_up, activation)
    gradients = quantize_group([gradient], state, recipe, True, "both")
    known = h_scale if recipe_h.granularity == "tensor" else None
    return [*gradients, *quantize_group([h], state, recipe_h, False, "columns", scale=known)]


def _gated_backward(dh: Tensor, gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Compute the gradient of `gate_up`, and h again."""
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels import gated as kernel

        if kernel.can_gate(gate_up):
            return kernel.gated_backward(dh, gate_up, activation)
    return spec.gated_backward(dh, gate_up, activation), spec.gated(gate_up, activation)


def gated_adapted(
    gate_up: Tensor, t: Tensor, adapters: Adapters, activation: str, saved: Quantized | None, emulate: bool
) -> Tensor:
    """Add the adapters' outputs to gate and up, compute h, and save gate and up, if there are buffers for them."""
    in_hp = saved is not None and is_high_precision(saved)
    if not in_hp and not emulate and has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels.gated import low_rank as kernel

        halves = _halves(t, adapters, gate_up.shape[1] // 2, kernel.Low)
        if halves is not None and kernel.can_gate(gate_up, gate_up.shape[1] // 2, *halves):
            return kernel.gated(gate_up, halves[0], halves[1], activation, saved)
    add_to(gate_up, t, adapters)
    if in_hp and saved is not None:
        saved.data.copy_(gate_up)
    elif saved is not None:
        _save(gate_up, saved)
    return spec.gated(gate_up, activation)


def _halves(t: Tensor, adapters: Adapters, features: int, of: Any) -> list[Any] | None:
    """Return what is added to gate and to up; None if it is not at most one product each."""
    halves: list[Any] = [None, None]
    for position, up, columns in zip(adapters.positions, adapters.ups, adapters.columns(t), strict=True):
        half = position.first // features
        if halves[half] is not None or position.last - position.first != features:
            return None
        halves[half] = of(columns, up, position.scaling)
    return halves


def gated_adapted_backward(
    dh: Tensor,
    saved: Quantized,
    u: Tensor,
    a: Tensor | None,
    activation: str,
    *,
    factor: Tensor | None,
    wants_h: bool,
    emulate: bool,
) -> Tensor:
    """Compute the gradient of gate and up, times `factor`, from dh without its adapters' part, `u · a`.

    If h is wanted, it takes the place of its gradient.
    """
    if not emulate and not is_high_precision(saved) and has_fp8_tensor_cores(dh.device):
        from octavo.kernels.gated import low_rank as kernel

        added = None if a is None else kernel.Low(u, a)
        if kernel.can_gate(dh, dh.shape[1], added):
            return kernel.gated_backward(dh, saved, added, activation, factor=factor, h=wants_h)
    if a is not None:
        dh.addmm_(as_dtype(u, dh.dtype), a.to(dh.dtype))
    gate_up = saved.data if is_high_precision(saved) else spec.dequantize_gate_up(saved)
    gradient = spec.gated_backward(dh, gate_up, activation)
    if factor is not None:
        gradient = gradient * factor
    if wants_h:
        dh.copy_(spec.gated(gate_up, activation))
    return gradient.to(dh.dtype)
