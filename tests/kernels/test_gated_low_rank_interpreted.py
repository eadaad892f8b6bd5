"""The gated activation with adapters, and saved FP8 back in high precision, in Triton's interpreter."""

import pytest
import torch
from kernel_cases import assert_nearly_same, low_rank, sample, with_low_rank

from octavo.kernels.gated import low_rank as kernel
from octavo.kernels.quantize import dequantize as dequantizing
from octavo.numerics.activation import ACTIVATIONS, dequantize_gate_up, gated, gated_backward, save_gate_up
from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import Quantized, quantize

BF16 = torch.bfloat16


def low(*shape, **options):
    return kernel.Low(*low_rank(*shape, **options))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("m", "f", "gate_rank", "up_rank"), [(16, 128, 8, 8), (37, 256, 32, 0), (1, 128, 0, 20), (65, 384, 0, 0)]
)
@pytest.mark.parametrize("saves", [True, False])
def test_forward(m, f, gate_rank, up_rank, saves, activation):
    gate_up = sample(m, 2 * f, dtype=BF16).clamp(-30, 30)
    gate = low(m, f, gate_rank, 0.5) if gate_rank else None
    up = low(m, f, up_rank, 2.0) if up_rank else None
    assert kernel.can_gate(gate_up, f, gate, up)
    saved = Quantized(torch.empty(m, 2 * f, dtype=E4M3.dtype), torch.empty(m, 2 * f // 128, dtype=torch.uint8))
    h = kernel.gated(gate_up, gate, up, activation, saved if saves else None)
    halves = torch.cat([with_low_rank(gate_up[:, :f], gate), with_low_rank(gate_up[:, f:], up)], dim=1)
    expected = gated(halves, activation)
    assert h.dtype == BF16 and (h.float() - expected.float()).abs().max() <= 0.01 * expected.float().abs().max()
    assert (h != expected).float().mean() < 0.01  # sums in another order
    if saves:
        expected = save_gate_up(halves)
        assert torch.equal(saved.scale, expected.scale)
        mine, theirs = (x._replace(scale=saved.scale.float()) for x in (saved, expected))
        assert_nearly_same(mine, theirs, 5e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("m", "f", "rank"), [(16, 128, 8), (37, 256, 32), (5, 128, 0)])
@pytest.mark.parametrize("wanted", [True, False])
def test_backward(m, f, rank, wanted, activation):
    dh = torch.randn(m, f).to(BF16)
    saved = save_gate_up(sample(m, 2 * f).clamp(-30, 30))
    factor = torch.rand(2 * f) + 0.1 if rank else None
    product = low(m, f, rank, 1.0, transposed=False) if rank else None
    before = dh.clone()
    actual = kernel.gated_backward(dh, saved, product, activation, factor=factor, h=wanted)
    halves = dequantize_gate_up(saved)
    expected = gated_backward(with_low_rank(before, product, transposed=False), halves, activation)
    expected = expected if factor is None else expected * factor
    torch.testing.assert_close(actual.float(), expected, rtol=1e-2, atol=1e-2)
    assert (actual != expected.to(BF16)).float().mean() < 0.01
    if wanted:
        torch.testing.assert_close(dh, gated(halves, activation).to(BF16), rtol=1e-2, atol=1e-6)
    else:
        assert torch.equal(dh, before)


@pytest.mark.parametrize("shape", [(16, 128), (33, 300), (1, 64), (200, 260), (32, 70), (33, 128)])
@pytest.mark.parametrize(
    ("granularity", "block"), [("tensor", (1, 128)), ("channel", (1, 128)), ("block", (1, 128)), ("block", (128, 128))]
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_dequantize(shape, granularity, block, dtype):
    x = quantize(sample(*shape), format=E4M3, granularity=granularity, block=block)
    assert dequantizing.can_dequantize(x, dtype)
    assert torch.equal(dequantizing.dequantize(x, dtype), x.dequantize(dtype))


def test_what_they_leave_to_others():
    x = torch.zeros(4, 128, dtype=BF16)
    assert not kernel.can_gate(x.float(), 128) and not kernel.can_gate(x, 100)
    assert not kernel.can_gate(x, 128, kernel.Low(torch.zeros(4, 129), x))
    x_q = Quantized(torch.zeros(4, 128, dtype=E4M3.dtype), torch.ones(4, 2))
    assert not dequantizing.can_dequantize(x_q, BF16)
