"""The norm whose backward starts from what came out of it."""

import pytest
import torch
from bounds import cosine
from norm_cases import saved_of

from octavo.numerics.norm import Norm, add_rms_norm, norm_gradients, rms_norm, rms_norm_backward
from octavo.numerics.quantize import quantize


def exact(h, weight, eps):
    return weight * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward(dtype):
    h, weight = torch.randn(5, 64).to(dtype), (torch.rand(64) + 0.5).to(dtype)
    x, inverse = rms_norm(h, Norm(weight, 1e-5))
    assert x.dtype == dtype and inverse.shape == (5, 1) and inverse.dtype == torch.float32
    torch.testing.assert_close(x.float(), exact(h.float(), weight.float(), 1e-5), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("granularity", [None, "tensor", "channel", "block"])
def test_backward_against_autograd(granularity):
    torch.manual_seed(0)
    h = torch.randn(40, 384, dtype=torch.float64).requires_grad_()
    weight = torch.randn(384).exp()
    g = torch.randn(40, 384) + 0.3 * h.detach().float()  # with a part along x, which the second term takes away
    exact(h, weight.double(), 1e-6).backward(g.double())
    x, inverse = rms_norm(h.detach().float(), Norm(weight, 1e-6))
    if granularity:
        x = quantize(x, granularity=granularity).dequantize()
    actual = rms_norm_backward(g, x, Norm(weight, 1e-6), inverse)
    if granularity is None:
        torch.testing.assert_close(actual.double(), h.grad, rtol=1e-4, atol=1e-5)
    assert cosine(actual, h.grad) > 0.9999


def test_rows_of_zeros_and_weights_of_zero():
    h, weight = torch.randn(4, 32), torch.rand(32) + 0.5
    h[1] = 0
    weight[3] = 0
    norm = Norm(weight, 1e-6)
    x, inverse = rms_norm(h, norm)
    dh = rms_norm_backward(torch.randn(4, 32), x, norm, inverse)
    assert dh.isfinite().all() and not x[1].any() and not dh[:, 3].any()


def test_a_sum_is_rounded_before_its_norm():
    h, y = torch.randn(2, 5, 64).to(torch.bfloat16)
    norm = Norm(torch.rand(64).to(torch.bfloat16), 1e-6)
    total, x, inverse = add_rms_norm(h, y, norm)
    assert torch.equal(total, h + y)
    assert all(torch.equal(*pair) for pair in zip((x, inverse), rms_norm(h + y, norm), strict=True))


@pytest.mark.parametrize("how", ["h", "tensor", "channel", "block"])
@pytest.mark.parametrize("shifted", [False, True])
def test_gradients_against_autograd(shifted, how):
    """In float64: of h by both ways that it is used, and of the weight, where one of them is zero."""
    h = torch.randn(40, 384, dtype=torch.float64).requires_grad_()
    weight = (torch.randn(384) * 0.3 + (0.0 if shifted else 1.0)).double()
    weight[7] = -1.0 if shifted else 0.0
    weight.requires_grad_()
    g, residual = torch.randn(2, 40, 384)
    factor = weight + 1.0 if shifted else weight
    torch.autograd.backward([exact(h, factor, 1e-6), h * 1.0], [g.double(), residual.double()])
    norm = Norm(weight.detach().float(), 1e-6, shifted)
    x, inverse = rms_norm(h.detach().float(), norm)
    saved = saved_of(h.detach().float(), x, how)
    dh, dweight = norm_gradients(g, saved, norm, inverse, residual, needs=(True, True))
    if how == "h":
        torch.testing.assert_close(dh.double(), h.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dweight.double(), weight.grad, rtol=1e-4, atol=1e-4)
    assert cosine(dh, h.grad) > 0.9999
    known = torch.ones(384, dtype=torch.bool)
    known[7] = how == "h"  # from x alone, nothing is known of what a weight of zero has hidden
    assert cosine(dweight[known], weight.grad[known]) > 0.999 and (how == "h" or dweight[7] == 0)
