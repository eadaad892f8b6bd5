"""q, k and v out of their product, with the norms of heads and the rotation by position, and the way back.

A GPU runs the kernel, any other device the specification.
"""

from collections.abc import Sequence

from torch import Tensor

from octavo.numerics import rotary as spec
from octavo.numerics.norm import Norm
from octavo.numerics.rotary import Heads, Norms
from octavo.ops.register import operator, or_empty
from octavo.support import has_fp8_tensor_cores


def _norms(weights: Sequence[Tensor], eps: float, shifted: bool) -> Norms | None:
    return (Norm(weights[0], eps, shifted), Norm(weights[1], eps, shifted)) if weights else None


def _rotary_fake(qkv: Tensor, heads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    q, kv, width = heads
    tokens = qkv.shape[0]
    return (
        qkv.new_empty([tokens, q, width]),
        qkv.new_empty([tokens, kv, width]),
        qkv.new_empty([tokens, kv, width]),
    )


@operator(fake=_rotary_fake)
def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, weights: list[Tensor], heads: list[int], eps: float, shifted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, `[T, heads, D]`; see `numerics.rotary.rotary`. `weights`: of the norms of q and k, if there are any.

    `heads`: how many of q, how many of k and v each, and their width.
    """
    split, norms = Heads(*heads), _norms(weights, eps, shifted)
    if has_fp8_tensor_cores(qkv.device):
        from octavo.kernels import rotary as kernels  # brings Triton

        if kernels.can_rotate(qkv, cos, sin, split, norms):
            return kernels.rotary(qkv, cos, sin, split, norms)
    return spec.rotary(qkv, cos, sin, split, norms)


def _rotary_backward_fake(
    dq: Tensor, weights: list[Tensor], heads: list[int], needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dqkv = dq.new_empty([dq.shape[0], Heads(*heads).features])
    dq_weight, dk_weight = (w.new_empty(w.shape if n else 0) for w, n in zip(weights or [dq, dq], needs, strict=True))
    return dqkv, dq_weight, dk_weight


@operator(fake=_rotary_backward_fake)
def rotary_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    weights: list[Tensor],
    heads: list[int],
    eps: float,
    shifted: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dqkv `[T, (H + 2·G)·D]`, and the gradients of `weights`; empty where not needed, as without norms."""
    split, norms, wanted = Heads(*heads), _norms(weights, eps, shifted), (needs[0], needs[1])
    found = None
    if has_fp8_tensor_cores(dq.device):
        from octavo.kernels import rotary as kernels

        like = dq.new_empty([1, split.features]) if qkv is None else qkv
        if kernels.can_rotate(like, cos, sin, split, norms):
            found = kernels.rotary_backward(dq, dk, dv, qkv, cos, sin, split, norms, needs=wanted)
    if found is None:
        found = spec.rotary_backward(dq, dk, dv, qkv, cos, sin, split, norms, needs=wanted)
    dqkv, dq_weight, dk_weight = found
    return dqkv, or_empty(dq_weight, dq), or_empty(dk_weight, dq)
