"""The kernels of q, k and v in Triton's interpreter: without norms the bits of the specification, forward and back."""

import pytest
import torch
from norm_cases import HEADS, angles, new_norm, share_different

from octavo.kernels import rotary as kernels
from octavo.numerics import rotary as spec
from octavo.numerics.rotary import Heads

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOKENS = [(1, 1), (35, 35), (66, 33)]  # and rows of cos and sin: of all, or of one of two sequences


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("tokens, rows", TOKENS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype, heads, tokens, rows):
    torch.manual_seed(0)
    qkv, (cos, sin) = torch.randn(tokens, heads.features).to(dtype), angles(rows, heads.width, dtype)
    actual = kernels.rotary(qkv, cos, sin, heads)
    for mine, expected in zip(actual, spec.rotary(qkv, cos, sin, heads), strict=True):
        assert mine.is_contiguous() and torch.equal(mine, expected)
    gradients = [torch.randn_like(x) for x in actual]
    dqkv, *weights = kernels.rotary_backward(*gradients, None, cos, sin, heads)
    assert weights == [None, None]
    assert torch.equal(dqkv, spec.rotary_backward(*gradients, None, cos, sin, heads)[0])


@pytest.mark.parametrize("turn", [lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: x[..., ::2]])
def test_gradients_with_other_strides(turn):
    """Attention returns gradients as it likes: of [H, T, D], or parts of something else."""
    heads = Heads(4, 2, 32)
    cos, sin = angles(20, 32, torch.bfloat16)
    gradients = [turn(torch.randn(20, count, 64).to(torch.bfloat16))[..., :32] for count in (4, 2, 2)]
    dqkv = kernels.rotary_backward(*gradients, None, cos, sin, heads)[0]
    assert torch.equal(dqkv, spec.rotary_backward(*gradients, None, cos, sin, heads)[0])


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("needs", [(True, True), (False, False), (False, True)])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_norms(heads, shifted, needs):
    torch.manual_seed(0)
    dtype = torch.bfloat16
    norms = tuple(new_norm(heads.width, dtype, shifted=shifted) for _ in range(2))
    qkv, (cos, sin) = torch.randn(150, heads.features).to(dtype), angles(75, heads.width, dtype)
    actual = kernels.rotary(qkv, cos, sin, heads, norms)
    for mine, expected in zip(actual, spec.rotary(qkv, cos, sin, heads, norms), strict=True):
        assert share_different(mine, expected) <= 0.001
        torch.testing.assert_close(mine, expected, rtol=0.01, atol=0.02)
    gradients = [torch.randn_like(x) for x in actual]
    dqkv, *weights = kernels.rotary_backward(*gradients, qkv, cos, sin, heads, norms, needs=needs)
    expected, *expected_weights = spec.rotary_backward(*gradients, qkv, cos, sin, heads, norms, needs=needs)
    assert share_different(dqkv, expected) <= 0.002
    torch.testing.assert_close(dqkv, expected, rtol=0.01, atol=1e-3)
    for mine, wanted, needed in zip(weights, expected_weights, needs, strict=True):
        assert (mine is not None) == needed
        if needed:
            torch.testing.assert_close(mine, wanted, rtol=0.01, atol=1e-3)


def test_what_is_not_finite_stays_in_its_head():
    heads = Heads(2, 1, 16)
    qkv, (cos, sin) = torch.zeros(3, heads.features, dtype=torch.bfloat16), angles(3, 16, torch.bfloat16)
    qkv[1, 18] = float("nan")  # the second head of q
    for norms in (None, tuple(new_norm(16, torch.bfloat16, shifted=False) for _ in range(2))):
        q, k, v = kernels.rotary(qkv, cos, sin, heads, norms)
        assert q[1, 1].isnan().any() and not q[1, 0].any() and not q[0].any() and not k.any() and not v.any()


def test_what_has_no_kernel():
    heads = Heads(2, 1, 16)
    qkv, (cos, sin) = torch.zeros(3, heads.features), angles(3, 16, torch.float32)
    assert kernels.can_rotate(qkv, cos, sin, heads, None)
    assert not kernels.can_rotate(qkv, cos.bfloat16(), sin.bfloat16(), heads, None)
    assert not kernels.can_rotate(qkv.t().contiguous().t(), cos, sin, heads, None)
    assert not kernels.can_rotate(qkv, cos, sin, heads._replace(width=15), None)
    one, other = new_norm(16, torch.float32, shifted=False), new_norm(16, torch.float32, shifted=False)
    assert kernels.can_rotate(qkv, cos, sin, heads, (one, other))
    assert not kernels.can_rotate(qkv, cos, sin, heads, (one, other._replace(eps=1.0)))
