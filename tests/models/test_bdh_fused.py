"""The fused BDH on the CPU, by the specification: loss and gradients, element-wise backward, fusing and undoing."""

import copy
import sysconfig
from pathlib import Path

import pytest
import torch
from bounds import cosine

from octavo import FP8TrainingConfig, fp8_autocast
from octavo.models.bdh import BDH, BDHConfig, fuse, rope, rope_angles, spec, unfuse

CONFIG = BDHConfig(dim=128, heads=4, neurons=1024, layers=6)
SMALL = BDHConfig(dim=32, heads=2, neurons=64, layers=2)


def batch(rows=4, length=64, seed=0):
    """Bytes with something to learn: each sequence counts up from a random byte."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.randint(256, (rows, 1), generator=generator) + torch.arange(length + 1)) % 256
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradient(model, tokens, context=None):
    model.zero_grad()
    if context is None:
        loss = model(*tokens)[1]
    else:
        with context:
            loss = model(*tokens)[1]
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().double() for p in model.parameters()])


def text_batch(seed, rows=8, length=128):
    """Windows of the standard library's source."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - length - 1, (rows,), generator=torch.Generator().manual_seed(seed))
    windows = torch.stack([text[i : i + length + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_against_fp32_and_autocast(scaling):
    """As good as the autocast: near FP32's gradient at the start, where it is hardest, and near the autocast's."""
    config = FP8TrainingConfig(scaling=scaling)
    tokens = text_batch(seed=1000, rows=2)
    torch.manual_seed(0)
    model = BDH(CONFIG)
    loss, gradient = loss_and_gradient(model, tokens)
    loss_autocast, gradient_autocast = loss_and_gradient(model, tokens, fp8_autocast(config))
    fuse(model, config)
    loss_fused, gradient_fused = loss_and_gradient(model, tokens)
    assert loss_fused == pytest.approx(loss, rel=0.01)
    assert loss_fused == pytest.approx(loss_autocast, rel=0.01)
    assert cosine(gradient_fused, gradient) > 0.97
    assert cosine(gradient_fused, gradient_autocast) > 0.97
    assert cosine(gradient_fused, gradient) > cosine(gradient_autocast, gradient) - 0.01


def test_element_wise_backward_is_that_of_autograd():
    B, T, H, N = 2, 5, 3, 8
    s_pre, t_pre = (torch.randn(B, T, H, N, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cos, sin = (angle.double() for angle in rope_angles(T, N, torch.device("cpu")))
    s, t = s_pre.relu(), t_pre.relu()
    q, z = rope(s.transpose(1, 2), cos, sin).transpose(1, 2), s * t
    torch.testing.assert_close(spec.relu_rope(s_pre, cos, sin), q)
    torch.testing.assert_close(spec.gate(s_pre, t_pre), z)
    dq, dz = torch.randn_like(q), torch.randn_like(z)
    ds, dt = torch.autograd.grad((q, z), (s_pre, t_pre), (dq, dz))
    torch.testing.assert_close(spec.relu_rope_backward(dq, dz, s, t, cos, sin), ds)
    torch.testing.assert_close(spec.gate_backward(dz, s, t), dt)


def test_one_product_with_the_symmetric_gradient_is_both():
    q = torch.randn(3, 7, 4, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 7, 7, dtype=torch.float64)
    (dq,) = torch.autograd.grad((q @ q.mT).tril(-1), q, g)
    torch.testing.assert_close(spec.symmetric(g) @ q, dq)
    torch.testing.assert_close(spec.causal(g), g.tril(-1))


@pytest.mark.parametrize("length", [1, 2, 33])
def test_any_length(length):
    model = BDH(SMALL)
    loss, gradient = loss_and_gradient(model, batch(3, length))
    fuse(model)
    loss_fused, gradient_fused = loss_and_gradient(model, batch(3, length))
    assert loss_fused == pytest.approx(loss, rel=0.01)
    assert cosine(gradient_fused, gradient) > 0.95


def test_the_model_stays_what_it_is():
    model = BDH(SMALL)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    logits = model(batch()[0])[0]
    fused = fuse(model)
    assert isinstance(model, BDH)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    model.load_state_dict(copy.deepcopy(model).state_dict())
    assert len(fused.report.in_fp8) == 5 * SMALL.layers
    assert [entry.name for entry in fused.report.not_in_fp8] == ["lm_head"]
    with pytest.raises(TypeError, match="fused already"):
        fuse(model)
    with torch.no_grad():  # as it was written
        torch.testing.assert_close(model(batch()[0])[0], logits, rtol=0, atol=0)
    assert (model(batch()[0])[0] != logits).any()
    unfuse(model)
    assert type(model) is BDH
    torch.testing.assert_close(model(batch()[0])[0], logits, rtol=0, atol=0)
    with pytest.raises(TypeError, match="not fused"):
        unfuse(model)


def test_training_lowers_the_loss_and_rolls_every_history():
    torch.manual_seed(0)
    model = BDH(SMALL)
    fused = fuse(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(20):
        loss = model(*batch(seed=step))[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    assert fused.scaling.state_dict()["_steps"].tolist() == [20] * len(fused.scaling.names)
    statistics = fused.scaling.statistics()
    assert {"encoder.w", "layers.0.encoder.x", "layers.1.scores.g", "layers.1.kept.t"} <= set(statistics)
    assert all(s["scale"] > 0 and s["saturated"] < 0.01 for s in statistics.values())


def test_head_in_fp8_on_request():
    model = BDH(SMALL)
    loss, gradient = loss_and_gradient(model, batch())
    fused = fuse(model, FP8TrainingConfig(skip=()))
    loss_fused, gradient_fused = loss_and_gradient(model, batch())
    assert loss_fused == pytest.approx(loss, rel=0.01) and cosine(gradient_fused, gradient) > 0.95
    assert not fused.report.not_in_fp8 and "lm_head.g" in fused.scaling.statistics()


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic):
    model = BDH(SMALL)
    fuse(model, "current")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (64, 48, 80):
        loss, gradient = loss_and_gradient(model, batch(length=length))
        loss_compiled, gradient_compiled = loss_and_gradient(compiled, batch(length=length))
        assert loss_compiled == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(gradient_compiled, gradient, rtol=1e-4, atol=1e-7)


def test_under_torch_autocast():
    model = BDH(SMALL)
    loss, gradient = loss_and_gradient(model, batch())
    fuse(model)
    loss_fused, gradient_fused = loss_and_gradient(model, batch(), torch.autocast("cpu", torch.bfloat16))
    assert loss_fused == pytest.approx(loss, rel=0.01) and cosine(gradient_fused, gradient) > 0.95


def test_frozen_weights_get_no_gradient():
    model = BDH(SMALL)
    fuse(model)
    model.encoder_v.requires_grad_(False)
    model(*batch())[1].backward()
    assert model.encoder_v.grad is None and model.encoder.grad.any() and model.decoder.grad.any()


def test_refusals():
    with pytest.raises(ValueError, match=r"granularity='block'.*fp8_autocast"):
        fuse(BDH(SMALL), FP8TrainingConfig.from_recipe("block"))
    with pytest.raises(ValueError, match=r"encoder.*fp8_autocast"):
        fuse(BDH(SMALL), FP8TrainingConfig(skip=("encoder",)))
    with pytest.raises(TypeError, match="Linear"):
        fuse(torch.nn.Linear(2, 2))
    model = BDH(BDHConfig(dim=32, heads=2, neurons=64, layers=2, dropout=0.1))
    fuse(model)
    with pytest.raises(RuntimeError, match=r"dropout=0.1.*fp8_autocast"):
        model(*batch())
    assert model.eval()(*batch())[1].isfinite()
    assert model.train().generate(batch()[0], 2).shape == (4, 66)


@pytest.mark.parametrize("factor", [2.0, 10.0, 1000.0])
def test_weights_that_jump_are_no_worse_off_than_with_current_scales(factor):
    errors = {}
    for scaling in ("delayed", "current"):
        torch.manual_seed(0)
        model = BDH(SMALL)
        fused = fuse(model, FP8TrainingConfig(scaling=scaling))
        for step in range(2):
            loss_and_gradient(model, batch(seed=step))
            fused.scaling.step()
        with torch.no_grad():
            for w in (model.encoder, model.encoder_v, model.decoder):
                w.mul_(factor)
        loss, gradient = loss_and_gradient(model, batch())
        saturated = max(actual["saturated"] for actual in fused.scaling.statistics().values())
        unfuse(model)
        exact_loss, exact = loss_and_gradient(model, batch())
        errors[scaling] = (abs(loss - exact_loss) / exact_loss, (gradient - exact).norm() / exact.norm(), saturated)
    assert errors["delayed"][0] <= 1.5 * errors["current"][0] + 1e-3 and errors["delayed"][2] == 0, errors
    assert errors["delayed"][1] <= 1.5 * errors["current"][1], errors
