"""The element-wise work of a BDH layer, there and back: what its fused kernels compute between the products.

    s = relu(s_pre)    q = rope(s)    t = relu(t_pre)    z = s · t          (see models/bdh.py)

    dt_pre = dz · s · [t > 0]
    ds_pre = (ropeᵀ(dq) + dz · t) · [s > 0]

Computed in FP32 (FP64 stays FP64) and rounded once to the dtype of the input, as if it had gone through memory; a
kernel that quantises on the way does the same. Backward reads s and t as forward kept them: in FP8, times their scales.

Also the causal mask of the scores, which come as squares of positions: `causal` keeps what lies strictly below the
diagonal; `symmetric` adds the transpose of that. With S = tril(q · qᵀ, -1) and D its gradient, both factors of the
product are q, so dq = tril(D, -1) · q + tril(D, -1)ᵀ · q = symmetric(D) · q: one product, not two.

Legend: B batch, T positions, H heads, N neurons per head. cos, sin: [T, N/2].
"""

import torch
from torch import Tensor


def relu(x: Tensor) -> Tensor:
    """Zero for what is not positive, −0 included; NaN stays."""
    return torch.where(x <= 0, 0.0, x)


def relu_rope(s_pre_BTHN: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q, in the layout of `s_pre`."""
    return _turn(_wide(relu(s_pre_BTHN)), cos, sin).to(s_pre_BTHN.dtype)


def relu_rope_backward(
    dq_BTHN: Tensor, dz_BTHN: Tensor, s_BTHN: Tensor, t_BTHN: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """The gradient of `s_pre`: through the scores and through the gate."""
    ds = _turn(_wide(dq_BTHN), cos, -sin) + _wide(dz_BTHN) * _wide(t_BTHN)
    return torch.where(s_BTHN > 0, ds, 0.0).to(dz_BTHN.dtype)


def gate(s_pre: Tensor, t_pre: Tensor) -> Tensor:
    """z."""
    return (_wide(relu(s_pre)) * _wide(relu(t_pre))).to(s_pre.dtype)


def gate_backward(dz: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """The gradient of `t_pre`; that of `s_pre` waits for the one through the scores."""
    return torch.where(t > 0, _wide(dz) * _wide(s), 0.0).to(dz.dtype)


def causal(scores: Tensor) -> Tensor:
    return scores.tril(-1)


def symmetric(scores: Tensor) -> Tensor:
    lower = scores.tril(-1)
    return lower + lower.mT  # one of the two is zero


def _turn(x_BTHN: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    even, odd = x_BTHN[..., 0::2], x_BTHN[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
