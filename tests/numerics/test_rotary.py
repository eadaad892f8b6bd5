"""q, k and v with their rotation and norms: against float64 and autograd, and rounded as torch rounds step by step."""

import pytest
import torch
from norm_cases import HEADS, angles, new_norm

from octavo.numerics.norm import Norm, rms_norm
from octavo.numerics.rotary import Heads, rotary, rotary_backward


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def step_by_step(qkv, cos, sin, heads, norms=None, exact_norm=None):
    """As models do it: a step at a time, with autograd."""
    q, k, v = qkv.split([heads.q * heads.width, heads.kv * heads.width, heads.kv * heads.width], dim=-1)
    q, k, v = (x.view(len(qkv), -1, heads.width) for x in (q, k, v))
    if norms is not None:
        q, k = exact_norm(q, norms[0]), exact_norm(k, norms[1])
    repeats = len(qkv) // len(cos)
    cos, sin = cos.repeat(repeats, 1)[:, None], sin.repeat(repeats, 1)[:, None]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v


@pytest.mark.parametrize("rows", [12, 6, 1])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_bits_are_those_of_single_steps(heads, rows):
    qkv = torch.randn(12, heads.features).to(torch.bfloat16).requires_grad_()
    cos, sin = angles(rows, heads.width, torch.bfloat16)
    expected = step_by_step(qkv, cos, sin, heads)
    actual = rotary(qkv.detach(), cos, sin, heads)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in (*actual, qkv)}) == 4
    gradients = [torch.randn_like(x) for x in actual]
    torch.autograd.backward(expected, gradients)
    assert torch.equal(rotary_backward(*gradients, None, cos, sin, heads)[0], qkv.grad)


@pytest.mark.parametrize("shifted", [False, True])
def test_norms_against_autograd(shifted):
    heads, double = Heads(3, 2, 16), torch.float64
    norms = tuple(new_norm(16, torch.float32, shifted=shifted) for _ in range(2))
    weights = [norm.weight.double().requires_grad_() for norm in norms]
    qkv = torch.randn(10, heads.features)
    exact_qkv = qkv.double().requires_grad_()
    cos, sin = angles(5, 16, torch.float32)

    def exact_norm(x, norm):
        factor = norm.weight + 1.0 if shifted else norm.weight
        return factor * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)

    exact_norms = [Norm(weight, norm.eps, shifted) for weight, norm in zip(weights, norms, strict=True)]
    expected = step_by_step(exact_qkv, cos.double(), sin.double(), heads, exact_norms, exact_norm)
    actual = rotary(qkv, cos, sin, heads, norms)
    for mine, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-5)
    gradients = [torch.randn_like(x) for x in actual]
    torch.autograd.backward(expected, [g.to(double) for g in gradients])
    dqkv, *dweights = rotary_backward(*gradients, qkv, cos, sin, heads, norms)
    torch.testing.assert_close(dqkv.double(), exact_qkv.grad, rtol=1e-4, atol=1e-5)
    for mine, weight in zip(dweights, weights, strict=True):
        torch.testing.assert_close(mine.double(), weight.grad, rtol=1e-4, atol=1e-5)
    assert rotary_backward(*gradients, qkv, cos, sin, heads, norms, needs=(False, True))[1] is None


def test_norms_of_heads_are_rounded_as_norms_are():
    heads, norms = Heads(2, 1, 16), tuple(new_norm(16, torch.bfloat16, shifted=False) for _ in range(2))
    qkv, (cos, sin) = torch.randn(9, heads.features).to(torch.bfloat16), angles(9, 16, torch.bfloat16)
    expected = step_by_step(qkv, cos, sin, heads, norms, lambda x, norm: rms_norm(x, norm)[0])
    assert all(torch.equal(*pair) for pair in zip(rotary(qkv, cos, sin, heads, norms), expected, strict=True))
