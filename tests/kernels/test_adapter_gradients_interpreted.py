"""Adapters in Triton's interpreter: what they add, and the way back through them."""

import pytest
import torch
from kernel_cases import adapter_gradients, sample

from octavo.kernels.adapters import gradients as kernel
from octavo.kernels.adapters import outputs as adding
from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import Quantized, quantize

BF16 = torch.bfloat16


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("of_b", [False, True])
@pytest.mark.parametrize(
    ("m", "spans", "rank"),
    [
        (64, [(0, 128)], 32),
        (130, [(0, 300), (300, 100), (400, 64)], 16),
        (200, [(0, 256), (512, 128)], 8),  # nothing in between
        (5, [(0, 64)], 20),
    ],
)
def test_gradients(m, spans, rank, fold, of_b):
    spans = [(first, size, 0.5 + i) for i, (first, size) in enumerate(spans)]
    width = sum(spans[-1][:2])
    g, t = torch.randn(m, width).to(BF16), torch.randn(m, rank * len(spans)).to(BF16)
    ups = [torch.randn(size, rank).to(BF16) for _, size, _ in spans]
    factor = torch.rand(width) + 0.5 if fold else None
    assert kernel.can_multiply(g, ups)
    u, d = torch.zeros(m, rank * len(spans)), torch.zeros(sum(up.numel() for up in ups))
    for _ in range(2):
        kernel.add_gradients(g, t, ups, spans, factor, u, d if of_b else None)
    expected = adapter_gradients(g, t, ups, spans, factor)
    torch.testing.assert_close(u / 2, expected[0], rtol=0, atol=4e-3 * expected[0].abs().max().item())
    if of_b:
        torch.testing.assert_close(d / 2, expected[1], rtol=1e-4, atol=1e-4)
    else:
        assert not d.any()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize(
    ("m", "spans", "rank"),
    [
        (64, [(0, 128)], 32),
        (130, [(0, 300), (300, 100), (400, 64)], 8),
        (5, [(0, 64)], 20),
        (64, [(0, 100)], 8),  # one side alone in whole tiles
        (33, [(0, 128)], 8),
    ],
)
def test_outputs(m, spans, rank, residual, in_fp32):
    spans = [(first, size, 0.5 + i) for i, (first, size) in enumerate(spans)]
    residual = torch.randn(m, sum(spans[-1][:2])).to(BF16) if residual else None
    y, t = torch.randn(m, sum(spans[-1][:2])).to(BF16), torch.randn(m, rank * len(spans)).to(BF16)
    ups = [torch.randn(size, rank).to(BF16) for _, size, _ in spans]
    assert adding.can_add(y, ups, spans, residual, transposed=True) == (residual is None or len(spans) == 1)
    expected = y.float() + (0 if residual is None else residual)
    for i, ((first, size, scaling), up) in enumerate(zip(spans, ups, strict=True)):
        expected[:, first : first + size] += scaling * t[:, i * rank : (i + 1) * rank].float() @ up.float().T
    if adding.can_add(y, ups, spans, residual, transposed=True):
        adding.add_outputs(y, t.float() if in_fp32 else t, ups, spans, residual, transposed=True)
        torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


def test_inputs():
    dx, u, a = (torch.randn(*shape).to(BF16) for shape in ((37, 200), (37, 96), (96, 200)))
    span = [(0, 200, 1.0)]
    assert adding.can_add(dx, [a], span, None, transposed=False)
    expected = dx.float() + u.float() @ a.float()
    adding.add_outputs(dx, u, [a], span, None, transposed=False)
    torch.testing.assert_close(dx.float(), expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize(
    ("m", "k", "ranks"), [(64, 128, 32), (130, 300, 96), (37, 200, 8), (128, 200, 8), (130, 256, 8)]
)
def test_down(m, k, ranks, granularity):
    x = quantize(sample(m, k).clamp(-100, 100), format=E4M3, granularity=granularity, block=(1, 128))
    u, d = torch.randn(m, ranks).to(BF16), torch.zeros(ranks, k)
    assert kernel.can_multiply_saved(x, u, BF16)
    for left in (u, u.float()):
        kernel.add_down(left, x, d, BF16)
    expected = u.float().T @ x.dequantize(torch.float32)
    torch.testing.assert_close(d / 2, expected, rtol=0, atol=4e-3 * expected.abs().max().item())


def test_what_they_leave_to_others():
    g, up = torch.zeros(4, 64, dtype=BF16), torch.zeros(64, 8, dtype=BF16)
    assert not kernel.can_multiply(g.float(), [up]) and not kernel.can_multiply(g, [])
    assert not kernel.can_multiply(g, [up] * 4) and not kernel.can_multiply(g, [up, up[:, :4]])
    assert not kernel.can_multiply(g, [torch.zeros(64, 65, dtype=BF16)]) and not kernel.can_multiply(g.t(), [up])
    assert not adding.can_add(g.float(), [up], [(0, 64, 1.0)], None, transposed=True)
    assert not adding.can_add(g, [up, up[:, :4]], [(0, 32, 1.0), (32, 32, 1.0)], None, transposed=True)
    assert not adding.can_add(g, [up, up], [(0, 64, 1.0), (0, 64, 1.0)], None, transposed=True)  # both at once
    x = Quantized(torch.zeros(4, 64, dtype=E4M3.dtype), torch.ones(()))
    assert not kernel.can_multiply_saved(x, torch.zeros(4, 257), BF16)
    assert not kernel.can_multiply_saved(x, torch.zeros(4, 8), torch.float32)


def test_deterministic_algorithms_do_without_atomics(monkeypatch):
    """Programs add up in any order, so where the user wants the same bits twice, products do it instead."""
    from octavo.ops import adapters

    def refuse(*_):
        raise AssertionError("a kernel that adds up in any order")

    monkeypatch.setattr(adapters, "has_fp8_tensor_cores", lambda _: True)
    up, down = torch.randn(64, 8).to(BF16), torch.randn(8, 128).to(BF16)
    of = adapters.Adapters((adapters.Adapter(0, 64, 0.5),), (down,), (up,))
    g, t, x = torch.randn(32, 64).to(BF16), torch.randn(32, 8).to(BF16), torch.randn(32, 128)
    saved = quantize(x, granularity="channel")
    assert adapters.AdapterGradients(of, g, needs_a=True, needs_b=True)._u is not None
    for name in ("add_gradients", "add_down"):
        monkeypatch.setattr(kernel, name, refuse)
    torch.use_deterministic_algorithms(True)
    try:
        gradients = adapters.AdapterGradients(of, g, needs_a=True, needs_b=True)
        u = gradients.grad_projected(g, t)
        gradients.add_a(u, saved)
        da, db = gradients.result()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(u, 0.5 * g @ up)
    torch.testing.assert_close(db.view(64, 8).float(), 0.5 * g.float().t() @ t.float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(da.float(), u.float().t() @ saved.dequantize(torch.float32), rtol=0.02, atol=0.2)
