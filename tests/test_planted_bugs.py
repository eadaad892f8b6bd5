"""The checks can fail: four bugs, planted one at a time, each caught by the check that guards against it."""

import pytest
import torch
from bounds import assert_product_close
from torch import nn

from octavo import FP8Linear, fp8_autocast, ops
from octavo.numerics import FP8ScalingManager, Quantized


def check_product():
    """Values and gradients of `x @ w` for a square weight."""
    x, w = torch.randn(32, 32, requires_grad=True), nn.Parameter(torch.randn(32, 32))
    with fp8_autocast():
        y = x @ w
    g = torch.randn_like(y)
    y.backward(g)
    assert_product_close(y, x, w)
    assert_product_close(x.grad, g, w.mT, "E5M2", "E4M3")
    assert w.grad is not None
    assert_product_close(w.grad, x.mT, g, "E4M3", "E5M2")


def check_history():
    layer = FP8Linear(16, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for scale in (1.0, 2.0, 3.0):
        layer(scale * torch.ones(4, 16)).sum().backward()
        optimizer.step()
    assert layer.scaling.state_dict()["_history"][0, :4].tolist() == [3, 2, 1, 0]


def test_the_checks_pass_without_a_bug():
    check_product()
    check_history()


@pytest.mark.parametrize("wrong", [1.13, 0.5, 2.0])
def test_wrong_scale(monkeypatch, wrong):
    """Off by a power of two, or by little more than one rounding step."""
    honest = ops.quantize

    def quantize(*args, **kwargs):
        return [Quantized(q.data, q.scale * wrong) for q in honest(*args, **kwargs)]

    monkeypatch.setattr(ops, "quantize", quantize)
    with pytest.raises(AssertionError, match="times the bound"):
        check_product()


def test_wrong_transpose(monkeypatch):
    """The weight of `x @ w` taken as that of a linear."""
    import octavo.nn.product as product

    honest = product.ProductSpec
    monkeypatch.setattr("octavo.nn.autocast.ProductSpec", lambda **options: honest(**{**options, "b_is_nk": True}))
    with pytest.raises(AssertionError, match="times the bound"):
        check_product()


def test_dropped_gradient(monkeypatch):
    import octavo.nn.product as product

    honest = product._FP8Product.backward
    dropped = staticmethod(lambda ctx, g: (honest(ctx, g)[0], None, *honest(ctx, g)[2:]))
    monkeypatch.setattr(product._FP8Product, "backward", dropped)
    with pytest.raises(AssertionError):
        check_product()


def test_history_advanced_twice(monkeypatch):
    honest = FP8ScalingManager._roll

    def twice(self):
        before = [state.clone() for state in self.states]
        honest(self)
        for state, old in zip(self.states, before, strict=True):
            state[1:3] = old[1:3]
        honest(self)

    monkeypatch.setattr(FP8ScalingManager, "_roll", twice)
    with pytest.raises(AssertionError):
        check_history()
