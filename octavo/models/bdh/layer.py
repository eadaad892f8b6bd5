"""One layer of BDH in FP8 as one autograd function, from x to y = z · decoder. The two norms around y stay outside.

Shapes: B batch, T positions (S: the ones attended to), D width, H heads, N neurons per head, M = B · T, K = H · N.
Every product is NT. `8` marks FP8; each line with → q8, s8, t8, z8, dt8 or ds8 is one kernel over the hidden tensors.

    forward    s_pre_MK   = x8 · encoder8                      one GEMM for all heads
               s_pre      → q8_BHTN, s8_BTHN                   relu, RoPE
               scores     = q8 · q8ᵀ → S8_BHTS                 tril(-1)
               a_BHTD     = S8 · x8                            one GEMM per sequence
               t_pre_HMN  = ln(a)8 · encoder_v8                one GEMM per head
               s_pre, t_pre → z8_MK, t8_BTHN
               y_MD       = z8 · decoder8
    backward   dz_MK      = g8 · decoder8ᵀ
               dz, s8, t8 → dt8 rows and columns, z8 columns
               ddecoder   = z8ᵀ · g8    dencoder_v = ln(a)8ᵀ · dt8    dln(a) = dt8 · encoder_v8ᵀ
               dS         = da8 · x8ᵀ → P8 = tril(dS, -1) + tril(dS, -1)ᵀ
               s8         → q8 columns
               dq_BHTN    = P8 · q8                            one product for both factors of q · qᵀ
               dq, dz, s8, t8 → ds8 rows and columns
               dencoder   = x8ᵀ · ds8   dx = ds8 · encoder8ᵀ + S8ᵀ · da8

The hidden tensors have E = M · K elements (BDH 100M at 8,192 tokens: 537M; 1.07 GB in BF16). Bytes per element, written
and read (w+r); for BF16 the least possible, with every chain of element-wise work fused:

                this file                                           BF16
    forward     s_pre 2+4, q 1+1, s 1+0, t_pre 2+2, z 1+1, t 1+0    s_pre 2+4, q 2+2, t_pre 2+2, z 2+2
                = 16                                                = 18
    backward    dz 2+4, s 0+3, t 0+2, dt 2+2, z 1+1, q 1+1,         dz 2+4, s 0+6, t 0+4, dt 2+4, z 2+2, q 2+4,
                dq 2+2, ds 2+2 = 27                                 dq 4+4, ds 2+4 = 46
    saved       s 1, t 1 = 2                                        s_pre 2, t_pre 2 = 4, and q and z unless recomputed

Saved for backward: s8 and t8, which serve as values and as masks (what relu made zero is zero in FP8 as well). q and z
are recomputed from them, so their FP8 copies in backward come from values that were rounded once before; those of
forward do not. Also saved, and small: the transpose of S8, x8, ln(a)8, and a itself for its norm, 0.26 bytes per
element at T = 2048. The weights are the same in every layer, so they are quantised once for all layers and saved in
both layouts.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import ops
from octavo.models.bdh import ops as bdh_ops
from octavo.numerics import OperandRecipe, Recipe
from octavo.numerics.quantize import Quantized

# The tensors of a layer that have a scale: operands of its products, tensors saved for backward (the names are those of
# checkpoints), and gradients.
OPERANDS = (
    "encoder.x",
    "scores.q",
    "attention.s",
    "encoder_v.x",
    "decoder.x",
    "kept.s",
    "kept.t",
    "encoder.g",
    "scores.g",
    "attention.g",
    "encoder_v.g",
    "decoder.g",
)
WEIGHTS = ("encoder.w", "encoder_v.w", "decoder.w")


class Weights(NamedTuple):
    """The weights in FP8, in the layouts that forward and backward multiply."""

    encoder_KD: Quantized
    encoder_DK: Quantized
    encoder_v_HND: Quantized
    encoder_v_HDN: Quantized
    decoder_DK: Quantized
    decoder_KD: Quantized


@dataclass(frozen=True)
class Layer:
    """Settings of a layer's computation: everything but its tensors."""

    recipe: Recipe
    out_dtype: torch.dtype
    emulate: bool = False

    def multiply(self, a: Quantized, b: Quantized, dtype: torch.dtype, batch: tuple[int, ...], fast: bool) -> Tensor:
        """Return a · bᵀ. `fast` allows tensor cores their fast accumulation."""
        return ops.gemm_nt(*a, *b, None, dtype, list(batch), fast, self.emulate)


