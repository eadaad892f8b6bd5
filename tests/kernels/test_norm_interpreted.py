"""The kernels of RMS norm in Triton's interpreter, against the specification.

Sums have another order there than here: 1 / rms differs in its last bits, and by it single elements, by one step. All
that is computed from the same 1 / rms has the same bits.
"""

import pytest
import torch
from norm_cases import SHAPES, new_norm, saved_of, share_different

from octavo.kernels import norm as kernels
from octavo.numerics import norm as spec

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def by_inverse(h, norm, inverse):
    """x, as specified, from a given 1 / rms."""
    if norm.shifted:
        return (h.float() * inverse * norm.factor()).to(h.dtype)
    return norm.weight * (h.float() * inverse).to(h.dtype)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(dtype, shape, shifted):
    torch.manual_seed(0)
    h, y = torch.randn(2, *shape).to(dtype)
    norm = new_norm(shape[1], dtype, shifted=shifted)
    x, inverse = kernels.rms_norm(h, norm)
    torch.testing.assert_close(inverse, spec.rms_norm(h, norm)[1], rtol=1e-6, atol=0)
    assert torch.equal(x, by_inverse(h, norm, inverse))
    total, x, inverse = kernels.add_rms_norm(h, y, norm)
    assert torch.equal(total, h + y) and torch.equal(x, by_inverse(h + y, norm, inverse))
    torch.testing.assert_close(inverse, spec.rms_norm(total, norm)[1], rtol=1e-6, atol=0)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("how", ["h", "tensor", "channel", "block"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, how, adds, needs):
    compare_gradients(torch.bfloat16, shape, how, adds, needs, shifted=False)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_dtypes(dtype, shifted):
    compare_gradients(dtype, (33, 130), "h", True, (True, True), shifted=shifted)


def compare_gradients(dtype, shape, how, adds, needs, *, shifted):
    torch.manual_seed(0)
    h, g, residual = torch.randn(3, *shape).to(dtype)
    norm = new_norm(shape[1], dtype, shifted=shifted)
    norm.weight[3] = -1.0 if shifted else 0.0
    x, inverse = spec.rms_norm(h, norm)
    given = g, saved_of(h, x, how), norm, inverse, residual if adds else None
    dh, dweight = kernels.norm_gradients(*given, needs=needs)
    expected, expected_weight = spec.norm_gradients(*given, needs=needs)
    assert (dh is None, dweight is None) == (not needs[0], not needs[1])
    step = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    if needs[0]:
        if dtype != torch.float32:
            assert share_different(dh, expected) <= 0.002 + 1 / dh.numel()
        torch.testing.assert_close(dh, expected, rtol=step + 1e-5, atol=1e-5)
    if needs[1]:
        assert dweight.dtype == dtype
        torch.testing.assert_close(dweight, expected_weight, rtol=step + 1e-5, atol=1e-4)


def test_zeros_and_what_is_not_finite():
    h, g = torch.randn(2, 6, 96).to(torch.bfloat16)
    h[1], h[2, 5], h[3, 7], g[4, 9] = 0, float("nan"), float("inf"), float("inf")
    norm = new_norm(96, torch.bfloat16, shifted=False)
    x, inverse = kernels.rms_norm(h, norm)
    expected, _ = spec.rms_norm(h, norm)
    assert torch.equal(x.isfinite(), expected.isfinite()) and not x[1].any()
    saved = saved_of(h, expected, "h")  # the interpreter reads NaN in FP8 as a number; tests/gpu has that
    dh, _ = kernels.norm_gradients(g, saved, norm, inverse, None, needs=(True, False))
    wanted, _ = spec.norm_gradients(g, saved, norm, inverse, None, needs=(True, False))
    assert torch.equal(dh.isfinite(), wanted.isfinite())
    assert dh[0].isfinite().all() and dh[5].isfinite().all() and not dh[2].isfinite().any()


def test_the_weights_gradient_is_the_same_every_time():
    h, g = torch.randn(2, 300, 64).to(torch.bfloat16)
    norm = new_norm(64, torch.bfloat16, shifted=False)
    _, inverse = spec.rms_norm(h, norm)
    first, second = (
        kernels.norm_gradients(g, saved_of(h, h, "h"), norm, inverse, None, needs=(False, True))[1] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_what_has_no_kernel():
    h, weight = torch.zeros(4, 64), torch.ones(64)
    assert kernels.can_norm(h, weight) and kernels.can_norm(h, weight, h, None)
    assert not kernels.can_norm(h.t(), weight) and not kernels.can_norm(h.double(), weight.double())
    assert not kernels.can_norm(h, weight, h.bfloat16()) and not kernels.can_norm(h[:0], weight)
    assert not kernels.can_norm(torch.zeros(1, kernels.WIDEST + 1), weight)
    x = torch.randn(4, 64)
    assert kernels.can_read(saved_of(x, x, "block")) and not kernels.can_read(saved_of(x, x, "mx"))
