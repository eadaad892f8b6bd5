"""Gradients applied within backward: the same weights, step by step, as with all gradients at once."""

import io

import pytest
import torch
from torch import nn

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.optim import OPTIMIZERS, build_optimizer, set_learning_rate, step_in_backward, steps_in_backward
from octavo.training.trainer import FP8Trainer


def small(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    model[0].weight.requires_grad_(True)
    return model


def batch(i):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(i))


def run(model, optimizer, steps=4, rates=()):
    for i in range(steps):
        if rates:
            set_learning_rate(optimizer, rates[i])
        model(batch(i)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_weights(name):
    rates = (1e-2, 5e-3, 2e-3, 1e-3)
    model = small()
    expected = run(model, build_optimizer(name, model.parameters(), 1e-2), rates=rates)
    model = small()
    optimizer = build_optimizer(name, model.parameters(), 1e-2)
    step_in_backward(optimizer)
    for found, wanted in zip(run(model, optimizer, rates=rates), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_no_more_than_one_gradient_at_a_time():
    model = small()
    optimizer = build_optimizer("adamw", model.parameters(), 1e-2)
    most, before = [], []

    def count(_parameter):
        most.append(sum(p.grad is not None for p in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    handle = step_in_backward(optimizer)
    assert steps_in_backward(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    model(batch(0)).sum().backward()
    assert max(most) == 1 and all(p.grad is None for p in model.parameters())
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    handle.remove()
    assert not steps_in_backward(optimizer)
    model(batch(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_groups_keep_their_own_rates_and_only_what_is_trained_moves():
    model = small()
    model[2].bias.requires_grad_(False)
    groups = [{"params": model[0].parameters(), "lr": 0.0, "weight_decay": 0.0}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    step_in_backward(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    run(model, optimizer, 1)
    same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert same == [True, True, False, True]


def test_hooks_of_the_step_run_once_a_step():
    model = small()
    optimizer = build_optimizer("adamw", model.parameters(), 1e-2)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    step_in_backward(optimizer)
    run(model, optimizer, 3)
    assert len(seen) == 3
    report = convert_to_fp8(model, FP8TrainingConfig())
    run(model, optimizer, 2)
    assert len(seen) == 5 and report.scaling is not None


def test_a_checkpoint_in_the_middle_goes_on_as_without_it():
    model = small()
    optimizer = build_optimizer("adamw8bit", model.parameters(), 1e-2)
    step_in_backward(optimizer)
    run(model, optimizer, 2)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved, states = torch.load(file, weights_only=True)
    expected = run(model, optimizer, 2)
    again = small(1)
    again.load_state_dict(saved)
    optimizer = build_optimizer("adamw8bit", again.parameters(), 1e-2)
    optimizer.load_state_dict(states)
    step_in_backward(optimizer)
    for found, wanted in zip(run(again, optimizer, 2), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_weight_used_twice_is_applied_once():
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.GELU(), shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = None
    for released in (False, True):
        torch.manual_seed(0)
        nn.init.normal_(shared.weight, std=0.1)
        nn.init.zeros_(shared.bias)
        handle = step_in_backward(optimizer) if released else None
        found = run(model, optimizer, 2)
        if handle is None:
            expected = found
        else:
            torch.testing.assert_close(found[0], expected[0])


def test_what_it_refuses():
    model = small()
    optimizer = build_optimizer("adamw", model.parameters(), 1e-2)
    step_in_backward(optimizer)
    with pytest.raises(ValueError, match="steps in backward already"):
        step_in_backward(optimizer)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        step_in_backward(torch.optim.SGD([torch.zeros(3)], lr=0.1))
    for options in ({"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}):
        fresh = small()
        with pytest.raises(ValueError, match=f"release_gradients=True with {next(iter(options))}"):
            FP8Trainer(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), release_gradients=True, **options)


def test_in_the_trainer():
    results = []
    for released in (False, True):
        model = small()
        optimizer = build_optimizer("adamw", model.parameters(), 1e-2)
        trainer = FP8Trainer(model, optimizer, loss_fn=nn.functional.mse_loss, release_gradients=released)
        for i in range(3):
            trainer.training_step((batch(i), batch(i + 1)))
        assert trainer.step == 3
        results.append([p.detach().clone() for p in model.parameters()])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted)
