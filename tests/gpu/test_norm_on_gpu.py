"""RMS norm and the rotation of q and k on the GPU against the specification; launched twice, by both ways there are.

Sums have another order on a GPU than in torch: 1 / rms differs in its last bits, and by it single elements, by one
step. All that is computed from the same 1 / rms has the same bits.
"""

import pytest
import torch
from norm_cases import HEADS, SHAPES, angles, new_norm, saved_of, share_different

from octavo.nn.norm import rms_norm
from octavo.nn.rotary import rotary
from octavo.numerics import norm as norm_spec
from octavo.numerics import rotary as rotary_spec
from octavo.numerics.rotary import Heads

if torch.cuda.is_available():
    from octavo.kernels import norm as norm_kernel
    from octavo.kernels import rotary as rotary_kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LARGE = [(8192, 4096), (4000, 5120), (300, 14336)]
OF_AN_8B = Heads(32, 8, 128)


def by_inverse(h, norm, inverse):
    """x, as specified, from a given 1 / rms."""
    if norm.shifted:
        return (h.float() * inverse * norm.factor()).to(h.dtype)
    return norm.weight * (h.float() * inverse).to(h.dtype)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_forward(dtype, shape, shifted):
    norm = new_norm(shape[1], dtype, shifted=shifted, device="cuda")
    for _ in range(2):
        h, y = torch.randn(2, *shape, device="cuda").to(dtype)
        x, inverse = norm_kernel.rms_norm(h, norm)
        torch.testing.assert_close(inverse, norm_spec.rms_norm(h, norm)[1], rtol=1e-6, atol=0)
        assert torch.equal(x, by_inverse(h, norm, inverse))
        total, x, inverse = norm_kernel.add_rms_norm(h, y, norm)
        assert torch.equal(total, h + y) and torch.equal(x, by_inverse(h + y, norm, inverse))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("how", ["h", "tensor", "channel", "block"])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
def test_gradients(shape, how, adds, needs):
    norm = new_norm(shape[1], BF16, shifted=False, device="cuda")
    norm.weight[3] = 0.0
    for _ in range(2):
        h, g, residual = torch.randn(3, *shape, device="cuda").to(BF16)
        x, inverse = norm_spec.rms_norm(h, norm)
        given = g, saved_of(h, x, how), norm, inverse, residual if adds else None
        dh, dweight = norm_kernel.norm_gradients(*given, needs=needs)
        expected, expected_weight = norm_spec.norm_gradients(*given, needs=needs)
        if needs[0]:
            assert share_different(dh, expected) <= 0.002 + 1 / dh.numel()
            # One step of BF16 before the addition, and one after it; FP32 terms of about one may cancel.
            alone = norm_spec.norm_gradients(*given[:-1], None, needs=needs)[0].float().abs()
            step = 2**-7 * (2 * alone + residual.float().abs() if adds else alone) + 1e-5
            assert ((dh.float() - expected.float()).abs() <= step).all()
        if needs[1]:
            largest = expected_weight.abs().max().item()
            torch.testing.assert_close(dweight, expected_weight, rtol=0.01, atol=1e-3 * largest)
            assert torch.equal(dweight, norm_kernel.norm_gradients(*given, needs=needs)[1])


@pytest.mark.parametrize("how", ["h", "tensor"])
def test_what_is_not_finite(how):
    h, g = torch.randn(2, 6, 96, device="cuda").to(BF16)
    h[1], h[2, 5], h[3, 7], g[4, 9] = 0, float("nan"), float("inf"), float("inf")
    norm = new_norm(96, BF16, shifted=False, device="cuda")
    x, inverse = norm_kernel.rms_norm(h, norm)
    expected, _ = norm_spec.rms_norm(h, norm)
    assert torch.equal(x.isfinite(), expected.isfinite()) and not x[1].any()
    given = g, saved_of(h, expected, how), norm, inverse, None
    dh, _ = norm_kernel.norm_gradients(*given, needs=(True, False))
    wanted, _ = norm_spec.norm_gradients(*given, needs=(True, False))
    assert torch.equal(dh.isfinite().all(1), wanted.isfinite().all(1))


