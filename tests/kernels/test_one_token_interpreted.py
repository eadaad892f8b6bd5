"""Products of one token by FP8 weights: the kernels in Triton's interpreter against their specification."""

import math

import pytest
import torch
from kernel_cases import assert_nan_alike
from test_few_tokens_interpreted import BF16, assert_near, low, weight_of

from octavo.kernels import few_tokens as kernel
from octavo.kernels.tuning import HOPPER
from octavo.numerics import Quantized
from octavo.numerics import few_tokens as spec
from octavo.numerics.norm import Norm


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
@pytest.mark.parametrize(("n", "k"), [(200, 144), (130, 528), (64, 1024), (257, 1040), (5, 16)])
def test_linear(n, k, granularity):
    x, weight = torch.randn(1, k).to(BF16), weight_of(n, k, granularity)
    assert kernel.can_multiply(x, weight, [])
    assert_near(kernel.linear(x, weight), spec.linear(x, weight))


@pytest.mark.parametrize("format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_formats_and_dtypes(format, dtype):
    x, weight = torch.randn(1, 256).to(dtype), weight_of(70, 256, "channel", format)
    adapters = [low(0, 70, 256, dtype=torch.float32)]
    assert_near(kernel.linear(x, weight, adapters), spec.linear(x, weight, adapters), spec.linear(x, weight))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("spans", [[(0, 200)], [(0, 64), (64, 136), (136, 200)], [(16, 80)], [(0, 200), (30, 90)]])
def test_adapters_bias_and_residual(spans, dtype):
    k = HOPPER.one_token.projected + 16
    x, weight = torch.randn(1, k).to(BF16), weight_of(200, k)
    ranks = zip(spans, (8, 20, 3), strict=False)
    adapters = [low(*span, k, rank, dtype, 0.5 + i) for i, (span, rank) in enumerate(ranks)]
    bias, residual = torch.randn(200).to(BF16), torch.randn(1, 200).to(BF16)
    for added in ({}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
        expected = spec.linear(x, weight, adapters, **added)
        assert_near(kernel.linear(x, weight, adapters, **added), expected, spec.linear(x, weight), *added.values())


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("k", [144, 1024])
def test_after_a_norm(k, adapted, shifted):
    h, weight, norm = 3 * torch.randn(1, k).to(BF16), weight_of(100, k), Norm(torch.rand(k).to(BF16), 1e-5, shifted)
    adapters = [low(0, 60, k), low(60, 100, k, 3)] if adapted else []
    # 1 / rms may differ in its last bit, which may move an x by a unit of its own.
    expected = spec.linear(h, weight, adapters, norm=norm)
    assert_near(kernel.linear(h, weight, adapters, norm=norm), expected, steps=2.0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("f", "k", "granularity"), [(384, 144, "block"), (208, 528, "channel")])
def test_gated_mlp(f, k, granularity, activation):
    x, norm = torch.randn(1, k).to(BF16), Norm(torch.rand(k).to(BF16) + 0.5, 1e-5)
    gate_up, down = weight_of(2 * f, k, granularity), weight_of(k, f, granularity)
    adapters, adapters_down = [low(0, f, k), low(f, 2 * f, k, rank=5)], [low(0, k, f)]
    for lows in ((adapters, adapters_down), ([], []), (adapters[1:], [])):
        for more in ({}, {"residual": x, "norm": norm}):
            expected = spec.gated_mlp(x, gate_up, down, activation, *lows, **more)
            actual = kernel.gated_mlp(x, gate_up, down, activation, *lows, **more)
            assert_near(actual, expected, x, steps=2.0, share=0.8)


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize(("format", "byte"), [("E4M3", 0x7F), ("E4M3", 0xFF), ("E5M2", 0x7E), ("E5M2", 0x7C)])
def test_what_is_not_finite_stays_so(format, byte, granularity):
    x, weight = torch.randn(1, 144).to(BF16), weight_of(130, 144, granularity, format)
    weight.data.view(torch.uint8)[7, 100], weight.data.view(torch.uint8)[129, 141] = byte, byte
    actual, expected = kernel.linear(x, weight), spec.linear(x, weight)
    assert torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.isinf(), expected.isinf())
    assert not expected.isfinite().all() and expected[:, :7].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_token_that_is_not_finite(value):
    x, weight, adapters = torch.randn(1, 144).to(BF16), weight_of(130, 144), [low(0, 50, 144)]
    x[0, 3] = value
    assert_nan_alike(kernel.linear(x, weight, adapters), spec.linear(x, weight, adapters))


def test_infinite_projections_reach_their_outputs_only():
    x, weight, adapter = torch.randn(1, 128).to(BF16), weight_of(130, 128), low(0, 50, 128)
    adapter.down[0] = 1e38
    actual = kernel.linear(x.abs(), weight, [adapter])
    assert not actual[:, :50].isfinite().all() and actual[:, 50:].isfinite().all()


@pytest.mark.parametrize(("granularity", "format"), [("block", "E4M3"), ("channel", "E4M3"), ("channel", "E5M2")])
@pytest.mark.parametrize("magnitude", [1e28, 1e10, 1e-30, 2e-35])
def test_any_magnitude_but_the_largest(magnitude, granularity, format):
    x, weight = magnitude * torch.randn(1, 528), weight_of(70, 528, granularity, format)
    x *= 2.0 ** torch.randint(-20, 1, (528,))
    y, exact = kernel.linear(x.to(BF16), weight), x.to(BF16).double() @ weight.dequantize(torch.float32).double().t()
    assert (y.double() - exact).norm() <= 2.0**-8 * exact.norm()


def test_zeros():
    weight = Quantized(torch.zeros(100, 256).to(torch.float8_e4m3fn), torch.ones(1, 2))
    assert not kernel.linear(torch.randn(1, 256).to(BF16), weight).any()
    assert not kernel.linear(torch.zeros(1, 256, dtype=BF16), weight_of(100, 256)).any()


def test_every_byte():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        weight = Quantized(every[:, None].repeat(1, 16).contiguous(), torch.ones(256, 1))
        x = torch.zeros(1, 16, dtype=BF16)
        x[0, 15] = 1
        actual, finite = kernel.linear(x, weight)[0], every.float().isfinite()
        assert torch.equal(actual[finite].float(), every.float()[finite])
        assert torch.equal(actual.isnan(), finite.logical_not())  # 0 × ∞ is NaN
