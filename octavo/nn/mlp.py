"""The gated MLP of a decoder in FP8: y = (act(x · w_gateᵀ) · (x · w_upᵀ)) · w_downᵀ, as one autograd function.

Shapes: M tokens, K width, F hidden.

    forward    xq_MK → gu_M2F = xq · [w_gate; w_up]ᵀ → hq_MF (activation and quantising: one kernel) → y = hq · w_downᵀ
    backward   gq_MK → dh_MF = gq · w_down
               one kernel: dgu_M2F in both layouts, and h again, transposed
               dw_down = gqT · hqTᵀ     dx = dguq · [w_gate; w_up]     dw_gate_up = dguqT · xqTᵀ
    kept       xqT_KM in FP8 and gu_M2F, in FP8 if asked for; h is computed again on the way back, where gate and up are
               read anyway
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.nn.linears import how_to_keep
from octavo.nn.norm import back_through, normed, parts_of
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized
from octavo.ops import Product
from octavo.ops import linear as ops_linear

Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class MLP:
    """How the MLP is computed: everything about it but its tensors."""

    product: Product
    activation: str
    in_fp8: bool = False  # keep gate and up so


def fp8_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    mlp: MLP,
    rows_gate_up: Rows,
    rows_down: Rows,
    *,
    norm: Norm | None = None,
    given: Sequence[Tensor] = (),
) -> Tensor:
    """`x[..., K]` through the MLP. `rows_…`: scaling state of input, weight and gradient of each product.

    `norm`, and `given` for gate, up and down: as in `linears.py`.
    """
    keep = how_to_keep(x, (gate, up), norm)
    y = _FP8MLP.apply(
        x.reshape(-1, x.shape[-1]), gate, up, down, *parts_of(norm), mlp, keep, *rows_gate_up,
        *rows_down, *given,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], y.shape[-1])


class _FP8MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        norm_weight: Tensor | None,
        norm_eps: float | None,
        mlp: MLP,
        keep: str,
        *rows: Tensor,
    ) -> Tensor:
        rows, given = rows[:6], rows[6:]
        row_x, row_gate_up, _, row_h, row_down, _ = rows
        gate, up, down = given or (gate, up, down)
        used = (row_x, row_gate_up, row_h, row_down)
        x, inverse = normed(x, norm_weight, norm_eps)
        y, kept, gate_up, h_scale, w_scales = ops_linear.mlp(
            x, (gate, up, down), used, mlp.product, mlp.activation, keep=keep, in_fp8=mlp.in_fp8
        )
        ctx.save_for_backward(*kept, *gate_up, h_scale, *w_scales, gate, up, down, inverse, norm_weight)
        ctx.keep, ctx.eps = keep, norm_eps
        ctx.rows = rows
        ctx.mlp = mlp
        ctx.x_dtype = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, gate_up, gate_up_scale, h_scale, *w_scales, gate, up, down, inverse, norm_weight = (
            ctx.saved_tensors
        )
        _, row_gate_up, row_dgate_up, _, row_down, row_g = ctx.rows
        row_gate_up, row_down = (
            scale if scale.numel() else row for scale, row in zip(w_scales, (row_gate_up, row_down), strict=True)
        )
        needs_x, needs_gate, needs_up, needs_down, needs_norm = ctx.needs_input_grad[:5]
        x = Quantized(x_data, x_scale)
        dx, dgate_up, ddown = ops_linear.mlp_backward(
            g,
            x,
            Quantized(gate_up, gate_up_scale),
            h_scale,
            (gate, up, down),
            (row_g, row_down, row_dgate_up, row_gate_up),
            ctx.mlp.product,
            ctx.mlp.activation,
            x_is_rows=ctx.keep == "rows",
            needs=(needs_x or needs_norm, needs_gate or needs_up, needs_down),
            dtype=ctx.x_dtype,
        )
        dh, dnorm = back_through(dx, x, norm_weight, ctx.eps, inverse, needs=(needs_x, needs_norm))
        dgate = dup = None
        if needs_gate or needs_up:
            dgate, dup = dgate_up.split([gate.shape[0], up.shape[0]])
        gradients = (dh, dgate, dup, ddown, dnorm)
        found = [d if needed else None for d, needed in zip(gradients, ctx.needs_input_grad[:5], strict=True)]
        return *found, *[None] * (len(ctx.needs_input_grad) - 5)
