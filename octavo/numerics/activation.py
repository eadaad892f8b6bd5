"""The gated activation between two linears: h = act(gate) · up, with gate and up side by side as the GEMM writes them.

    silu        act(g) = g · σ(g)                                    Llama, Mistral, Qwen
    gelu_tanh   act(g) = g/2 · (1 + tanh(√(2/π) (g + 0.044715 g³)))  Gemma

The second equals g · σ(2√(2/π) (g + 0.044715 g³)), which loses no precision where tanh is near −1.

Computed in FP32 and rounded once to the dtype of `gate_up`, as if it were written to memory; kernels that quantise the
result directly round likewise.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.numerics.amax import block_amax
from octavo.numerics.formats import E4M3, E8M0_DTYPE
from octavo.numerics.quantize import BLOCK, Quantized, mx_scale, quantize_by

GELU_FACTOR = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def silu(gate: Tensor) -> tuple[Tensor, Tensor]:
    """act(gate) and its derivative, as all of these."""
    sigmoid = torch.sigmoid(gate)
    return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))


def gelu_tanh(gate: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(2 * GELU_FACTOR * (gate + GELU_CUBIC * gate * gate * gate))
    inner = 2 * GELU_FACTOR * (1 + 3 * GELU_CUBIC * gate * gate)
    return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid) * inner)


# The same names are in `kernels/gated/activations.py`; which of transformers' classes is which, in the decoders.
ACTIVATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Compute h, `[..., F]`, from `gate_up`, `[..., 2F]`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate)[0] * up).to(gate_up.dtype)


def gated_backward(dh: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """Compute the gradient of `gate_up`, `[..., 2F]`, from that of `h`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    value, slope = ACTIVATIONS[activation](gate)
    dh = dh.float()
    return torch.cat([dh * up * slope, dh * value], dim=-1).to(gate_up.dtype)


def save_gate_up(gate_up: Tensor) -> Quantized:
    """Quantise to E4M3 for backward; the scale of 128 features of a token is a power of two, stored as its exponent."""
    scale = mx_scale(block_amax(gate_up, (1, BLOCK)), E4M3)
    saved = quantize_by(gate_up, scale.float(), E4M3)
    return Quantized(saved.data, scale.view(torch.uint8))


def dequantize_gate_up(saved: Quantized) -> Tensor:
    """Gate and up in FP32, from what `save_gate_up` returned."""
    return Quantized(saved.data, saved.scale.view(E8M0_DTYPE).float()).dequantize(torch.float32)
