"""`fp8_matmul` and `fp8_linear`: the product as plain functions."""

import numpy as np
import pytest
import torch
from numpy_fp8 import NAMES, decode, spread
from numpy_fp8 import quantize as numpy_quantize

from octavo import fp8_linear, fp8_matmul, quantize


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dequantized(x, name="E4M3", granularity="tensor"):
    """Through numpy alone."""
    data, scale = numpy_quantize(decode(x), name, granularity)
    return data.astype(np.float64) * spread(scale.astype(np.float64), x.shape, granularity)


def assert_close(y, a, b, bias=0.0):
    """K + 6 FP32 roundings at most (see test_gemm.py)."""
    roundings = (a.shape[-1] + 6) * 2.0**-24 * 1.001
    exact, size = a @ b + bias, np.abs(a) @ np.abs(b) + np.abs(bias)
    assert y.shape == exact.shape
    assert (np.abs(decode(y) - exact) <= roundings * size).all()


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "mx"])
@pytest.mark.parametrize("name", NAMES)
def test_fp8_matmul_is_the_product_of_the_quantised_operands(name, granularity):
    for shape_a, shape_b in (((5, 150), (150, 7)), ((2, 3, 5, 40), (3, 40, 33)), ((1, 1), (1, 1))):
        a, b = randn(*shape_a, seed=1), randn(*shape_b, seed=2)
        # The right operand is quantised along K: transpose, quantise, transpose back.
        right = np.swapaxes(dequantized(b.mT, name, granularity), -1, -2)
        y = fp8_matmul(a, b, format=name, granularity=granularity)
        assert_close(y, dequantized(a, name, granularity), right)


def test_fp8_matmul_of_square_matrices_does_not_transpose():
    a, b = randn(32, 32, seed=1), randn(32, 32, seed=2)
    y = fp8_matmul(a, b)
    # Two operands each within 2^-4 relative, independent: about 2^-4 of the result's size; a transpose is off by 1.4.
    assert (y - a @ b).norm() / (a @ b).norm() < 0.06
    assert (y - a @ b.mT).norm() / (a @ b).norm() > 1


def test_fp8_matmul_returns_the_dtype_of_a_unless_told():
    a, b = randn(4, 16), randn(16, 5)
    assert fp8_matmul(a.bfloat16(), b).dtype == torch.bfloat16
    assert fp8_matmul(a.double(), b).dtype == torch.float64
    assert fp8_matmul(a.bfloat16(), b, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("shapes", [((4,), (4, 4)), ((4, 4), (4,)), ((4, 5), (4, 5))])
def test_fp8_matmul_names_shapes_that_do_not_fit(shapes):
    with pytest.raises(ValueError, match=r"\[..., M, K\] and \[..., K, N\]; got"):
        fp8_matmul(*(torch.ones(s) for s in shapes))


LEADING = [(), (6,), (2, 3), (2, 1, 3)]


@pytest.mark.parametrize("lead", LEADING)
@pytest.mark.parametrize("with_bias", [False, True])
def test_fp8_linear_on_high_precision_inputs(lead, with_bias):
    x, w, bias = randn(*lead, 40, seed=1), randn(7, 40, seed=2), randn(7, seed=3) if with_bias else None
    scale_x, scale_w = 0.01, torch.tensor(0.02)
    y = fp8_linear(x, w, scale_x, scale_w, bias)
    x_q, w_q = (decode(quantize(t, scale=s).data) for t, s in ((x, scale_x), (w, scale_w)))
    scales = [float(np.float32(s)) for s in (scale_x, 0.02)]
    assert_close(y, x_q * scales[0], (w_q * scales[1]).T, decode(bias) if with_bias else 0.0)


@pytest.mark.parametrize("lead", LEADING)
@pytest.mark.parametrize("formats", [("E4M3", "E4M3"), ("E5M2", "E4M3"), ("E5M2", "E5M2")])
def test_fp8_linear_on_fp8_data_takes_it_as_it_is(lead, formats):
    x = quantize(randn(*lead, 40, seed=1), format=formats[0])
    w = quantize(randn(7, 40, seed=2), format=formats[1])
    y = fp8_linear(x.data, w.data, x.scale, w.scale)
    assert y.dtype == torch.float32
    assert_close(y, decode(x.data) * decode(x.scale), (decode(w.data) * decode(w.scale)).T)


@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("granularity", ["channel", "block", "mx"])
def test_fp8_linear_takes_row_and_block_scales_for_both_operands(lead, granularity):
    x, w = randn(*lead, 150, seed=1), randn(7, 150, seed=2)
    x_q, w_q = quantize(x, granularity=granularity), quantize(w, granularity=granularity)
    value_x = decode(x_q.data) * spread(decode(x_q.scale), x.shape, granularity)
    value_w = decode(w_q.data) * spread(decode(w_q.scale), w.shape, granularity)
    for inputs in ((x, w), (x_q.data, w_q.data)):
        assert_close(fp8_linear(*inputs, x_q.scale, w_q.scale), value_x, value_w.T)


@pytest.mark.parametrize("scale_shape", [(3, 1), (1, 3, 1), (32, 1, 1), (1, 1), (1, 1, 1), ()])
@pytest.mark.parametrize("batch", [5, 32, 128])
def test_fp8_linear_broadcasts_scales_over_leading_dimensions(scale_shape, batch):
    """As `quantize` itself does: a scale [T, 1] belongs to the rows of each batch, whatever the batch's size."""
    if scale_shape == (32, 1, 1):
        scale_shape = (batch, 1, 1)
    x, w = randn(batch, 3, 16, seed=1), randn(7, 16, seed=2)
    scale = torch.rand(scale_shape, generator=torch.Generator().manual_seed(3)) + 0.01
    x_q, w_q = quantize(x, scale=scale), quantize(w)
    y = fp8_linear(x, w, scale, w_q.scale)
    assert_close(y, decode(x_q.data) * decode(scale), (decode(w_q.data) * decode(w_q.scale)).T)


def test_fp8_linear_and_a_tensor_scale_of_one_element():
    """Checkpoints store tensor scales as [1]: works like 0-d, or says what is wrong with it."""
    x, w = randn(6, 16, seed=1), randn(7, 16, seed=2)
    try:
        y = fp8_linear(x, w, torch.tensor([0.01]), torch.tensor([0.02]))
    except ValueError as error:
        assert "scale" in str(error)
    else:
        assert torch.equal(y, fp8_linear(x, w, 0.01, 0.02))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool])
def test_fp8_linear_refuses_bytes_that_are_not_fp8(dtype):
    """A frozen weight travels as uint8: its bytes must not be multiplied as if they were numbers."""
    with pytest.raises((TypeError, ValueError), match=str(dtype)):
        fp8_linear(randn(2, 16), torch.ones(16, 16, dtype=dtype), 1.0, 1.0)


def test_fp8_linear_returns_the_dtype_of_x_unless_told():
    x, w = randn(2, 16), randn(3, 16)
    assert fp8_linear(x.bfloat16(), w, 1.0, 1.0).dtype == torch.bfloat16
    assert fp8_linear(x.bfloat16(), w, 1.0, 1.0, out_dtype=torch.float32).dtype == torch.float32
    q = quantize(x)
    assert fp8_linear(q.data, w, q.scale, 1.0, out_dtype=torch.bfloat16).dtype == torch.bfloat16
