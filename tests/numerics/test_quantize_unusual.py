"""What zero, tiny, huge, non-finite and empty tensors do, in every granularity: the docstring of quantize.py."""

import math

import numpy as np
import pytest
import torch
from numpy_fp8 import KINDS, NAMES, codes, decode, largest, quantize_kind, same, sample
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.numerics import E4M3, FP8ScalingManager, OperandRecipe, compute_scale, get_format, quantize
from octavo.numerics.operand import quantize_operand
from octavo.numerics.quantize import GRANULARITIES, SMALLEST_SCALE, scale_from_amax

by_kind = pytest.mark.parametrize("kind", KINDS)
by_format = pytest.mark.parametrize("name", NAMES)


def matches(x, name, kind):
    actual = quantize(x, format=name, **KINDS[kind])
    data, scale = quantize_kind(x, name, kind)
    return np.array_equal(decode(actual.scale), scale) and same(actual.data, data)


@by_kind
@by_format
def test_all_zero_has_scale_one_and_data_zero(name, kind):
    actual = quantize(torch.zeros(3, 150), format=name, **KINDS[kind])
    assert (decode(actual.scale) == 1).all() and (codes(actual.data) == 0).all()
    # One group of zeros among others changes nothing for them.
    x = sample(3, 300)
    x[1] = 0
    assert matches(x, name, kind)


@by_kind
@by_format
def test_tiny_tensors_have_a_scale_of_at_least_the_smallest_normal_number(name, kind):
    for amax in (2.0**-149, 2.0**-135, 2.0**-126, 2.0**-120):
        x = torch.tensor([[amax, -amax, 0.0, amax / 3]])
        actual = quantize(x, format=name, **KINDS[kind])
        scale = decode(actual.scale)
        assert (scale >= SMALLEST_SCALE).all()
        assert np.isfinite(1 / scale).all() and np.isfinite(decode(actual.data)).all()
        # Half a subnormal step of the smallest scale is all that may be lost, beside the relative step.
        bound = np.maximum(
            2.0 ** -(get_format(name).mantissa_bits + 1) * np.abs(decode(x)),
            0.5 * get_format(name).smallest_subnormal * scale.max(),
        )
        if kind != "mx floor":  # which clips
            assert (np.abs(decode(actual.data) * scale - decode(x)) <= bound * (1 + 2.0**-20)).all()
    assert matches(torch.tensor([[2.0**-149, 2.0**-140]]), name, kind)


@by_kind
@by_format
def test_huge_tensors_map_to_the_largest_value_and_nothing_overflows(name, kind):
    for dtype in (torch.bfloat16, torch.float32):
        top = torch.finfo(dtype).max
        x = torch.tensor([[top, -top, top / 2, 1.0]], dtype=dtype)
        actual = quantize(x, format=name, **KINDS[kind])
        assert np.isfinite(decode(actual.data)).all() and np.isfinite(decode(actual.scale)).all()
        assert matches(x, name, kind)
        if not kind.startswith("mx"):
            np.testing.assert_array_equal(decode(actual.data)[0, :2], [largest(name), -largest(name)])
            assert actual.dequantize().isfinite().all()


@by_kind
@by_format
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_non_finite_elements_become_nan_at_their_place_and_leave_the_rest_alone(name, kind, bad):
    x = sample(130, 132)
    clean = x.clone()
    at = [(0, 0), (129, 131), (64, 128)]
    for i, j in at:
        x[i, j], clean[i, j] = bad, 0.0
    actual, reference = quantize(x, format=name, **KINDS[kind]), quantize(clean, format=name, **KINDS[kind])
    np.testing.assert_array_equal(decode(actual.scale), decode(reference.scale))
    nan = np.isnan(decode(actual.data))
    assert sorted(zip(*np.nonzero(nan), strict=True)) == sorted(at)
    assert np.array_equal(codes(actual.data)[~nan], codes(reference.data)[~nan])
    nothing = quantize(torch.full((2, 40), bad), format=name, **KINDS[kind])
    assert (decode(nothing.scale) == 1).all() and np.isnan(decode(nothing.data)).all()


