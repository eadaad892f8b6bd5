"""The product of few tokens: against float64, and against the product with a dequantised weight, within bounds."""

import pytest
import torch

from octavo.numerics import few_tokens as spec
from octavo.numerics.activation import ACTIVATIONS
from octavo.numerics.few_tokens import Low
from octavo.numerics.norm import Norm, rms_norm
from octavo.numerics.quantize import quantize

BF16 = torch.bfloat16


def weight_of(n, k, granularity, format="E4M3"):
    return quantize(torch.randn(n, k) / k**0.5, format=format, granularity=granularity, block=(128, 128))


def low(first, last, k, rank=8):
    return Low(first, last, 0.7, torch.randn(rank, k) / k**0.5, torch.randn(last - first, rank))


def exact(x, weight, adapters, bias, residual, dtype):
    """The result in float64, the magnitudes of all that is added up for it, and those of the adapters' part."""
    x, w = x.double(), weight.dequantize(torch.float32).double()
    total, high, high_added = x @ w.t(), x.abs() @ w.abs().t(), torch.zeros(len(x), len(w), dtype=torch.float64)
    for first, last, scaling, down, up in adapters:
        a, b = down.to(dtype).double(), up.to(dtype).double()
        total[:, first:last] += scaling * (x @ a.t()) @ b.t()
        high_added[:, first:last] += scaling * (x.abs() @ a.abs().t()) @ b.abs().t()
    return total + bias.double() + residual.double(), high, high_added


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
def test_linear_against_float64(granularity, format, dtype):
    x, weight = torch.randn(7, 300).to(dtype), weight_of(150, 300, granularity, format)
    adapters, bias, residual = [low(0, 90, 300), low(40, 150, 300)], torch.randn(150), torch.randn(7, 150).to(dtype)
    y = spec.linear(x, weight, adapters, bias=bias, residual=residual)
    expected, high, high_added = exact(x, weight, adapters, bias, residual, dtype)
    u = torch.finfo(dtype).eps / 2
    bound = 300 * 2.0**-24 * (high + high_added) + u * (high_added + 1.01 * expected.abs())
    assert y.dtype == dtype
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
def test_nearer_than_by_a_dequantised_weight(granularity):
    x, weight, u = torch.randn(16, 512).to(BF16), weight_of(128, 512, granularity), 2.0**-9
    expected = x.double() @ weight.dequantize(torch.float32).double().t()
    high = x.double().abs() @ weight.dequantize(torch.float32).double().abs().t()
    few = spec.linear(x, weight).double()
    by_dequantised = (x @ weight.dequantize(BF16).t()).double()
    bound = (u + 512 * 2.0**-24) * high + 3 * u * expected.abs()
    assert ((few - expected).abs() <= bound - u * high).all() and ((by_dequantised - expected).abs() <= bound).all()
    assert (few - expected).norm() < (by_dequantised - expected).norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlp_is_two_linears_around_an_activation(activation):
    x, norm = torch.randn(5, 144), Norm(torch.rand(144), 1e-5)
    gate_up, down = weight_of(400, 144, "channel"), weight_of(144, 200, "channel")
    adapters, adapters_down = [low(0, 200, 144), low(200, 400, 144)], [low(0, 144, 200)]
    y = spec.gated_mlp(x, gate_up, down, activation, adapters, adapters_down, residual=x, norm=norm)
    gate, up = spec.linear(rms_norm(x, norm)[0], gate_up, adapters).chunk(2, dim=-1)
    h = ACTIVATIONS[activation](gate)[0] * up
    torch.testing.assert_close(y, spec.linear(h, down, adapters_down, residual=x))


def test_tokens_do_not_depend_on_each_other():
    x, weight, adapters = torch.randn(6, 144).to(BF16), weight_of(130, 144, "block"), [low(0, 130, 144)]
    x[2, 5] = float("nan")
    y = spec.linear(x, weight, adapters)
    assert y[2].isnan().all() and y[[0, 1, 3, 4, 5]].isfinite().all()
