"""Rows of a larger matrix by known scales, and maxima alone, in Triton's interpreter: equal to the specification."""

import pytest
import torch

from octavo.kernels import quantize as kernels
from octavo.kernels.quantize import by_scales
from octavo.numerics import E4M3, E5M2, compute_scale
from octavo.numerics.amax import block_amax, finite_amax
from octavo.numerics.quantize import mx_scale, quantize, quantize_by_groups

GROUPS = {
    "block": (128, 128),
    "channel columns": (None, 1),
    "channel rows": (1, None),
    "mx columns": (32, 1),
    "mx": (1, 32),
}


def scales_of(x, name, format):
    height, width = GROUPS[name]
    amax = block_amax(x, (height or x.shape[0], width or x.shape[1]))
    return mx_scale(amax, format) if name.startswith("mx") else (amax / format.max).clamp(min=1e-30)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(("format", "dtype"), [(E4M3, torch.bfloat16), (E5M2, torch.float32)], ids=["E4M3", "E5M2"])
def test_rows_of_a_larger_matrix(name, format, dtype):
    torch.manual_seed(0)
    x = torch.randn(300, 130).to(dtype)
    x[3, 5], x[200, 7], x[250:, :40] = float("nan"), float("-inf"), 0
    scale = scales_of(x, name, format)
    height, width = GROUPS[name]
    parts = []
    for first, last in ((0, 16), (16, 145), (145, 300)):
        rows = x[first:last]
        how = {"first": first, "height": height, "width": width}
        assert by_scales.can_quantize(rows, format, "nearest")
        actual = by_scales.quantize_by_groups(rows, scale, format, **how)
        expected = quantize_by_groups(rows, scale, format, **how)
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
        parts.append(expected.view(torch.uint8))
    if name == "block":  # the parts are the whole
        whole = quantize(x, format=format, granularity="block", block=(128, 128))
        own = compute_scale(x, format=format, granularity="block", block=(128, 128))
        again = quantize_by_groups(x, own, format, first=0, height=128, width=128)
        assert torch.equal(again.view(torch.uint8), whole.data.view(torch.uint8))


def test_what_the_kernel_leaves_to_the_specification():
    x = torch.ones(2, 2)
    assert not by_scales.can_quantize(x, E4M3, "stochastic")
    assert not by_scales.can_quantize(x[:0], E4M3, "nearest")
    assert not by_scales.can_quantize(x.double(), E4M3, "nearest")


@pytest.mark.parametrize("shape", [(1, 1), (300, 130), (64, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_maxima(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    x[shape[0] // 2, shape[1] // 2] = float("nan")
    assert kernels.can_measure(x) and not kernels.can_measure(x[:0])
    assert torch.equal(kernels.matrix_amax(x, by_column=False), finite_amax(x)[0].view(1))
    assert torch.equal(kernels.matrix_amax(x, by_column=True), block_amax(x, (shape[0], 1)).view(-1))
