"""The cross entropy kernels in Triton's interpreter against the specification."""

import math

import pytest
import torch
from kernel_cases import assert_nearly_same

from octavo.kernels import cross_entropy as kernel
from octavo.numerics import E4M3, E5M2
from octavo.numerics import cross_entropy as spec

SHAPES = [(1, 2), (5, 33), (70, 130), (3, 4101)]  # more than one tile each way, more than one walk along a row
FACTOR = torch.tensor(0.37)


def logits_and_labels(t, v, dtype=torch.float32):
    logits = (3 * torch.randn(t, v)).to(dtype)
    labels = torch.randint(0, v, (t,))
    labels[t // 2 :: 3] = spec.IGNORED
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient(shape, dtype):
    logits, labels = logits_and_labels(*shape, dtype)
    loss, lse = kernel.cross_entropy(logits, labels)
    expected_loss, expected_lse = spec.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    expected = spec.cross_entropy_backward(logits, labels, lse, FACTOR)
    kernel.cross_entropy_backward_(logits, labels, lse, FACTOR)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7  # a step of BF16
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=1e-7)
    assert (logits[labels == spec.IGNORED] == 0).all()


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_in_fp8(shape, format, dtype):
    logits, labels = logits_and_labels(*shape, dtype)
    _, lse = spec.cross_entropy(logits, labels)
    before = logits.clone()
    columns = torch.empty(shape[1], shape[0], dtype=format.dtype)
    rows = kernel.cross_entropy_quantize(logits, labels, lse, FACTOR, format, columns)
    alone = kernel.cross_entropy_quantize(logits, labels, lse, FACTOR, format, None)
    assert torch.equal(alone.data.view(torch.uint8), rows.data.view(torch.uint8)) and alone.scale == rows.scale
    actual = rows, rows._replace(data=columns)
    expected = spec.cross_entropy_quantize(logits, labels, lse, FACTOR, format)
    for one, other in zip(actual, expected, strict=True):
        assert_nearly_same(one, other, share=1e-3 if dtype == torch.float32 else 5e-3)
    assert torch.equal(actual[1].data.view(torch.uint8), actual[0].data.view(torch.uint8).mT)
    assert torch.equal(logits, before)


def test_gradient_in_fp8_of_fp16_logits():
    """What is below FP16 is not below E5M2 under the scale of the gradient."""
    logits, labels = torch.zeros(4, 40, dtype=torch.float16), torch.zeros(4, dtype=torch.int64)
    logits[:, 20:] = -19.0
    _, lse = spec.cross_entropy(logits, labels)
    rows = kernel.cross_entropy_quantize(logits, labels, lse, FACTOR, E5M2, None)
    assert (rows.data.float()[:, 20:] > 0).all()
    assert_nearly_same(rows, spec.cross_entropy_quantize(logits, labels, lse, FACTOR, E5M2)[0])


def test_columns_as_part_of_more():
    logits, labels = logits_and_labels(20, 40, torch.bfloat16)
    _, lse = spec.cross_entropy(logits, labels)
    columns = torch.full((40, 60), 7.0).to(E5M2.dtype)
    part = columns[:, 16:36]
    rows = kernel.cross_entropy_quantize(logits, labels, lse, FACTOR, E5M2, part)
    assert torch.equal(part.view(torch.uint8), rows.data.view(torch.uint8).mT)
    assert (columns[:, :16].float() == 7).all() and (columns[:, 36:].float() == 7).all()


def test_a_slice_of_wider_logits():
    wide, labels = torch.randn(6, 50), torch.tensor([0, 1, 2, 39, 5, -100])
    logits = wide[:, :40]
    for one, other in zip(kernel.cross_entropy(logits, labels), spec.cross_entropy(logits, labels), strict=True):
        torch.testing.assert_close(one, other)
    after = wide[:, 40:].clone()
    _, lse = spec.cross_entropy(logits, labels)
    expected = spec.cross_entropy_backward(logits, labels, lse, FACTOR)
    kernel.cross_entropy_backward_(logits, labels, lse, FACTOR)
    torch.testing.assert_close(logits, expected)
    assert torch.equal(wide[:, 40:], after)