def quantize_weights(
    encoder: Tensor, encoder_v: Tensor, decoder: Tensor, recipe: OperandRecipe, state: dict[str, Tensor]
) -> Weights:
    """Quantise the three weights, each in both layouts. `state`: scaling state by name."""

    def both(name: str, w: Tensor) -> list[Quantized]:
        return ops.quantize(w, state[name], recipe, record=True, layout="both")

    with torch.no_grad():
        (e_HDN, e_HND), (v_HDN, v_HND), (d_KD, d_DK) = map(both, WEIGHTS, (encoder, encoder_v, decoder))
        e_DK = _view_bytes(e_HDN, lambda e: e.transpose(0, 1).contiguous().flatten(1))
        e_KD = Quantized(e_HND.data.flatten(0, 1), e_HND.scale)
    return Weights(e_KD, e_DK, v_HND, v_HDN, d_DK, d_KD)


def fp8_bdh_layer(
    x_BTD: Tensor,
    encoder: Tensor,
    encoder_v: Tensor,
    decoder: Tensor,
    weights: Weights,
    angles: tuple[Tensor, Tensor],
    layer: Layer,
    state: dict[str, Tensor],
) -> Tensor:
    """Return y `[B, T, D]`, computed with `weights`; the gradients are those of the three Parameters.

    `state`: scaling state by the names in `OPERANDS`.
    """
    flat = [tensor for q in weights for tensor in q]
    return _FP8BDHLayer.apply(
        x_BTD, encoder, encoder_v, decoder, layer, *angles, *flat, *(state[name] for name in OPERANDS)
    )


