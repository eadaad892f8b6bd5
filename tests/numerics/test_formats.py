"""The four formats and E8M0 against ml_dtypes: every BF16 input, every code, every tie."""

import importlib

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy_fp8 import ML_DTYPES, NAMES, codes, decode, grid, largest, round_nearest, same

from octavo.numerics import E4M3, E5M2, dequantize, get_format, quantize
from octavo.numerics.formats import E8M0_DTYPE, FORMATS, format_of, to_float32

ONE = torch.ones(())
by_format = pytest.mark.parametrize("name", NAMES)


def all_bf16():
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def around_every_tie(name):
    """Each grid value and each midpoint, with their FP32 neighbours on both sides."""
    points = grid(name)
    exact = np.concatenate([points, (points[1:] + points[:-1]) / 2]).astype(np.float32)
    below, above = (np.nextafter(exact, np.float32(side)) for side in (-np.inf, np.inf))
    return np.concatenate([exact, below, above])


@by_format
def test_constants_are_those_of_ml_dtypes(name):
    format, info = get_format(name), ml_dtypes.finfo(ML_DTYPES[name])
    assert format.max == float(info.max)
    assert format.smallest_subnormal == float(info.smallest_subnormal)
    assert 2.0**format.min_exponent == float(info.smallest_normal)
    assert format.mantissa_bits == info.nmant
    assert format.dtype.itemsize == 1
    assert format_of(format.dtype) is format


@by_format
def test_saturation_threshold_is_where_unsaturated_rounding_leaves_the_finite_range(name):
    threshold = np.float32(get_format(name).saturation_threshold)
    below, above = np.nextafter(threshold, np.float32(0)), np.nextafter(threshold, np.float32(np.inf))
    assert float(below.astype(ML_DTYPES[name])) == largest(name)
    assert not np.isfinite(float(above.astype(ML_DTYPES[name])))
    assert threshold - largest(name) == (largest(name) - grid(name)[-2]) / 2


@by_format
def test_every_bf16_input_rounds_as_ml_dtypes_does(name):
    x = all_bf16()
    assert x.numel() == 65536
    data = quantize(x, format=name, scale=1.0).data
    assert data.dtype == get_format(name).dtype
    assert same(data, round_nearest(x.float().numpy(), name))
    assert np.array_equal(np.isnan(decode(data)), ~np.isfinite(decode(x)))


@by_format
def test_every_tie_and_its_fp32_neighbours_round_as_ml_dtypes_does(name):
    x = around_every_tie(name)
    assert same(quantize(torch.from_numpy(x), format=name, scale=1.0).data, round_nearest(x, name))


@by_format
def test_a_missing_clamp_is_caught(name, monkeypatch):
    """Planted bug: rounding that does not saturate."""
    module = importlib.import_module("octavo.numerics.quantize")
    monkeypatch.setattr(module, "round_nearest", lambda v, format, **_: v.to(format.dtype))
    x = all_bf16()
    assert not same(quantize(x, format=name, scale=1.0).data, round_nearest(x.float().numpy(), name))


@by_format
def test_every_code_dequantises_to_the_value_of_ml_dtypes(name):
    every = np.arange(256, dtype=np.uint8)
    data = torch.from_numpy(every).view(get_format(name).dtype)
    expected = every.view(ML_DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(dequantize(data, ONE).numpy(), expected)
    # A power-of-two scale is exact, and BF16 holds every FP8 value.
    np.testing.assert_array_equal(dequantize(data, ONE / 8, torch.bfloat16).float().numpy(), expected / 8)


@by_format
def test_every_finite_code_survives_a_round_trip(name):
    every = np.arange(256, dtype=np.uint8)
    data = torch.from_numpy(every).view(get_format(name).dtype)
    finite = np.isfinite(decode(data))
    again = quantize(dequantize(data, ONE), format=name, scale=1.0).data
    np.testing.assert_array_equal(codes(again)[finite], every[finite])
    assert np.isnan(decode(again)[~finite]).all()


def test_every_e8m0_code_means_what_ml_dtypes_says():
    every = np.arange(256, dtype=np.uint8)
    scale = torch.from_numpy(every).view(E8M0_DTYPE)[:, None]
    actual = dequantize(torch.ones(256, 1).to(torch.float8_e4m3fn), scale)[:, 0].numpy()
    np.testing.assert_array_equal(actual, every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert actual[0] == 2.0**-127 and actual[254] == 2.0**127 and np.isnan(actual[255])


def test_formats_are_found_by_name_in_any_case():
    assert list(FORMATS) == list(NAMES)
    for name, format in FORMATS.items():
        assert get_format(name) is get_format(name.lower()) is get_format(format) is format
        assert str(format) == name
    assert get_format("e4m3") is E4M3 and get_format("e5M2") is E5M2


@pytest.mark.parametrize("bad", ["E3M4", "", None, 8])
def test_an_unknown_format_names_value_and_choices(bad):
    with pytest.raises(ValueError, match=f"format={bad!r}.*E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ"):
        get_format(bad)


def test_a_dtype_that_is_no_fp8_format_is_refused():
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*float8_e4m3fn"):
        format_of(torch.bfloat16)


def test_the_quick_way_to_float32_is_exact_for_every_code():
    every = torch.arange(256, dtype=torch.uint8)
    for format in FORMATS.values():
        data = every.view(format.dtype)
        finite = data[data.float().isfinite()]
        assert torch.equal(to_float32(finite), finite.float())
        torch.testing.assert_close(to_float32(data), data.float(), rtol=0, atol=0, equal_nan=True)
