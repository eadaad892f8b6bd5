"""The operations of whole layers, beside those of `ops.py`: linears and the gated MLP, forward and backward.

Each is one operator. Python takes tens of microseconds for every operator of a compiled layer, and a small model's GPU
waits for that (docs/LOG.md); and what is quantised inside one lives no longer than that and cannot be moved: the
partitioner of `torch.compile` would take backward's quantising of weights into forward, and keep the result.

Shapes: M tokens, K inputs, N outputs, F hidden. Scales are packed as operators need them; see `ops.pack_scale`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics import activation as spec
from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import BLOCK
from octavo.ops.gemm import Product, multiply
from octavo.ops.quantize import fake_quantize, pack_scale, quantize_group, transpose_bytes
from octavo.ops.register import install
from octavo.ops.weight import gradient_dtype, is_fp8, weight_gemm
from octavo.support import has_fp8_tensor_cores

TILE = 64  # tokens

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor(a!) row_x, Tensor[] weights, Tensor(b!) row_w, Tensor? bias, str recipe_x, str recipe_w, "
    "bool record, str keep, ScalarType dtype, bool fast, bool emulate) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "linear_backward(Tensor g, Tensor(a!) row_g, Tensor x, Tensor x_scale, Tensor[] weights, Tensor row_w, "
    "str recipe_g, str recipe_w, bool x_is_rows, bool needs_x, bool needs_w, ScalarType dtype, bool fast, "
    "bool emulate) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "mlp(Tensor x, Tensor gate, Tensor up, Tensor down, Tensor(a!) row_x, Tensor(b!) row_gate_up, Tensor(c!) row_h, "
    "Tensor(d!) row_down, str recipe_x, str recipe_w, str activation, bool record, str keep, bool in_fp8, "
    "ScalarType dtype, bool fast, bool emulate) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "mlp_backward(Tensor g, Tensor x, Tensor x_scale, Tensor gate_up, Tensor gate_up_scale, Tensor h_scale, "
    "Tensor gate, Tensor up, Tensor down, Tensor(a!) row_g, Tensor row_down, Tensor(b!) row_dgate_up, "
    "Tensor row_gate_up, str recipe_x, str recipe_w, str recipe_g, str activation, bool x_is_rows, bool[] needs, "
    "ScalarType dtype, bool fast, bool emulate) -> (Tensor, Tensor, Tensor)"
)


def linear(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, rows: tuple[Tensor, Tensor], how: Product, *, keep: str
) -> tuple[Tensor, Quantized, Tensor]:
    """`x[M, K] · w[N, K]ᵀ + bias` for `w` the weights side by side, x as it is to be kept, and the weights' scale.

    That scale is what `linear_backward` takes in the place of the row, if it is not empty; see `weight_gemm`.
    `rows`: of x and of the weights. Weights may be in FP8 already: in the place of their row comes their scale then.
    `keep`: `columns`, as the weight's gradient wants it; `rows`, if something else wants it so, too; or nothing.
    """
    y, data, scale, w_scale = torch.ops.octavo.linear(
        x, rows[0], list(weights), rows[1], bias, how.a.encode(), how.b.encode(), how.record, keep, how.out_dtype,
        how.fast_forward, how.emulate,
    )  # fmt: skip
    return y, Quantized(data, scale), w_scale


def linear_backward(
    g: Tensor, x: Quantized, weights: Sequence[Tensor], rows: tuple[Tensor, Tensor], how: Product,
    *, x_is_rows: bool = False, needs_x: bool, needs_w: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx in `dtype` and dw, of all weights; empty where not needed. `rows`: of g, and what stands for the weights'."""
    return torch.ops.octavo.linear_backward(
        g, rows[0], *x, list(weights), rows[1], how.g.encode(), how.b.encode(), x_is_rows, needs_x, needs_w, dtype,
        how.fast_backward, how.emulate,
    )  # fmt: skip


