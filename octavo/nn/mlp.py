"""The gated MLP of a decoder in FP8: y = (act(x · w_gateᵀ) · (x · w_upᵀ)) · w_downᵀ, as one autograd function.

Shapes: M tokens, K width, F hidden.

    forward    xq_MK → gu_M2F = xq · [w_gate; w_up]ᵀ → hq_MF (activation and quantising: one kernel) → y = hq · w_downᵀ
    backward   gq_MK → dh_MF = gq · w_down
               one kernel: dgu_M2F in both layouts, and h again, transposed
               dw_down = gqT · hqTᵀ     dx = dguq · [w_gate; w_up]     dw_gate_up = dguqT · xqTᵀ
    kept       xqT_KM in FP8 and gu_M2F; h is computed again on the way back, where gate and up are read anyway
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import ops
from octavo.nn.product import Product
from octavo.numerics.quantize import Quantized

Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class MLP:
    """How the MLP is computed: everything about it but its tensors."""

    product: Product
    activation: str


def fp8_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, mlp: MLP, rows_gate_up: Rows, rows_down: Rows) -> Tensor:
    """`x[..., K]` through the MLP. `rows_…`: scaling state of input, weight and gradient of each product."""
    y = _FP8MLP.apply(x.reshape(-1, x.shape[-1]), gate, up, down, mlp, *rows_gate_up, *rows_down)
    return y.reshape(*x.shape[:-1], y.shape[-1])


class _FP8MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, mlp: MLP, *rows: Tensor) -> Tensor:
        product = mlp.product
        row_x, row_gate_up, _, row_h, row_down, _ = rows
        keep_x = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        x_q = ops.quantize(x, row_x, product.a, record=product.record, layout="both" if keep_x else "rows")
        how: dict[str, Any] = {
            "record": product.record,
            "out_dtype": product.out_dtype,
            "fast": product.fast_forward,
            "emulate": product.emulate,
        }
        # gu = x · [w_gate; w_up]ᵀ
        gate_up = ops.weight_gemm(x_q[0], (gate, up), row_gate_up, product.b, **how)
        h_q = ops.gated_quantize(gate_up, row_h, product.a, mlp.activation, record=product.record)
        # y = h · w_downᵀ
        y = ops.weight_gemm(h_q, (down,), row_down, product.b, **how)
        h_scale = h_q.scale if product.a.granularity == "tensor" else None
        ctx.save_for_backward(*(x_q[1] if keep_x else (None, None)), gate_up, h_scale, gate, up, down)
        ctx.rows = rows
        ctx.mlp = mlp
        ctx.x_dtype = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, gate_up, h_scale, gate, up, down = ctx.saved_tensors
        product, (_, row_gate_up, row_dgate_up, row_h, row_down, row_g) = ctx.mlp.product, ctx.rows
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        dx = dgate = dup = ddown = None
        how: dict[str, Any] = {"fast": product.fast_backward, "emulate": product.emulate}
        g_q = ops.quantize(g, row_g, product.g, record=True, layout="both" if needs_down else "rows")
        # dh = g · w_down
        dh = ops.weight_gemm(g_q[0], (down,), row_down, product.b, transpose=True, out_dtype=gate_up.dtype, **how)
        scale = row_h[:0] if h_scale is None else h_scale
        d_q, d_columns, h_columns = ops.gated_quantize_backward(
            dh, gate_up, scale, row_dgate_up, product.g, product.a, ctx.mlp.activation
        )
        if needs_down:
            # dw_down = gᵀ · h
            ddown = ops.gemm_nt(g_q[-1], h_columns, out_dtype=down.dtype, batch=(), **how)
        if needs_x:
            # dx = dgu · [w_gate; w_up]
            dx = ops.weight_gemm(d_q, (gate, up), row_gate_up, product.b, transpose=True, out_dtype=ctx.x_dtype, **how)
        if needs_gate or needs_up:
            # dw_gate_up = dguᵀ · x
            x_columns = Quantized(x_data, x_scale)
            dw = ops.gemm_nt(d_columns, x_columns, out_dtype=gate.dtype, batch=(), **how)
            dgate, dup = dw.split([gate.shape[0], up.shape[0]])
        return dx, dgate if needs_gate else None, dup if needs_up else None, ddown, *[None] * 7
