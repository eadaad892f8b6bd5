"""Gradients applied within backward: the same weights, step by step, as with all gradients at once."""

import io

import pytest
import torch
from torch import nn

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.optim import (
    OPTIMIZERS,
    build_optimizer,
    offload_states,
    set_learning_rate,
    step_in_backward,
    steps_in_backward,
)
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


def released(optimizer):
    step_in_backward(optimizer)


def released_and_offloaded(optimizer):
    step_in_backward(optimizer, offload=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", [released, released_and_offloaded, offload_states])
def test_the_same_weights(name, how):
    rates = (1e-2, 5e-3, 2e-3, 1e-3)
    model = small()
    expected = run(model, build_optimizer(name, model.parameters(), 1e-2), rates=rates)
    model = small()
    optimizer = build_optimizer(name, model.parameters(), 1e-2)
    how(optimizer)
    for actual, wanted in zip(run(model, optimizer, rates=rates), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-7)


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


@pytest.mark.parametrize("how", [released, released_and_offloaded, offload_states])
def test_a_checkpoint_in_the_middle_goes_on_as_without_it(how):
    model = small()
    optimizer = build_optimizer("adamw8bit", model.parameters(), 1e-2)
    how(optimizer)
    run(model, optimizer, 2)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved, states = torch.load(file, weights_only=True)
    expected = run(model, optimizer, 2)
    again = small(1)
    again.load_state_dict(saved)
    optimizer = build_optimizer("adamw8bit", again.parameters(), 1e-2)
    how(optimizer)
    optimizer.load_state_dict(states)
    for actual, wanted in zip(run(again, optimizer, 2), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_a_weight_used_twice_is_applied_once():
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.GELU(), shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = None
    for early in (False, True):
        torch.manual_seed(0)
        nn.init.normal_(shared.weight, std=0.1)
        nn.init.zeros_(shared.bias)
        handle = step_in_backward(optimizer) if early else None
        actual = run(model, optimizer, 2)
        if handle is None:
            expected = actual
        else:
            torch.testing.assert_close(actual[0], expected[0])


def test_what_it_refuses():
    model = small()
    optimizer = build_optimizer("adamw", model.parameters(), 1e-2)
    step_in_backward(optimizer)
    with pytest.raises(ValueError, match="steps in backward already"):
        step_in_backward(optimizer)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        step_in_backward(torch.optim.SGD([torch.zeros(3)], lr=0.1))
    with pytest.raises(ValueError, match=r"AdamW steps parameters of this SGD in backward; call remove\(\)"):
        step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    for options in ({"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}):
        fresh = small()
        with pytest.raises(ValueError, match=f"release_gradients=True with {next(iter(options))}"):
            FP8Trainer(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), release_gradients=True, **options)


def test_what_can_be_offloaded():
    model = small()
    with pytest.raises(ValueError, match="offload='weights': 'optimizer'"):
        FP8Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), offload="weights")


def test_in_the_trainer():
    results = []
    for early, offload in ((False, None), (True, None), (True, "optimizer"), (False, "optimizer")):
        model = small()
        optimizer = build_optimizer("adamw", model.parameters(), 1e-2)
        trainer = FP8Trainer(model, optimizer, loss_fn=nn.functional.mse_loss, release_gradients=early, offload=offload)
        for i in range(3):
            trainer.training_step((batch(i), batch(i + 1)))
        assert trainer.step == 3
        results.append([p.detach().clone() for p in model.parameters()])
    for other in results[1:]:
        for actual, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(actual, wanted)


def test_states_are_in_host_copies_of_their_own_between_steps():
    model = small()
    optimizer = build_optimizer("adamw8bit", model.parameters(), 1e-2)
    states = step_in_backward(optimizer, offload=True).states
    run(model, optimizer, 1)
    weight = model[0].weight
    codes = optimizer.state[weight]["exp_avg"].codes
    run(model, optimizer, 2)
    assert optimizer.state[weight]["exp_avg"].codes is codes and len(states._after) == 4
    assert optimizer.state[weight]["step"] == 3


def test_offloading_twice_is_refused():
    model = small()
    optimizer = build_optimizer("adamw", model.parameters(), 1e-2)
    step_in_backward(optimizer)
    with pytest.raises(ValueError, match=r"step_in_backward\(optimizer, offload=True\)"):
        offload_states(optimizer)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_parameters_come_round_soon(count):
    results = []
    for offload in (False, True):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(count)]
        optimizer = build_optimizer("adamw", weights, 1e-2)
        step_in_backward(optimizer, offload=offload)
        for i in range(4):
            sum((weight @ batch(i).T).square().mean() for weight in weights).backward()
            optimizer.step()
        results.append([weight.detach().clone() for weight in weights])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("how", [released, released_and_offloaded, offload_states])
def test_rates_set_after_a_checkpoint_was_loaded_count(how):
    model = small()
    optimizer = build_optimizer("adamw", model.parameters(), 1e-2)
    how(optimizer)
    run(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    set_learning_rate(optimizer, 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    run(model, optimizer, 1)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_undone_with_its_states():
    model = small()
    optimizer = build_optimizer("adamw8bit", model.parameters(), 1e-2)
    handle = step_in_backward(optimizer, offload=True)
    run(model, optimizer, 1)
    codes = optimizer.state[model[0].weight]["exp_avg"].codes
    handle.remove()
    assert optimizer.state[model[0].weight]["exp_avg"].codes is not codes
    for i in (1, 2):
        model(batch(i)).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    plain = small()
    expected = run(plain, build_optimizer("adamw8bit", plain.parameters(), 1e-2), 3)
    for actual, exact in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(actual, exact)


def test_several_processes_are_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(small())
        with pytest.raises(ValueError, match="applied before they are averaged"):
            FP8Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), release_gradients=True)
    finally:
        torch.distributed.destroy_process_group()
