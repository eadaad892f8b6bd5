"""The operators of linears that share one input: y = x · [w₁; w₂; …]ᵀ + b, and the way back.

Each is one operator. Python takes tens of microseconds for every operator of a compiled layer, and a small model's GPU
waits for that (docs/LOG.md); and tensors that are quantised inside one live no longer than that and cannot be moved:
the partitioner of `torch.compile` would take backward's quantising of weights into forward, and keep the result.

Shapes: M tokens, K inputs, N outputs, ΣR the ranks of all adapters. Scales are packed (`ops.quantize.pack_scale`).
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
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
from octavo.ops.gemm import multiply
from octavo.ops.norm import rms_norm
from octavo.ops.packed import is_packed, unpack_rows
from octavo.ops.quantize import (
    as_dtype,
    fake_quantize,
    is_high_precision,
    pack_scale,
    quantize_folded,
    quantize_group,
    transpose_bytes,
)
from octavo.ops.register import empty, operator, or_empty
from octavo.ops.weight import Weight
from octavo.support import has_fp8_tensor_cores

TILE = 64  # tokens


@dataclass(frozen=True)
class LinearSpec:
    """How a linear is computed: everything about it but its tensors, its adapters and what it saves."""

    x: OperandRecipe | None  # None: y is a product in high precision, by what a frozen weight dequantises to
    w: OperandRecipe | None  # None: the weight is frozen
    g: OperandRecipe | None  # None: so is dx
    out_dtype: torch.dtype
    record: bool = True  # learn scales and statistics from this use
    emulate: bool = False  # by the specification even where there are kernels
    fast_forward: bool = True  # tensor cores may keep about 14 bits of a running sum
    fast_backward: bool = False
    dw_dtype: torch.dtype | None = None  # of the weight's gradient, where the weight arrives in FP8 (`nn/gathered.py`)
    text: str = field(init=False, repr=False, compare=False)  # all of it, as operators take it

    def __post_init__(self) -> None:
        recipes = "|".join("" if recipe is None else recipe.encode() for recipe in (self.x, self.w, self.g))
        flags = "".join(str(int(flag)) for flag in (self.record, self.emulate, self.fast_forward, self.fast_backward))
        dtypes = self.out_dtype if self.dw_dtype is None else f"{self.out_dtype},{self.dw_dtype}"
        object.__setattr__(self, "text", f"{recipes}|{flags}|{dtypes}")

    @property
    def pads(self) -> bool:
        """True if rows of zeros may be added: kernels and GEMMs on tensor cores want whole tiles."""
        return not self.emulate and (self.x is not None or self.g is not None)


@cache
def linear_spec(
    x: OperandRecipe | None, w: OperandRecipe | None, g: OperandRecipe | None, out_dtype: torch.dtype, *rest: Any
) -> LinearSpec:
    """Return the `LinearSpec` of these fields, made once: a forward pass asks for the same one in every call."""
    return LinearSpec(x, w, g, out_dtype, *rest)


class Call(NamedTuple):
    """A `LinearSpec` with what a single call decides, as it crosses into an operator: one string."""

    spec: LinearSpec
    save_x: str  # "rows", "columns" (as dw wants it) or "" for nothing
    saves: bool  # anything is saved for backward, which there may be
    x_dtype: torch.dtype  # dtype of the gradient of x
    positions: tuple[str, ...]  # of the adapters of each product

    @staticmethod
    def encode(spec: LinearSpec, save_x: str, saves: bool, x_dtype: torch.dtype, *adapters: Adapters) -> str:
        return "|".join([spec.text, save_x, str(int(saves)), str(x_dtype), *(each.encode() for each in adapters)])

    @staticmethod
    @cache
    def decode(text: str) -> "Call":
        x, w, g, flags, dtypes, save_x, saves, x_dtype, *positions = text.split("|")
        recipes = [OperandRecipe.decode(recipe) if recipe else None for recipe in (x, w, g)]
        x_dtype_, out, *dw = (getattr(torch, name.removeprefix("torch.")) for name in (x_dtype, *dtypes.split(",")))
        rest: list[Any] = [*(flag == "1" for flag in flags), *dw]
        spec = LinearSpec(recipes[0], recipes[1], recipes[2], out, *rest)
        return Call(spec, save_x, saves == "1", x_dtype_, tuple(positions))


def _linear_fake(x: Tensor, weights: list[Tensor], matrices: list[Tensor], call: str) -> Any:
    spec, save_x, saves, _, (positions,) = Call.decode(call)
    y = x.new_empty([x.shape[0], sum(w.shape[0] for w in weights)], dtype=spec.out_dtype)
    adapters = Adapters.decode(positions, matrices) if saves else NO_ADAPTERS
    t = new_projected(x, adapters, x.shape[0], spec.out_dtype)
    return y, *fake_saved_input(x, spec, save_x), t, fake_used_scale(x, weights, spec)


@operator(mutates=("state_x", "state_w"), fake=_linear_fake)
def linear(
    x: Tensor,
    state_x: Tensor,
    weights: list[Tensor],
    scales: list[Tensor],
    state_w: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    matrices: list[Tensor],
    call: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y; x as saved, and its scale; `x · Aᵀ`; the weight's scale. Empty where there is no such thing, or none is saved.

    `norm_weight`: x has yet to go through this norm; given only where nothing is saved. `matrices`: of the adapters,
    all A, then all B. The weight's scale is for `linear_backward`; see `Weight.used_scale`.
    """
    spec, save_x, saves, _, (positions,) = Call.decode(call)
    dtype, adapters, weight = spec.out_dtype, Adapters.decode(positions, matrices), Weight(weights, scales, state_w)
    norm = None if norm_weight is None else Norm(norm_weight, norm_eps)
    if not saves and takes_few_tokens(spec):
        few = few_tokens.linear(x, weight, adapters, bias, residual, norm, dtype)
        if few is not None:
            x_empty, scale_empty = empty(x, 2)
            return few, x_empty, scale_empty, x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)
    x = x if norm is None else rms_norm(x, None, norm.weight, norm.eps, norm.shifted)[1]
    x_q, x_saved = quantize_input(padded(x, spec), state_x, spec, save_x, weights[0].shape[1])
    w = weight.forward_operand(spec.w, spec.record, None if spec.x else dtype)
    # y_MN = x_MK · w_NKᵀ
    y = multiply(x_q, w, bias, dtype, [], spec.fast_forward, spec.emulate)
    w_scale = weight.used_scale(w, spec.w)
    del w
    y = first_rows(y, x.shape[0])
    t = project_down(x, adapters, dtype)
    if matrices or residual is not None:
        add_to(y, t, adapters, residual)
    t = t if saves else x.new_empty(0, dtype=dtype)
    return y, x_saved.data, separate_scale(x_saved, x_q), t, w_scale


