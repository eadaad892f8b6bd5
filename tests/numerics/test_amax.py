"""The magnitudes scales are made from: the finite maximum, per block, and percentiles by counting."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.numerics.amax import block_amax, finite_amax, percentile_amax, tensor_amax

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_percentile(magnitudes, percentile):
    """The smallest element with at least `percentile` % of the elements at or below it; the percentage as written."""
    needed = math.ceil(Fraction(str(percentile)) / 100 * magnitudes.size)
    return np.partition(magnitudes, needed - 1)[needed - 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_amax_is_the_largest_magnitude(dtype):
    for x in (randn(33, 7).to(dtype), -randn(5).abs().to(dtype), torch.tensor(-3.0, dtype=dtype)):
        amax, finite = finite_amax(x)
        assert (amax.dtype, amax.shape, finite.dtype, finite.shape) == (torch.float32, (), torch.bool, ())
        assert amax == x.abs().max().float() and finite


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_elements_are_left_out_and_reported(dtype, bad):
    x = randn(33, 7).to(dtype)
    expected = x.clone().index_fill_(0, torch.tensor(4), 0).abs().max().float()
    x[4] = bad
    amax, finite = finite_amax(x)
    assert amax == expected and not finite
    amax, finite = finite_amax(torch.full((3,), bad, dtype=dtype))
    assert amax == 0 and not finite


def test_an_empty_tensor_has_amax_zero_and_is_finite():
    amax, finite = finite_amax(torch.zeros(0, 5))
    assert amax == 0 and finite
    assert tensor_amax(torch.zeros(0, 5), 99.0) == 0


def test_float64_beyond_float32_counts_as_non_finite():
    """It becomes infinity in FP32, where all arithmetic happens; one such value must not hide the others."""
    amax, finite = finite_amax(torch.tensor([1e300, 2.0], dtype=torch.float64))
    assert amax == 2.0 and not finite


def test_amax_carries_no_graph():
    for value in (1.0, math.inf):
        x = torch.tensor([value, 2.0], requires_grad=True)
        assert not finite_amax(x)[0].requires_grad
        assert not block_amax(x[None], (1, 128)).requires_grad
        assert not percentile_amax(x, 50.0).requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize("shape", [(1, 1), (130, 131), (2, 3, 5, 33)])
def test_block_amax_by_explicit_loops(dtype, block, shape):
    x = randn(*shape).to(dtype)
    x[..., 0, 0] = math.nan
    x[..., -1, -1] = math.inf
    rows, columns = block
    values = np.where(np.isfinite(x.double().numpy()), np.abs(x.double().numpy()), 0).reshape(-1, *shape[-2:])
    expected = [
        [
            [m[i : i + rows, j : j + columns].max() for j in range(0, shape[-1], columns)]
            for i in range(0, shape[-2], rows)
        ]
        for m in values
    ]
    actual = block_amax(x, block)
    assert actual.dtype == torch.float32
    assert actual.shape == (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    np.testing.assert_array_equal(actual.numpy().reshape(np.shape(expected)), np.float32(expected))


@pytest.mark.parametrize("percentile", [0.1, 12.5, 50, 90, 99, 99.5, 99.9, 99.99, 100])
@pytest.mark.parametrize("size", [1, 7, 1000, 4097])
def test_percentile_is_exact_for_bf16(percentile, size):
    x = randn(size, seed=size).bfloat16()
    assert percentile_amax(x, percentile).item() == exact_percentile(x.abs().float().numpy(), percentile)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_percentile_of_finer_types_lies_above_by_less_than_a_bf16_step(dtype):
    x = (randn(4097) * 3).to(dtype)
    for percentile in (1, 50, 99.9, 100):
        exact = float(exact_percentile(x.abs().double().numpy(), percentile))
        actual = percentile_amax(x, percentile).item()
        # Rounded up to 8 significant bits: less than one step of 2^-7 relative.
        assert exact <= actual <= exact * (1 + 2.0**-7)


def test_percentile_of_more_elements_than_torch_quantile_takes():
    """Which was 2**24 before torch 2.15."""
    size = 2**24 + 4096
    x = (torch.arange(size, dtype=torch.int32) * 40503 & 0x7FFF).to(torch.int16)  # every 15-bit pattern in turn
    x = x.clamp_(max=0x7F7F).view(torch.bfloat16)
    # Non-negative BF16 values are ordered like their bits, which numpy sorts faster.
    expected = torch.tensor(exact_percentile(x.view(torch.int16).numpy(), 37)).view(torch.bfloat16)
    assert percentile_amax(x, 37.0) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_percentile_is_of_the_finite_elements_alone(bad):
    x = torch.arange(1.0, 101.0)
    poisoned = torch.cat([x, torch.full((100,), bad)])
    for percentile in (1, 50, 100):
        assert percentile_amax(poisoned, percentile) == percentile_amax(x, percentile)
    assert percentile_amax(torch.full((3,), bad), 50) == 0


def test_percentile_stays_finite_at_the_top_of_fp32():
    largest_bf16 = torch.finfo(torch.bfloat16).max
    assert percentile_amax(torch.tensor([torch.finfo(torch.float32).max]), 100) == largest_bf16
    assert percentile_amax(torch.tensor([2.0**-149]), 100) == 2.0**-133  # the smallest BF16 subnormal


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=60),
    st.sampled_from([0.5, 10, 33.3, 50, 90, 99.9, 100]),
)
def test_percentile_counts(values, percentile):
    x = torch.tensor(values).bfloat16()
    assert percentile_amax(x, percentile).item() == exact_percentile(x.abs().float().numpy(), percentile)


def test_tensor_amax_chooses():
    x = torch.arange(1.0, 101.0)
    assert tensor_amax(x) == 100
    assert tensor_amax(x, 50.0) == 50
