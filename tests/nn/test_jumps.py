"""Delayed scaling is safe: values that jump are quantised by what they are, not by what they were."""

import copy

import pytest
import torch
from jump_cases import CASES, FACTORS, assert_no_worse_than_current, errors
from torch import nn

from octavo import FP8TrainingConfig, convert_to_fp8, fp8_autocast
from octavo.numerics.scaling import SCALE


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("kind", "what"), CASES)
def test_a_jump_costs_no_accuracy(kind, what, factor, train):
    assert_no_worse_than_current(kind, what, factor, train)


@pytest.mark.parametrize("format", ["E4M3", "E5M2"])
def test_other_formats(format):
    assert_no_worse_than_current("linear", "x", 1000.0, True, format=format)


def test_loaded_weights_and_updates_by_hand():
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    report = convert_to_fp8(model)
    x = torch.randn(16, 32)
    model(x).sum().backward()
    report.scaling.step()
    larger = {name: 40 * w for name, w in model.state_dict().items()}
    model.load_state_dict(larger)
    expected = x @ larger["0.weight"].T
    for train in (False, True):
        with torch.set_grad_enabled(train):
            assert (model(x) - expected).norm() < 0.05 * expected.norm()
    with torch.no_grad():
        model[0].weight -= 1e5  # an update without an optimiser
    expected = x @ model[0].weight.detach().T
    assert (model(x) - expected).norm() < 0.05 * expected.norm()


def test_another_product_in_the_same_slot():
    """Products are told apart by their order: one that takes another's place finds its scale."""
    context = fp8_autocast()
    small, large = torch.randn(16, 32) / 100, torch.randn(16, 32) * 100
    w = nn.Parameter(torch.randn(32, 24))
    for x in (small, large, small / 1e6):
        with context:
            y = x @ w
        expected = x @ w
        assert (y - expected).norm() < 0.05 * expected.norm()
        y.sum().backward()
        context.scaling.step()


def test_values_that_shrink_underflow_for_as_long_as_the_history_remembers():
    steps = 4
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    report = convert_to_fp8(model, FP8TrainingConfig(amax_history_len=steps))
    x = torch.randn(64, 32)
    model(x).sum().backward()
    report.scaling.step()
    report.scaling.statistics()
    underflow = []
    for _ in range(steps + 1):
        model(x / 1000).sum().backward()
        report.scaling.step()
        actual = report.scaling.statistics()["0.x"]
        underflow.append(actual["underflow"])
        assert actual["rescaled"] == actual["saturated"] == 0
    assert all(share > 0.002 for share in underflow[:steps]) and underflow[steps] < 1e-4, underflow


@pytest.mark.parametrize("algorithm", ["max", "most_recent", "ema"])
def test_backward_multiplies_by_the_weights_that_forward_had(algorithm):
    """A step between forward and backward moves the scale; what forward quantised is what backward reads."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    report = convert_to_fp8(model, FP8TrainingConfig(amax_compute_algo=algorithm))
    gradients = []
    for step_between in (False, True):
        x = torch.ones(16, 32, requires_grad=True)
        with torch.no_grad():
            model[0].weight.copy_(torch.linspace(-3, 3, 1024).view(32, 32) * 50**step_between)
        y = model(x)
        if step_between:
            report.scaling.step()
            model[0].state_w[SCALE] = 1e-6
        y.sum().backward()
        gradients.append(x.grad / 50**step_between)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


def _model(head):
    return nn.Sequential(nn.Sequential(nn.Linear(32, 32, bias=False)), head)


@pytest.mark.parametrize("replace", ["deepcopy", "body in another model"])
def test_histories_follow_a_model_that_is_replaced(replace):
    model = _model(nn.Identity())
    scaling = convert_to_fp8(model).scaling
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
    if replace == "deepcopy":
        other = copy.deepcopy(model)
        scaling = other[0][0].scaling
    else:
        other = _model(nn.Linear(32, 4))
        other[0] = model[0]
    del model, optimizer
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-3)
    before = scaling.state_dict()["_steps"].clone()
    for _ in range(3):
        other(8 * torch.randn(8, 32)).sum().backward()
        optimizer.step()
    assert (scaling.state_dict()["_steps"] == before + 3).all()


def test_the_cases_can_tell(monkeypatch):
    """With a scale that always serves, as it was once, a jump costs nearly everything."""
    monkeypatch.setattr("octavo.numerics.operand.holds", lambda scale, *_: scale > 0)
    actual, _ = errors("linear", "delayed", "x", 10.0, False)
    assert actual[0] > 0.5
