"""Activations of a gated MLP, as functions that kernels take as a constant: `numerics.activation` in Triton.

Each gives act(gate) and its derivative, in FP32, and is inlined where a kernel calls `ACTIVATION(gate)`.
"""

import triton
import triton.language as tl  # noqa: F401, the interpreter wants it in the module of every function

from octavo.kernels import tiles


@triton.jit
def silu(gate):
    sigmoid = tiles.sigmoid(gate)
    return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))


@triton.jit
def gelu_tanh(gate):
    sigmoid = tiles.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    inner = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid) * inner)


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}