def test_float64_is_rounded_to_float32_first_and_overflow_shows():
    actual = quantize(torch.tensor([1e300, 1.0, 2.0], dtype=torch.float64))
    assert decode(actual.scale) == np.float32(2) / np.float32(448)
    assert np.isnan(decode(actual.data)[0]) and decode(actual.data)[2] == 448


@by_format
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_finite_value_saturates_however_small_the_scale(name, rounding, compiled, monkeypatch):
    """x / scale may be beyond FP32: that is no infinity of x's, and no NaN."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    x = torch.tensor([1e38, -1e38, 2.0**40, -8e25, 0.0, math.inf, -math.inf, math.nan])
    for scale in (2.0**-100, 1e-25):
        actual = decode(quantize(x, scale=scale, format=name, rounding=rounding).data)
        top = largest(name)
        np.testing.assert_array_equal(actual, [top, -top, top, -top, 0.0, math.nan, math.nan, math.nan])


def test_an_outlier_beyond_a_percentile_saturates():
    x = torch.full((1000,), 1e-30)
    x[3] = 1e20
    actual = quantize(x, scale=compute_scale(x, percentile=99)).dequantize()
    assert actual.isfinite().all() and actual[0] == pytest.approx(1e-30, rel=2.0**-6)
    state = FP8ScalingManager().register("x")
    actual = quantize_operand(x[None], state, OperandRecipe(E4M3, percentile=99.0))[0].dequantize()
    assert actual.isfinite().all()


def test_a_large_margin_does_not_overflow_the_scale():
    scale = scale_from_amax(torch.tensor(torch.finfo(torch.float32).max), E4M3, 2.0**16)
    assert scale.isfinite()


def test_a_percentile_that_falls_on_zero_still_represents_the_rest():
    """A tensor that is 99.9 % zeros (after a ReLU, say) is not an all-zero tensor."""
    x = torch.zeros(10_000)
    x[:5] = 1e-6
    assert quantize(x, scale=compute_scale(x, percentile=99.0)).dequantize().count_nonzero() == 5


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(0,), (0, 256), (3, 0), (2, 0, 5)])
def test_empty_tensors_quantise_to_empty_tensors(granularity, shape):
    actual = quantize(torch.zeros(shape), granularity=granularity)
    assert actual.data.shape == shape and actual.dequantize().shape == shape


@by_kind
def test_nothing_tracks_gradients(kind):
    for value in (1.0, math.inf):
        x = torch.tensor([[value, 2.0]], requires_grad=True)
        actual = quantize(x, **KINDS[kind])
        assert not actual.data.requires_grad and not actual.scale.requires_grad


@by_kind
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_the_shortcuts_of_the_cpu_change_nothing(kind, bad, monkeypatch):
    """On the CPU, looking for non-finite values first saves passes; a GPU and a compiled graph go the long way."""
    x = sample(33, 140)
    x[7, 7] = bad
    short = quantize(x, **KINDS[kind])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    long = quantize(x, **KINDS[kind])
    np.testing.assert_array_equal(decode(short.data), decode(long.data))
    np.testing.assert_array_equal(decode(short.scale), decode(long.scale))


class Divisions(TorchDispatchMode):
    """Notes what every division divides by."""

    def __init__(self):
        super().__init__()
        self.by = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.by.append(args[1])
        return func(*args, **(kwargs or {}))


@by_kind
def test_no_division_by_a_plain_number(kind):
    """CUDA multiplies by the rounded reciprocal instead: half of all scales would differ from the CPU's by one unit."""
    with Divisions() as divisions:
        quantize(sample(33, 140), **KINDS[kind])
    assert divisions.by and all(isinstance(by, torch.Tensor) for by in divisions.by)
