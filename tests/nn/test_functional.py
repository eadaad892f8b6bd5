"""`fp8_linear` and `fp8_matmul` train: their gradients are those of `FP8Linear`, whatever scales they are given."""

import pytest
import torch
from torch import nn

import octavo
from octavo import FP8Linear, FP8ScalingManager, FP8TrainingConfig, compute_scale, fp8_linear, fp8_matmul, quantize
from octavo.models import BDH, BDHConfig
from octavo.models.bdh import fuse


def randn(*shape, seed=0, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(**options)


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def off(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def gradients_of_fp8_linear_layer(x, w, bias, g, format):
    layer = FP8Linear(w.shape[1], w.shape[0], config=FP8TrainingConfig(fp8_format=format, scaling="current"))
    layer.weight, layer.bias = nn.Parameter(w.clone()), nn.Parameter(bias.clone())
    (x,) = leaves(x)
    y = layer(x)
    y.backward(g)
    return y, x.grad, layer.weight.grad, layer.bias.grad


def scales_of(how, x, w):
    manager = FP8ScalingManager(margin=1.0)
    manager.update_amax("x", x.abs().max())
    manager.update_amax("w", w.abs().max())
    return {
        "none": (None, None),
        "get_scale": (manager.get_scale("x"), manager.get_scale("w")),
        "compute_scale": (compute_scale(x), compute_scale(w)),
        "number": (compute_scale(x).item(), compute_scale(w).item()),
    }[how]


@pytest.mark.parametrize("how", ["none", "get_scale", "compute_scale", "number"])
@pytest.mark.parametrize("format", ["HYBRID", "E4M3", "E5M2"])
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
def test_fp8_linear_is_fp8linear_forward_and_backward(how, format, lead):
    x, w, bias, g = randn(*lead, 40, seed=1), randn(7, 40, seed=2), randn(7, seed=3), randn(*lead, 7, seed=4)
    expected = gradients_of_fp8_linear_layer(x, w, bias, g, format)
    mine = leaves(x, w, bias)
    scale_x, scale_w = scales_of(how, x, w) if format != "E5M2" or how == "none" else (None, None)
    y = fp8_linear(mine[0], mine[1], scale_x, scale_w, mine[2], format=format)
    y.backward(g)
    for actual, right in zip((y, *(leaf.grad for leaf in mine)), expected, strict=True):
        assert actual.shape == right.shape and actual.dtype == right.dtype
        # Scales from get_scale may be off by a bit of FP32, and a value on a tie then goes to the other side.
        assert off(actual, right) < (1e-6 if how == "none" else 2e-2)


@pytest.mark.parametrize("how", ["none", "get_scale"])
def test_fp8_matmul_trains_in_any_batch(how):
    for shape_a, shape_b in (((5, 150), (150, 7)), ((2, 3, 5, 40), (3, 40, 33)), ((4, 5, 16), (16, 8))):
        a, b = leaves(randn(*shape_a, seed=1), randn(*shape_b, seed=2))
        y = fp8_matmul(a, b, *scales_of(how, a, b))
        g = randn(*y.shape, seed=3)
        y.backward(g)
        right_a, right_b = leaves(a.detach(), b.detach())
        right = right_a @ right_b
        right.backward(g)
        # Each operand is within 2^-4 relative (E5M2: 2^-3): a tenth of the size at most; a missing term is far more.
        for actual, expected in ((y, right), (a.grad, right_a.grad), (b.grad, right_b.grad)):
            assert actual.shape == expected.shape and 1e-4 < off(actual, expected) < 0.1


def test_a_training_loop_by_hand_learns_as_well_as_in_high_precision():
    """The script that people bring: a manager, an amax a step, `fp8_linear` with both scales."""
    x, target = randn(64, 32, seed=1), randn(64, 8, seed=2)
    losses = {}
    for fp8 in (True, False):
        w = nn.Parameter(randn(8, 32, seed=3) / 32**0.5)
        manager, optimizer = FP8ScalingManager(history_len=4), torch.optim.SGD([w], lr=0.5)
        for _ in range(30):
            manager.update_amax("x", x.abs().max())
            manager.update_amax("w", w.abs().max())
            y = fp8_linear(x, w, manager.get_scale("x"), manager.get_scale("w")) if fp8 else x @ w.T
            loss = (y - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[fp8] = loss.item()
    assert losses[True] == pytest.approx(losses[False], rel=0.01)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "mx"])
def test_beside_fp8_data_the_other_operand_trains(granularity):
    x, w = randn(4, 3, 160, seed=1), randn(48, 160, seed=2)
    g = randn(4, 3, 48, seed=3)
    x_q, w_q = quantize(x, granularity=granularity), quantize(w, granularity=granularity)
    (mine,) = leaves(x)
    fp8_linear(mine, w_q.data, x_q.scale, w_q.scale).backward(g)
    assert off(mine.grad, g @ w) < 0.1
    (mine,) = leaves(w)
    fp8_linear(x_q.data, mine, x_q.scale, w_q.scale).backward(g)
    assert off(mine.grad, g.flatten(0, 1).T @ x.flatten(0, 1)) < 0.1
    mine = leaves(x, w)
    fp8_linear(*mine, x_q.scale, w_q.scale).backward(g)
    assert off(mine[0].grad, g @ w) < 0.1 and off(mine[1].grad, g.flatten(0, 1).T @ x.flatten(0, 1)) < 0.1


def test_scales_of_different_kinds_go_together():
    x, w = randn(6, 40, seed=1), randn(7, 40, seed=2)
    manager = FP8ScalingManager(margin=1.0)
    manager.update_amax("x", x.abs().max())
    for scale_w in (None, compute_scale(w), quantize(w, granularity="channel").scale):
        assert off(fp8_linear(x, w, manager.get_scale("x"), scale_w), x @ w.T) < 0.06
    w_q = quantize(w)
    assert off(fp8_linear(x, w_q.data, manager.get_scale("x"), w_q.scale), x @ w.T) < 0.06
    assert off(fp8_linear(x, w_q.data, None, w_q.scale), x @ w.T) < 0.06


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_have_the_dtypes_of_what_they_are_of(dtype):
    x, w, bias = leaves(randn(4, 16, dtype=dtype), randn(8, 16), randn(8))
    y = fp8_linear(x, w, None, None, bias)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype and w.grad.dtype == bias.grad.dtype == torch.float32
    a, b = leaves(randn(4, 16, dtype=dtype), randn(16, 8))
    fp8_matmul(a, b).sum().backward()
    assert a.grad.dtype == dtype and b.grad.dtype == torch.float32


def test_empty_inputs_keep_the_graph():
    x, w = leaves(torch.zeros(0, 16), randn(8, 16))
    assert fp8_linear(x, w).shape == (0, 8) and fp8_matmul(x, w.T).shape == (0, 8)
    fp8_linear(x, w).sum().backward()
    assert not w.grad.any()


def test_it_compiles():
    x, w = randn(4, 16), randn(8, 16).requires_grad_()
    compiled = torch.compile(lambda x, w: fp8_linear(x, w).square().sum(), backend="aot_eager", fullgraph=True)
    compiled(x, w).backward()
    actual, w.grad = w.grad, None
    fp8_linear(x, w).square().sum().backward()
    assert torch.equal(actual, w.grad)


def test_a_multiplier_in_the_place_of_a_factor_gives_nan_where_looking_would_wait(monkeypatch):
    """As on a GPU."""
    x, w = randn(4, 16), randn(8, 16)
    right = fp8_linear(x, w, compute_scale(x), compute_scale(w)), fp8_matmul(x, w.T, compute_scale(x))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(fp8_linear(x, w, compute_scale(x), compute_scale(w)), right[0])
    assert torch.equal(fp8_matmul(x, w.T, compute_scale(x)), right[1])
    assert fp8_linear(x, w, None, 448 / w.abs().max()).isnan().all()
    assert fp8_matmul(x, w.T, (448 / x.abs().max()).item()).isnan().all()


def test_what_is_refused():
    x, w = randn(4, 16), randn(8, 16)
    with pytest.raises(ValueError, match=r"scale_w=.*x / scale_w is out of E4M3's range.*1 / multiplier"):
        fp8_linear(x, w, compute_scale(x), 448 / w.abs().max())
    with pytest.raises(ValueError, match=r"scale_b=.*1 / multiplier"):
        fp8_matmul(x, w.T, None, (448 / w.abs().max()).item())
    with pytest.raises(ValueError, match="format='E3M4': choose one of HYBRID, E4M3"):
        fp8_linear(x, w, format="E3M4")
    with pytest.raises(ValueError, match=r"scale_w is not given: torch\.float8_e4m3fn"):
        fp8_linear(x, quantize(w).data)
    with pytest.raises(TypeError, match="float8_e4m3fn data in fp8_matmul"):
        fp8_matmul(x, quantize(w).data.T, None, 1.0)
    with pytest.raises(ValueError, match=r"fp8_linear takes x\[..., K\] and w\[N, K\]"):
        fp8_linear(x, w.T)
    with pytest.raises(ValueError, match="granularity='channel' with a scale"):
        fp8_matmul(x, w.T, 1.0, granularity="channel")


def test_the_manager_is_where_scripts_look_for_it():
    model = nn.Sequential(nn.Linear(16, 16))
    report = octavo.convert_to_fp8(model)
    assert report.scaling_manager is report.scaling is model[0].scaling_manager
    context = octavo.fp8_autocast()
    assert context.scaling_manager is context.scaling
    trainer = octavo.FP8Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=nn.functional.mse_loss)
    assert trainer.scaling_manager is trainer.scaling is report.scaling
    fused = fuse(BDH(BDHConfig(dim=16, heads=2, neurons=32, layers=1)))
    assert fused.scaling_manager is fused.scaling
