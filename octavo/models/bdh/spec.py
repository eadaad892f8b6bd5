"""The element-wise work between the products of a BDH layer, forward and backward, in plain PyTorch.

    s = relu(s_pre)    q = rope(s)    t = relu(t_pre)    z = s · t          (see model.py)

    dt_pre = dz · s · [t > 0]
    ds_pre = (ropeᵀ(dq) + dz · t) · [s > 0]

Computed in FP32 (FP64 stays FP64) and rounded once to the dtype of the input, as if it had gone through memory; a
kernel that also quantises rounds the same way. Backward reads s and t as forward saved them: in FP8, times their
scales.

The causal mask of the scores `[.., T, T]` belongs here as well: `causal` keeps the part strictly below the diagonal,
`symmetric` adds the transpose of that. With S = tril(q · qᵀ, -1) and D its gradient, both factors of the
product are q, so dq = tril(D, -1) · q + tril(D, -1)ᵀ · q = symmetric(D) · q: one product, not two.

Legend: B batch, T positions, H heads, N neurons per head. cos, sin: [T, N/2].
"""

import torch
from torch import Tensor


def relu(x: Tensor) -> Tensor:
    """Replace values that are not positive, −0 included, by zero. NaN stays."""
    return torch.where(x <= 0, 0.0, x)


def relu_rope(s_pre_BTHN: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return q = rope(relu(s_pre)), in the layout of `s_pre`."""
    return _rotate(_to_hp(relu(s_pre_BTHN)), cos, sin).to(s_pre_BTHN.dtype)


def relu_rope_backward(
    dq_BTHN: Tensor, dz_BTHN: Tensor, s_BTHN: Tensor, t_BTHN: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return the gradient of `s_pre`: the sum of those through the scores and through the gate."""
    ds = _rotate(_to_hp(dq_BTHN), cos, -sin) + _to_hp(dz_BTHN) * _to_hp(t_BTHN)
    return torch.where(s_BTHN > 0, ds, 0.0).to(dz_BTHN.dtype)


def gate(s_pre: Tensor, t_pre: Tensor) -> Tensor:
    """Return z = relu(s_pre) · relu(t_pre)."""
    return (_to_hp(relu(s_pre)) * _to_hp(relu(t_pre))).to(s_pre.dtype)


def gate_backward(dz: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return the gradient of `t_pre`. `relu_rope_backward` adds that of `s_pre` to the one through the scores."""
    return torch.where(t > 0, _to_hp(dz) * _to_hp(s), 0.0).to(dz.dtype)


def causal(scores: Tensor) -> Tensor:
    """Return the part of the scores strictly below the diagonal."""
    return scores.tril(-1)


def symmetric(scores: Tensor) -> Tensor:
    """Return the part strictly below the diagonal plus its transpose."""
    lower = scores.tril(-1)
    return lower + lower.mT  # exact: in each element one of the two is zero


def _rotate(x_BTHN: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    even, odd = x_BTHN[..., 0::2], x_BTHN[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _to_hp(x: Tensor) -> Tensor:
    """Convert to FP32; FP64, which tests use, stays."""
    return x if x.dtype == torch.float64 else x.float()