@pytest.mark.parametrize("tokens, rows", [(1, 1), (35, 35), (66, 33), (8192, 2048)])
@pytest.mark.parametrize("heads", [*HEADS, OF_AN_8B], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_rotation_has_the_bits_of_the_specification(dtype, heads, tokens, rows):
    cos, sin = angles(rows, heads.width, dtype, "cuda")
    for _ in range(2):
        qkv = torch.randn(tokens, heads.features, device="cuda").to(dtype)
        actual = rotary_kernel.rotary(qkv, cos, sin, heads)
        expected = rotary_spec.rotary(qkv, cos, sin, heads)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
        gradients = [torch.randn_like(x) for x in actual]
        gradients[0] = gradients[0].transpose(0, 1).contiguous().transpose(0, 1)
        dqkv = rotary_kernel.rotary_backward(*gradients, None, cos, sin, heads)[0]
        assert torch.equal(dqkv, rotary_spec.rotary_backward(*gradients, None, cos, sin, heads)[0])


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("heads", [*HEADS, OF_AN_8B], ids=str)
def test_norms_of_heads(heads, shifted):
    norms = tuple(new_norm(heads.width, BF16, shifted=shifted, device="cuda") for _ in range(2))
    cos, sin = angles(750, heads.width, BF16, "cuda")
    for _ in range(2):
        qkv = torch.randn(1500, heads.features, device="cuda").to(BF16)
        actual = rotary_kernel.rotary(qkv, cos, sin, heads, norms)
        for mine, expected in zip(actual, rotary_spec.rotary(qkv, cos, sin, heads, norms), strict=True):
            assert share_different(mine, expected) <= 0.001
            torch.testing.assert_close(mine, expected, rtol=0.01, atol=0.02)
        gradients = [torch.randn_like(x) for x in actual]
        dqkv, *weights = rotary_kernel.rotary_backward(*gradients, qkv, cos, sin, heads, norms)
        expected, *expected_weights = rotary_spec.rotary_backward(*gradients, qkv, cos, sin, heads, norms)
        assert share_different(dqkv, expected) <= 0.002
        torch.testing.assert_close(dqkv, expected, rtol=0.01, atol=1e-3)
        for mine, wanted in zip(weights, expected_weights, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0.01, atol=1e-3 * wanted.abs().max().item())


@pytest.mark.parametrize("compiled", [False, True])
def test_functions(compiled):
    """Operators with autograd give the gradients that torch finds step by step, in FP32."""
    torch._dynamo.reset()
    heads = Heads(4, 2, 64)
    norms = tuple(new_norm(64, BF16, shifted=False, device="cuda") for _ in range(2))
    norm, (cos, sin) = new_norm(heads.features, BF16, shifted=False, device="cuda"), angles(33, 64, BF16, "cuda")
    weights = [norm.weight, *(each.weight for each in norms)]

    def mine(h, y):
        h, x = rms_norm(h, norm, y)
        q, k, v = rotary(x, cos[None], sin[None], heads, norms)
        return h, q, k, v

    def reference(h, y):
        h = h.float() + y.float()
        x, _ = norm_spec.rms_norm(h, norm._replace(weight=norm.weight.float()))
        wide = tuple(each._replace(weight=each.weight.float()) for each in norms)
        parts = rotary_spec.rotary(x.flatten(0, 1), cos.float(), sin.float(), heads, wide)
        return h, *(part.view(2, 33, *part.shape[1:]) for part in parts)

    for weight in weights:
        weight.requires_grad_()
    h, y = (torch.randn(2, 33, heads.features, device="cuda").to(BF16).requires_grad_() for _ in range(2))
    actual = (torch.compile(mine, fullgraph=True) if compiled else mine)(h, y)
    expected = reference(h, y)
    gradients = [torch.randn_like(x) for x in actual]
    leaves = [h, y, *weights]
    by_mine = torch.autograd.grad(actual, leaves, gradients)
    by_torch = torch.autograd.grad(expected, leaves, [g.float() for g in gradients])
    for one, other in zip((*actual, *by_mine), (*expected, *by_torch), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.02 * other.abs().max().item())