def takes_few_tokens(spec: LinearSpec) -> bool:
    """Whether there may be kernels for few tokens: products in high precision by a frozen weight."""
    return spec.x is None and spec.w is None and not spec.emulate


def _backward_fake(g: Tensor, weights: list[Tensor], matrices: list[Tensor], call: str, needs: list[bool]) -> Any:
    spec, _, _, x_dtype, (positions,) = Call.decode(call)
    dx = g.new_empty([g.shape[0], weights[0].shape[1]], dtype=x_dtype) if needs[0] else g.new_empty(0)
    adapters = Adapters.decode(positions, matrices)
    return dx, fake_grad_weight(g, weights, spec, needs[1]), *fake_gradients(g, adapters, *needs[2:])


@operator(mutates=("state_g",), fake=_backward_fake)
def linear_backward(
    g: Tensor,
    state_g: Tensor,
    saved: list[Tensor | None],
    weights: list[Tensor],
    scales: list[Tensor],
    state_w: Tensor | None,
    matrices: list[Tensor],
    call: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx in the dtype of x; dw of all weights; dA and dB (see `Adapters.split`). Empty where not needed.

    `saved`: x, its scale and `x · Aᵀ` as `linear` gave them, or x in high precision with an empty scale; None where
    nothing was saved. `needs`: of x, w, any A, any B.
    """
    spec, save_x, _, x_dtype, (positions,) = Call.decode(call)
    adapters, weight = Adapters.decode(positions, matrices), Weight(weights, scales, state_w)
    x, x_scale, t = saved
    needs_x, needs_w, needs_a, needs_b = needs
    dx = dw = da = db = None
    if matrices:
        assert t is not None
        gradients = AdapterGradients(adapters, g, needs_a=needs_a, needs_b=needs_b)
        u = gradients.grad_projected(g, t)
        if needs_a:
            gradients.add_a(u, as_saved(x, x_scale))
        da, db = gradients.result()
    if needs_x or needs_w:
        layout = "both" if needs_x and needs_w else "rows" if needs_x else "columns"
        factor = weight.row_factor(spec.w, None if spec.g else g.dtype)
        g_q = quantize_gradient(padded(g, spec), state_g, spec, layout, factor)
    how: dict[str, Any] = {"batch": [], "fast": spec.fast_backward, "emulate": spec.emulate}
    if needs_x:
        # dx_MK = g_MN · w_NK
        w = weight.dgrad_operand(spec.w, None if spec.g else g.dtype)
        dx = first_rows(multiply(g_q[0], w, None, x_dtype, **how), g.shape[0])
        del w
        if matrices:
            add_to_input(dx, u, adapters.down(x_dtype))
    if needs_w:
        # dw_NK = g_MNᵀ · x_MK
        x_km = input_columns(as_saved(x, x_scale), state_g, spec, save_x)
        dw = multiply(g_q[-1], x_km, None, spec.dw_dtype or weight.gradient_dtype(g), **how)
    return or_empty(dx, g), or_empty(dw, g), or_empty(da, g), or_empty(db, g)


def as_saved(data: Tensor | None, scale: Tensor | None) -> Quantized:
    assert data is not None and scale is not None
    return Quantized(data, scale)


def quantize_input(
    x: Tensor, state: Tensor, spec: LinearSpec, save_x: str, columns: int | None = None
) -> tuple[Quantized, Quantized]:
    """Return x as products take it, rows in FP8 or itself in the result's dtype, and as it is to be saved, or empty.

    `columns`: those of x, where it may have come from other ranks, in FP8 (`packed.py`). Nothing is saved then.
    """
    if columns is not None and is_packed(x):
        assert spec.x is not None and not save_x
        return unpack_rows(x, columns, spec.x), Quantized(*empty(x, 2))
    if spec.x is None:
        return Quantized(as_dtype(x, spec.out_dtype), x.new_empty(0)), Quantized(*empty(x, 2))
    quantized = quantize_group([x], state, spec.x, spec.record, "both" if save_x == "columns" else "rows")
    return quantized[0], quantized[-1] if save_x else Quantized(*empty(x, 2))


def quantize_gradient(
    g: Tensor, state: Tensor, spec: LinearSpec, layout: str, factor: Tensor | None = None
) -> list[Quantized]:
    """Return g in FP8, or itself in high precision; multiplied by `factor[N]`, if there is one, before rounding."""
    if spec.g is None:
        return [Quantized(g, g.new_empty(0))]
    if factor is not None:
        assert layout == "rows"
        return [quantize_folded(g, factor, state, spec.g)]
    return quantize_group([g], state, spec.g, True, layout)


def input_columns(x: Quantized, state: Tensor, spec: LinearSpec, save_x: str) -> Quantized:
    """Return the saved x as dw wants it, `[K, M]`. Rows have one scale for all, so they can be transposed."""
    if is_high_precision(x):
        assert spec.x is not None and not spec.x.delayed
        return quantize_group([padded(x.data, spec)], state, spec.x, False, "columns")[0]
    return Quantized(transpose_bytes(x.data) if save_x == "rows" else x.data, x.scale)


def _pads(device: torch.device) -> bool:
    return has_fp8_tensor_cores(device)


def _padded_rows(rows: int) -> int:
    return -(-rows // TILE) * TILE


def missing_rows(rows: int, spec: LinearSpec, device: torch.device) -> int:
    """How many rows `padded` adds."""
    return _padded_rows(rows) - rows if spec.pads and _pads(device) else 0


def padded(x: Tensor, spec: LinearSpec) -> Tensor:
    """Add rows of zeros up to whole tiles. They change no result."""
    missing = missing_rows(x.shape[0], spec, x.device)
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def first_rows(y: Tensor, rows: int) -> Tensor:
    """Drop rows of padding. Returns y itself when there are none: a view cannot be modified in place as an output."""
    return y if y.shape[0] == rows else y[:rows]


def separate_scale(q: Quantized, other: Quantized) -> Tensor:
    """Return the packed scale of q; a copy where both layouts of one tensor share it."""
    return pack_scale(q.scale.clone() if q.scale is other.scale and q is not other else q.scale)


def fake_padded(x: Tensor, spec: LinearSpec) -> Tensor:
    return x.new_empty([_padded_rows(x.shape[0]), x.shape[1]]) if spec.pads and _pads(x.device) else x


def fake_saved_input(x: Tensor, spec: LinearSpec, save_x: str) -> tuple[Tensor, Tensor]:
    if not save_x or spec.x is None:
        return x.new_empty(0), x.new_empty(0)
    return fake_quantize(fake_padded(x, spec), spec.x, transpose=save_x == "columns")


def fake_used_scale(x: Tensor, weights: list[Tensor], spec: LinearSpec) -> Tensor:
    is_used = spec.w is not None and spec.w.delayed and not Weight(weights).is_stored
    return x.new_empty(() if is_used else 0, dtype=torch.float32)


def fake_grad_weight(g: Tensor, weights: list[Tensor], spec: LinearSpec, needed: bool) -> Tensor:
    shape = [sum(w.shape[0] for w in weights), weights[0].shape[1]]
    return g.new_empty(shape, dtype=spec.dw_dtype or Weight(weights).gradient_dtype(g)) if needed else g.new_empty(0)