class _FP8BDHLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        encoder: Tensor,
        encoder_v: Tensor,
        decoder: Tensor,
        layer: Layer,
        cos: Tensor,
        sin: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        w, state = _weights(tensors), dict(zip(OPERANDS, tensors[2 * len(Weights._fields) :], strict=True))
        recipe, dtype = layer.recipe.x, layer.out_dtype
        (B, T, D), (H, _, N) = x.shape, encoder.shape

        x_BTD, x_BDT = ops.quantize(x, state["encoder.x"], recipe, record=True, layout="both")
        # s_pre = x · encoder
        s_pre = layer.multiply(_reshape(x_BTD, B * T, D), w.encoder_KD, dtype, (), True).view(B, T, H, N)
        q, s = _pairs(bdh_ops.bdh_relu_rope(s_pre, cos, sin, state["scores.q"], state["kept.s"], recipe.encode()))
        # scores = q · qᵀ
        scores = layer.multiply(q, q, dtype, (B, H), True)
        q_scale = q.scale
        del q
        S, S_scale, S_t = bdh_ops.bdh_mask(scores, state["attention.s"], recipe.encode(), False)
        S_BHTS, S_BSHT = Quantized(S, S_scale), Quantized(S_t, S_scale)
        del scores
        # a = S · x
        x_B1DT = _reshape(x_BDT, B, 1, D, T)
        a = layer.multiply(S_BHTS, x_B1DT, dtype, (B, H), True)
        del S, S_BHTS
        with torch.autocast(x.device.type, enabled=False):
            # A literal: with `dynamic=True`, Dynamo fails on a global float in an autograd function (torch 2.13).
            normed, mean, rstd = torch.native_layer_norm(a, [D], None, None, 1e-5)
        normed = normed.transpose(0, 1).reshape(H, B * T, D)
        n_HMD, n_HDM = ops.quantize(normed, state["encoder_v.x"], recipe, record=True, layout="both")
        # t_pre = ln(a) · encoder_v
        t_pre = layer.multiply(n_HMD, w.encoder_v_HND, dtype, (H,), True).view(H, B, T, N)
        z, t = _pairs(bdh_ops.bdh_gate(s_pre, t_pre, state["decoder.x"], state["kept.t"], recipe.encode()))
        del s_pre, t_pre
        # y = z · decoder
        y = layer.multiply(_reshape(z, B * T, H * N), w.decoder_DK, dtype, (), True)

        saved = (x_BTD, x_BDT, S_BSHT, n_HDM, s, t, w.encoder_DK, w.encoder_v_HDN, w.decoder_KD)
        ctx.save_for_backward(cos, sin, a, mean, rstd, q_scale, z.scale, *(tensor for q in saved for tensor in q))
        # Not saved as tensors: every use changes the scaling state, which autograd's version check would report as an
        # error.
        ctx.state = state
        ctx.layer = layer
        ctx.like = (x.dtype, encoder.dtype, encoder_v.dtype, decoder.dtype)
        return y.view(B, T, D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BTD: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, a, mean, rstd, q_scale, z_scale, *tensors = ctx.saved_tensors
        x_BTD, x_BDT, S_BSHT, n_HDM, s, t, encoder_DK, encoder_v_HDN, decoder_KD = _pairs(tensors)
        layer, state = ctx.layer, ctx.state
        recipe, dtype = layer.recipe, layer.out_dtype
        x_recipe, g_recipe = recipe.x.encode(), recipe.g.encode()
        x_dtype, *weight_dtypes = ctx.like
        needs_encoder, needs_encoder_v, needs_decoder = ctx.needs_input_grad[1:4]
        B, T, H, N = s.data.shape
        D, M = g_BTD.shape[-1], B * T
        dencoder = dencoder_v = ddecoder = None

        def quantize(g: Tensor, name: str) -> list[Quantized]:
            return ops.quantize(g, state[name], recipe.g, record=True, layout="both")

        g_MD, g_DM = quantize(g_BTD.reshape(M, D), "decoder.g")
        # dz = g · decoderᵀ
        dz = layer.multiply(g_MD, decoder_KD, dtype, (), False).view(B, T, H, N)
        dt_HMN, dt_scale, dt_HNM, z_HNM = bdh_ops.bdh_gate_backward(
            dz, [*s, *t], z_scale, state["encoder_v.g"], g_recipe, x_recipe
        )
        if needs_decoder:
            # ddecoder = zᵀ · g
            ddecoder = layer.multiply(Quantized(z_HNM.view(H * N, M), z_scale), g_DM, weight_dtypes[2], (), False)
        del z_HNM
        if needs_encoder_v:
            # dencoder_v = ln(a)ᵀ · dt
            dencoder_v = layer.multiply(n_HDM, Quantized(dt_HNM, dt_scale), weight_dtypes[1], (H,), False)
        del dt_HNM
        # dln(a) = dt · encoder_vᵀ
        dn_HMD = layer.multiply(Quantized(dt_HMN, dt_scale), encoder_v_HDN, dtype, (H,), False)
        del dt_HMN
        dn = dn_HMD.view(H, B, T, D).transpose(0, 1).contiguous()
        da = torch.ops.aten.native_layer_norm_backward(dn, a, [D], mean, rstd, None, None, [True, False, False])[0]
        da_BMD, da_BDM = quantize(da.view(B, H * T, D), "attention.g")
        # dS = da · xᵀ
        dS = layer.multiply(da_BMD, x_BTD, dtype, (B,), False).view(B, H, T, T)
        P = Quantized(*bdh_ops.bdh_mask(dS, state["scores.g"], g_recipe, True)[:2])
        del dS
        # dx = Sᵀ · da, summed over the heads
        dx = layer.multiply(_reshape(S_BSHT, B, T, H * T), da_BDM, torch.float32, (B,), False)
        q_BHNT = Quantized(bdh_ops.bdh_rope_columns(*s, cos, sin, q_scale, x_recipe, dtype), q_scale)
        # dq = (tril(dS) + tril(dS)ᵀ) · q
        dq = layer.multiply(P, q_BHNT, dtype, (B, H), False)
        del q_BHNT, P
        ds, ds_scale, ds_HNM = bdh_ops.bdh_relu_rope_backward(dq, dz, [*s, *t], cos, sin, state["encoder.g"], g_recipe)
        del dq, dz
        if needs_encoder:
            # dencoder = xᵀ · ds
            x_1DM = _view_bytes(x_BDT, lambda x: x.transpose(0, 1).reshape(1, D, M))
            dencoder = layer.multiply(x_1DM, Quantized(ds_HNM, ds_scale), weight_dtypes[0], (H,), False)
        # dx += ds · encoderᵀ
        ds_MK = Quantized(ds.view(M, H * N), ds_scale)
        dx = dx.add_(layer.multiply(ds_MK, encoder_DK, torch.float32, (), False).view(B, T, D))
        return dx.to(x_dtype), dencoder, dencoder_v, ddecoder, *[None] * (len(ctx.needs_input_grad) - 4)


def _weights(tensors: tuple[Tensor, ...]) -> Weights:
    return Weights(*_pairs(tensors[: 2 * len(Weights._fields)]))


def _pairs(tensors: "tuple[Tensor, ...] | list[Tensor]") -> list[Quantized]:
    return [Quantized(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def _reshape(q: Quantized, *shape: int) -> Quantized:
    return Quantized(q.data.view(shape), q.scale)


def _view_bytes(q: Quantized, change: Any) -> Quantized:
    """Rearrange the data as bytes, because not every device copies float8."""
    return Quantized(change(q.data.view(torch.uint8)).view(q.data.dtype), q.scale)
