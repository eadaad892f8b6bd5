"""The two kinds of scale: the factor that dequantises, and what `FP8ScalingManager.get_scale` returns."""

import copy
import pickle

import pytest
import torch
from numpy_fp8 import codes

import octavo
from octavo import FP8ScalingManager, compute_scale, dequantize, quantize, quantize_stochastic
from octavo.numerics.multiplier import Multiplier

AMAXES = [1e-6, 0.3, 1.0, 8.0, 448.0, 3000.0, 1e6]


def sample(amax):
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    return x / x.abs().max() * amax


def managed(x, **options):
    manager = FP8ScalingManager(margin=1.0, **options)
    manager.update_amax("x", x.abs().max())
    return manager


@pytest.mark.parametrize("amax", AMAXES)
def test_quantize_takes_what_get_scale_returns(amax):
    x = sample(amax)
    own, scale = quantize(x), managed(x).get_scale("x")
    for q in (quantize(x, scale), quantize(x, scale=scale), quantize(x, compute_scale(x)), quantize(x, own.scale)):
        assert (codes(q.data) == codes(own.data)).mean() > 0.999  # 1 / (448 / amax) may be off by a bit of FP32
        torch.testing.assert_close(q.scale, own.scale, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(dequantize(q), x, rtol=2.0**-4, atol=amax * 2.0**-9)
        assert torch.equal(dequantize(q), q.dequantize()) and torch.equal(dequantize(q), dequantize(q.data, q.scale))
    q = quantize(x, scale)
    assert torch.equal(dequantize(q.data, scale), dequantize(q))
    q = quantize_stochastic(x, scale, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(dequantize(q), x, rtol=2.0**-3, atol=amax * 2.0**-9)


def test_dequantize_returns_the_dtype_asked_for():
    q = quantize(sample(3.0))
    for actual in (dequantize(q, torch.bfloat16), dequantize(q, dtype=torch.bfloat16), dequantize(*q, torch.bfloat16)):
        assert actual.dtype == torch.bfloat16 and torch.equal(actual, q.dequantize(torch.bfloat16))
    with pytest.raises(TypeError, match=r"scale beside a Quantized.*dequantize\(q\)"):
        dequantize(q, q.scale)
    with pytest.raises(TypeError, match=r"scale is not given.*dequantize\(q\)"):
        dequantize(q.data)


@pytest.mark.parametrize("format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("amax", [1e-6, 0.3, 1.0, 1e6])
def test_a_multiplier_that_has_lost_its_type_is_refused(amax, format):
    x = sample(amax)
    manager = managed(x, format=format)
    scale = manager.get_scale("x")
    by_hand = octavo.numerics.get_format(format).max / x.abs().max()
    for lost in (scale.item(), torch.tensor(scale.item()), scale * torch.ones(()), by_hand, by_hand.reshape(1)):
        with pytest.raises(ValueError, match=r"scale=.* x / scale is out of E.M.'s range.*1 / multiplier"):
            quantize(x, lost, format=format)
        with pytest.raises(ValueError, match="get_scale"):
            quantize_stochastic(x, lost, format=format)
    assert not dequantize(quantize(x, 1 / by_hand, format=format)).isnan().any()


def test_where_looking_would_wait_it_is_nan(monkeypatch):
    """On a GPU, and while compiling."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = sample(1.0)
    assert dequantize(quantize(x, 448.0)).isnan().all()
    assert dequantize(quantize(x, 1 / 448.0)).isfinite().all()


def test_a_poor_scale_that_is_no_multiplier_does_what_it_does():
    """Saturating on purpose, by an outlier, or with a scale that has become too large."""
    x = sample(1.0)
    assert dequantize(quantize(x, 0.1 / 448)).abs().max() == pytest.approx(0.1)
    assert dequantize(quantize(x, 1.0)).abs().max() == 1.0
    assert dequantize(quantize(x * 1e-6, 10.0)).abs().max() == 0.0


def test_what_is_a_multiplier_still():
    m = managed(sample(2.0)).get_scale("x")
    for same in (
        *(m.clone(), m.detach(), m.cpu(), m.to("cpu"), m.float(), m.to(torch.float64), copy.deepcopy(m)),
        *(m * 2, 2 * m, m / 2, m.reshape(1), pickle.loads(pickle.dumps(m))),
    ):
        assert type(same) is Multiplier
    for other in (1 / m, m.reciprocal(), m * torch.ones(3), torch.ones(3) * m, m + 1, m == 224, torch.stack([m, m])):
        assert type(other) is torch.Tensor
    assert m == 224 and m.item() == 224 and 1 / m == 1 / torch.tensor(224.0)
    x = sample(2.0)
    assert torch.equal(quantize(x, 1 / m).data.float(), quantize(x, m).data.float())
    assert torch.equal(dequantize(quantize(x, m / 2)), dequantize(quantize(x, 2 / m)))
    w = torch.ones(3, requires_grad=True)
    (w * m).sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 224.0))