def mlp(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], rows: tuple[Tensor, Tensor, Tensor, Tensor], how: Product,
    activation: str, *, keep: str, in_fp8: bool,
) -> tuple[Tensor, Quantized, Quantized, Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """y, x as it is to be kept (see `linear`), gate and up side by side, and the scales of h and of the weights.

    `weights`: gate, up, down. `rows`: of x, of gate and up, of h, of down. `in_fp8`: gate and up are to be kept in FP8,
    with scales in bytes; else they are as they were, and their scale is empty.
    """
    y, data, scale, *gate_up, h_scale, gate_up_scale, down_scale = torch.ops.octavo.mlp(
        x, *weights, *rows, how.a.encode(), how.b.encode(), activation, how.record, keep, in_fp8, how.out_dtype,
        how.fast_forward, how.emulate,
    )  # fmt: skip
    return y, Quantized(data, scale), Quantized(*gate_up), h_scale, (gate_up_scale, down_scale)


def mlp_backward(
    g: Tensor, x: Quantized, gate_up: Quantized, h_scale: Tensor, weights: tuple[Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor, Tensor], how: Product, activation: str, *, x_is_rows: bool = False,
    needs: Sequence[bool], dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx in `dtype`, dw of gate and up together, dw of down; empty where not needed.

    `rows`: of g, of down, of the gradient of gate and up, of gate and up. `needs`: of x, of gate or up, of down.
    """
    return torch.ops.octavo.mlp_backward(
        g, *x, *gate_up, h_scale, *weights, *rows, how.a.encode(), how.b.encode(), how.g.encode(), activation,
        x_is_rows, list(needs), dtype, how.fast_backward, how.emulate,
    )  # fmt: skip


def gated_quantize(
    gate_up: Tensor, row: Tensor, recipe: OperandRecipe, activation: str, *, record: bool, into: Quantized | None = None
) -> Quantized:
    """`numerics.activation.gated(gate_up)`, quantised as rows; gate and up `into` FP8, if they are to be kept so."""
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels import gated
        from octavo.kernels.gated import blocks as gated_scaled

        if gated.can_quantize(gate_up, recipe) and (into is None or gated.can_keep(gate_up)):
            return gated.gated_quantize(gate_up, row, recipe, activation, record=record, into=into)
        if into is None and gated_scaled.can_quantize(gate_up, recipe):
            return gated_scaled.gated_quantize(gate_up, row, recipe, activation, record=record)
    return quantize_group([gated_keeping(gate_up, activation, into)], row, recipe, record, "rows")[0]


def gated_keeping(gate_up: Tensor, activation: str, into: Quantized | None) -> Tensor:
    """h in high precision; gate and up `into` FP8, if they are to be kept so."""
    if into is None:
        return _gated(gate_up, activation)
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels.gated import low_rank as kernel

        if kernel.can_gate(gate_up, gate_up.shape[1] // 2):
            return kernel.gated(gate_up, None, None, activation, into)
    for room, found in zip(into, spec.keep(gate_up), strict=True):
        room.copy_(found)
    return spec.gated(gate_up, activation)


def new_kept(like: Tensor, rows: Any, features: Any) -> list[Tensor]:
    """Room for gate and up together, as `numerics.activation.keep` keeps them."""
    shape = [rows, -(-features // BLOCK)]
    return [like.new_empty([rows, features], dtype=E4M3.dtype), like.new_empty(shape, dtype=torch.uint8)]


def gated_quantize_backward(
    dh: Tensor, gate_up: Tensor, h_scale: Tensor, row: Tensor, recipe: OperandRecipe, recipe_h: OperandRecipe,
    activation: str, kept_scale: Tensor | None = None,
) -> Sequence[Quantized]:  # fmt: skip
    """The gradient of `gate_up` as rows and as columns, and `gated(gate_up)` as columns.

    `h_scale` is what forward quantised h with; a granularity other than `tensor` finds its own for the columns.
    `kept_scale`: `gate_up` is as it was kept, in FP8.
    """
    if has_fp8_tensor_cores(dh.device):
        from octavo.kernels import gated
        from octavo.kernels.gated import blocks as gated_scaled

        if kept_scale is not None and gated.can_quantize(dh, recipe, recipe_h) and gated.can_keep(gate_up):
            how = (h_scale, row, recipe, recipe_h, activation)
            return gated.gated_quantize_backward(dh, gate_up, *how, kept_scale=kept_scale)
        if kept_scale is not None:
            gate_up, kept_scale = spec.from_kept(Quantized(gate_up, kept_scale)).to(dh.dtype), None
        if gated.can_quantize(gate_up, recipe, recipe_h):
            return gated.gated_quantize_backward(dh, gate_up, h_scale, row, recipe, recipe_h, activation)
        if gated_scaled.can_quantize_backward(gate_up, recipe, recipe_h):
            return gated_scaled.gated_quantize_backward(dh, gate_up, row, recipe, recipe_h, activation)
    if kept_scale is not None:
        gate_up = spec.from_kept(Quantized(gate_up, kept_scale)).to(dh.dtype)
    gradient, h = _gated_backward(dh, gate_up, activation)
    found = quantize_group([gradient], row, recipe, True, "both")
    known = h_scale if recipe_h.granularity == "tensor" else None
    return [*found, *quantize_group([h], row, recipe_h, False, "columns", scale=known)]


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels import gated as kernel

        if kernel.can_gate(gate_up):
            return kernel.gated(gate_up, activation)
    return spec.gated(gate_up, activation)


def _gated_backward(dh: Tensor, gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if has_fp8_tensor_cores(gate_up.device):
        from octavo.kernels import gated as kernel

        if kernel.can_gate(gate_up):
            return kernel.gated_backward(dh, gate_up, activation)
    return spec.gated_backward(dh, gate_up, activation), spec.gated(gate_up, activation)


def _pads(device: torch.device, emulate: bool) -> bool:
    """Whether zero rows are added: kernels and GEMMs on tensor cores want whole tiles. They change no result."""
    return not emulate and has_fp8_tensor_cores(device)


def _padded_rows(rows: int) -> int:
    return -(-rows // TILE) * TILE


def padded(x: Tensor, emulate: bool) -> Tensor:
    missing = _padded_rows(x.shape[0]) - x.shape[0] if _pads(x.device, emulate) else 0
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def _quantize_input(x: Tensor, row: Tensor, recipe: OperandRecipe, record: bool, keep: str) -> tuple[Quantized, ...]:
    """x as rows, and as it is to be kept, or something empty."""
    found = quantize_group([x], row, recipe, record, "both" if keep == "columns" else "rows")
    return found[0], found[-1] if keep else Quantized(*empty(x, 2))


def _columns(x: Tensor, scale: Tensor, is_rows: bool) -> Quantized:
    """What was kept of x, as columns. Rows have one scale for all, so they can be turned."""
    return Quantized(transpose_bytes(x) if is_rows else x, scale)


def empty(like: Tensor, count: int) -> list[Tensor]:
    """An operator returns tensors, and never one twice."""
    return [like.new_empty(0) for _ in range(count)]


def _fresh_scale(q: Quantized, other: Quantized) -> Tensor:
    """Per tensor, both layouts may share one scale."""
    return pack_scale(q.scale.clone() if q.scale is other.scale and q is not other else q.scale)


def _linear(
    x: Tensor, row_x: Tensor, weights: list[Tensor], row_w: Tensor, bias: Tensor | None, recipe_x: str, recipe_w: str,
    record: bool, keep: str, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    x_mk, x_km = _quantize_input(padded(x, emulate), row_x, OperandRecipe.decode(recipe_x), record, keep)
    # y = x · wᵀ
    w = OperandRecipe.decode(recipe_w)
    y, w_scale = weight_gemm(x_mk, weights, row_w, w, bias=bias, record=record, dtype=dtype, fast=fast, emulate=emulate)
    return y[: x.shape[0]], x_km.data, _fresh_scale(x_km, x_mk), w_scale


def _linear_backward(
    g: Tensor, row_g: Tensor, x: Tensor, x_scale: Tensor, weights: list[Tensor], row_w: Tensor, recipe_g: str,
    recipe_w: str, x_is_rows: bool, needs_x: bool, needs_w: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx, dw = empty(g, 2)
    layout = "both" if needs_x and needs_w else "rows" if needs_x else "columns"
    g_q = quantize_group([padded(g, emulate)], row_g, OperandRecipe.decode(recipe_g), True, layout)
    if needs_x:
        # dx = g · w
        w = OperandRecipe.decode(recipe_w)
        dx, _ = weight_gemm(g_q[0], weights, row_w, w, transpose=True, dtype=dtype, fast=fast, emulate=emulate)
        dx = dx[: g.shape[0]]
    if needs_w:
        # dw = gᵀ · x
        w_dtype = gradient_dtype(weights[0], g)
        dw = multiply(g_q[-1], _columns(x, x_scale, x_is_rows), None, w_dtype, [], fast, emulate)
    return dx, dw


def _mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, row_x: Tensor, row_gate_up: Tensor, row_h: Tensor,
    row_down: Tensor, recipe_x: str, recipe_w: str, activation: str, record: bool, keep: str, in_fp8: bool,
    dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    x_recipe, w_recipe = OperandRecipe.decode(recipe_x), OperandRecipe.decode(recipe_w)
    how: dict[str, Any] = {"record": record, "dtype": dtype, "fast": fast, "emulate": emulate}
    x_mk, x_km = _quantize_input(padded(x, emulate), row_x, x_recipe, record, keep)
    # gu = x · [w_gate; w_up]ᵀ
    gate_up, gate_up_w_scale = weight_gemm(x_mk, (gate, up), row_gate_up, w_recipe, **how)
    kept = Quantized(*new_kept(x, *gate_up.shape)) if in_fp8 else None
    h = gated_quantize(gate_up, row_h, x_recipe, activation, record=record, into=kept)
    found = kept or Quantized(gate_up, *empty(x, 1))
    del gate_up
    # y = h · w_downᵀ
    y, down_w_scale = weight_gemm(h, (down,), row_down, w_recipe, **how)
    h_scale = h.scale if x_recipe.granularity == "tensor" else empty(row_h, 1)[0]
    scales = (h_scale, gate_up_w_scale, down_w_scale)
    return y[: x.shape[0]], x_km.data, _fresh_scale(x_km, x_mk), *found, *scales


def _mlp_backward(
    g: Tensor, x: Tensor, x_scale: Tensor, gate_up: Tensor, gate_up_scale: Tensor, h_scale: Tensor, gate: Tensor,
    up: Tensor, down: Tensor, row_g: Tensor, row_down: Tensor, row_dgate_up: Tensor, row_gate_up: Tensor,
    recipe_x: str, recipe_w: str, recipe_g: str, activation: str, x_is_rows: bool, needs: list[bool],
    dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    needs_x, needs_gate_up, needs_down = needs
    x_recipe, w_recipe, g_recipe = (OperandRecipe.decode(text) for text in (recipe_x, recipe_w, recipe_g))
    how: dict[str, Any] = {"fast": fast, "emulate": emulate}
    dx, dgate_up, ddown = empty(g, 3)
    g_q = quantize_group([padded(g, emulate)], row_g, g_recipe, True, "both" if needs_down else "rows")
    # dh = g · w_down
    in_fp8 = gate_up_scale.numel() > 0
    wide = g.dtype if in_fp8 else gate_up.dtype
    dh, _ = weight_gemm(g_q[0], (down,), row_down, w_recipe, transpose=True, dtype=wide, **how)
    d_rows, d_columns, h = gated_quantize_backward(
        dh, gate_up, h_scale, row_dgate_up, g_recipe, x_recipe, activation, gate_up_scale if in_fp8 else None
    )  # fmt: skip
    del dh
    if needs_down:
        # dw_down = gᵀ · h
        ddown = multiply(g_q[-1], h, None, gradient_dtype(down, g), [], **how)
    del g_q, h
    if needs_x:
        # dx = dgu · [w_gate; w_up]
        dx, _ = weight_gemm(d_rows, (gate, up), row_gate_up, w_recipe, transpose=True, dtype=dtype, **how)
        dx = dx[: g.shape[0]]
    del d_rows
    if needs_gate_up:
        # dw_gate_up = dguᵀ · x
        w_dtype = gradient_dtype(gate, g)
        dgate_up = multiply(d_columns, _columns(x, x_scale, x_is_rows), None, w_dtype, [], **how)
    return dx, dgate_up, ddown


def fake_padded(x: Tensor, emulate: bool) -> Tensor:
    return x.new_empty([_padded_rows(x.shape[0]), x.shape[1]]) if _pads(x.device, emulate) else x


def _fake_input(x: Tensor, recipe: str, keep: str, emulate: bool) -> tuple[Tensor, Tensor]:
    if not keep:
        return x.new_empty(0), x.new_empty(0)
    return fake_quantize(fake_padded(x, emulate), OperandRecipe.decode(recipe), transpose=keep == "columns")


def _linear_fake(
    x: Tensor, row_x: Tensor, weights: list[Tensor], row_w: Tensor, bias: Tensor | None, recipe_x: str, recipe_w: str,
    record: bool, keep: str, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    y = x.new_empty([x.shape[0], sum(w.shape[0] for w in weights)], dtype=dtype)
    return y, *_fake_input(x, recipe_x, keep, emulate), _fake_weight_scale(weights[0], row_w, recipe_w)


def _fake_weight_scale(weight: Tensor, row: Tensor, recipe: str) -> Tensor:
    is_known = OperandRecipe.decode(recipe).delayed and not is_fp8(weight)
    return row.new_empty(() if is_known else 0)


def _linear_backward_fake(
    g: Tensor, row_g: Tensor, x: Tensor, x_scale: Tensor, weights: list[Tensor], row_w: Tensor, recipe_g: str,
    recipe_w: str, x_is_rows: bool, needs_x: bool, needs_w: bool, dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k, w_dtype = weights[0].shape[1], gradient_dtype(weights[0], g)
    dx = g.new_empty([g.shape[0], k], dtype=dtype) if needs_x else g.new_empty(0)
    return dx, g.new_empty([g.shape[1], k], dtype=w_dtype) if needs_w else g.new_empty(0)


def _mlp_fake(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, row_x: Tensor, row_gate_up: Tensor, row_h: Tensor,
    row_down: Tensor, recipe_x: str, recipe_w: str, activation: str, record: bool, keep: str, in_fp8: bool,
    dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    y = x.new_empty([x.shape[0], down.shape[0]], dtype=dtype)
    tokens = fake_padded(x, emulate).shape[0]
    shape = [tokens, gate.shape[0] + up.shape[0]]
    gate_up = new_kept(x, *shape) if in_fp8 else [x.new_empty(shape, dtype=dtype), x.new_empty(0)]
    one_scale = OperandRecipe.decode(recipe_x).granularity == "tensor"
    h_scale = row_h.new_empty(()) if one_scale else row_h.new_empty(0)
    scales = (_fake_weight_scale(w, row, recipe_w) for w, row in ((gate, row_gate_up), (down, row_down)))
    return y, *_fake_input(x, recipe_x, keep, emulate), *gate_up, h_scale, *scales


def _mlp_backward_fake(
    g: Tensor, x: Tensor, x_scale: Tensor, gate_up: Tensor, gate_up_scale: Tensor, h_scale: Tensor, gate: Tensor,
    up: Tensor, down: Tensor, row_g: Tensor, row_down: Tensor, row_dgate_up: Tensor, row_gate_up: Tensor,
    recipe_x: str, recipe_w: str, recipe_g: str, activation: str, x_is_rows: bool, needs: list[bool],
    dtype: torch.dtype, fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    needs_x, needs_gate_up, needs_down = needs
    dx = g.new_empty([g.shape[0], gate.shape[1]], dtype=dtype) if needs_x else g.new_empty(0)
    both = [gate.shape[0] + up.shape[0], gate.shape[1]]
    dgate_up = g.new_empty(both, dtype=gradient_dtype(gate, g)) if needs_gate_up else g.new_empty(0)
    ddown = g.new_empty(down.shape, dtype=gradient_dtype(down, g)) if needs_down else g.new_empty(0)
    return dx, dgate_up, ddown


for _name, _implementation, _fake in (
    ("linear", _linear, _linear_fake),
    ("linear_backward", _linear_backward, _linear_backward_fake),
    ("mlp", _mlp, _mlp_fake),
    ("mlp_backward", _mlp_backward, _mlp_backward_fake),
):
    install(_LIBRARY, _name, _implementation, _fake)