def test_labels_of_other_ranks():
    """A label that is among other ranks' tokens is counted, and subtracted nowhere."""
    logits, labels = logits_and_labels(6, 40)
    labels[:] = torch.tensor([3, spec.ELSEWHERE, 39, spec.IGNORED, spec.ELSEWHERE, 0])
    lse = torch.logsumexp(logits, dim=1) + 0.7
    expected = torch.exp(logits - lse[:, None])
    expected[[0, 2, 5], [3, 39, 0]] -= 1
    expected[3] = 0
    torch.testing.assert_close(spec.cross_entropy_backward(logits, labels, lse), expected)
    for format in (E4M3, E5M2):
        rows = kernel.cross_entropy_quantize(logits, labels, lse, FACTOR, format, None)
        assert_nearly_same(rows, spec.cross_entropy_quantize(logits, labels, lse, FACTOR, format)[0])
    kernel.cross_entropy_backward_(logits, labels, lse, torch.ones(()))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-7)


def test_masked_and_large_logits():
    """−∞ is a probability of zero; logits in the hundreds must not overflow; NaN shows in its own token only."""
    logits, labels = logits_and_labels(6, 40)
    labels[:] = 3
    logits[0, 5:] = -math.inf
    logits[1] *= 300
    logits[2] = -1e4
    logits[4, 7] = math.nan
    loss, lse = kernel.cross_entropy(logits, labels)
    expected_loss, expected_lse = spec.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected_loss, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, equal_nan=True)
    assert loss.isnan().nonzero().flatten().tolist() == [4]
    expected = spec.cross_entropy_backward(logits, labels, expected_lse, FACTOR)
    kernel.cross_entropy_backward_(logits, labels, expected_lse, FACTOR)
    torch.testing.assert_close(logits, expected, equal_nan=True)


def test_no_label_at_all():
    """A mean over nothing has an infinite factor; ignored tokens have no gradient nevertheless."""
    logits, labels = torch.randn(4, 30), torch.full((4,), spec.IGNORED)
    loss, lse = kernel.cross_entropy(logits, labels)
    assert (loss == 0).all()
    assert not spec.cross_entropy_backward(logits, labels, lse, torch.tensor(math.inf)).any()
    kernel.cross_entropy_backward_(logits, labels, lse, torch.tensor(math.inf))
    assert not logits.any()


@pytest.fixture
def loads(monkeypatch):
    """Addresses that kernels read from."""
    from triton.runtime import interpreter

    seen = []
    honest = interpreter.InterpreterBuilder.create_masked_load

    def load(self, ptrs, mask, *rest):
        seen.extend(ptrs.data[mask.data.astype(bool)].flatten().tolist())
        return honest(self, ptrs, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", load)
    return seen


@pytest.mark.parametrize("wrong", [-1, 40, 41, -99])
def test_a_label_that_is_no_token_is_not_looked_up(wrong, loads):
    """Its loss and gradient are NaN; torch's own kernels assert, and so does `linear_cross_entropy` before them."""
    logits, labels = torch.randn(4, 40), torch.tensor([3, wrong, -100, wrong])
    loss, lse = kernel.cross_entropy(logits, labels)
    extents = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (logits, labels)]
    assert len(loads) > logits.numel()
    assert all(any(start <= address < stop for start, stop in extents) for address in loads)
    assert loss.isnan().tolist() == [False, True, False, True]
    kernel.cross_entropy_backward_(logits, labels, lse, FACTOR)
    assert logits.isnan().all(1).tolist() == [False, True, False, True] and not logits[::2].isnan().any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_read_beside_the_logits(shape, loads):
    logits, labels = logits_and_labels(*shape)
    labels[-1] = shape[1] - 1
    _, lse = kernel.cross_entropy(logits, labels)
    kernel.cross_entropy_backward_(logits, labels, lse, FACTOR)
    extents = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (logits, labels, lse, FACTOR)]
    assert all(any(start <= address < stop for start, stop in extents) for address in set(loads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1,), (3, 4097), (2, 3, 5)])
def test_scaling_in_place(size, dtype):
    x = torch.randn(size).to(dtype)
    expected = (x.float() * 0.37).to(dtype)
    before = x.clone()
    kernel.scale_(x, torch.tensor(1.0))
    assert torch.equal(x, before)
    kernel.scale_(x, FACTOR)
    assert torch.equal(x, expected)
