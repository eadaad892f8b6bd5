"""Optimisers by name: they move every weight, their step hooks run once, their states survive a round trip exactly."""

import io
import sys

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.optim import LOW_BIT, OPTIMIZERS, build_optimizer, set_learning_rate


def make_parameters() -> list[nn.Parameter]:
    """One tensor that is large enough for low-bit states and one that is not."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 128), (7,))]


def run_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_follows_adamw(name: str) -> None:
    ours, exact, start = make_parameters(), make_parameters(), make_parameters()
    run_steps(build_optimizer(name, ours, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95)), ours, range(10))
    run_steps(torch.optim.AdamW(exact, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95)), exact, range(10))
    for a, b, before in zip(ours, exact, start, strict=True):
        moved, wanted = (a - before).flatten(), (b - before).flatten()
        # 4 bits of state: 16 levels for each of the two means; the direction holds, single entries do not.
        assert torch.cosine_similarity(moved, wanted, dim=0) > (0.93 if name == "adamw4bit" else 0.995)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_survive_a_round_trip_bit_for_bit(name: str) -> None:
    parameters = make_parameters()
    optimizer = build_optimizer(name, parameters, lr=0.01)
    run_steps(optimizer, parameters, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)

    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = build_optimizer(name, copies, lr=0.01)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run_steps(optimizer, parameters, range(3, 6))
    run_steps(resumed, copies, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(parameters, copies, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_hooks_run_once(name: str) -> None:
    """FP8 histories advance in such a hook, and would advance twice."""
    if name in LOW_BIT:
        import torchao.optim

        getattr(torchao.optim, LOW_BIT[name])(make_parameters())  # torch now wraps this class's own step as well
    parameters = make_parameters()
    optimizer = build_optimizer(name, parameters, lr=0.01)
    calls: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda which, *_: calls.append(which))
    try:
        run_steps(optimizer, parameters, range(2))
    finally:
        hook.remove()
    assert calls == [optimizer, optimizer]


@pytest.mark.parametrize("name", sorted(LOW_BIT))
def test_only_large_tensors_get_low_bit_states(name: str) -> None:
    parameters = make_parameters()
    optimizer = build_optimizer(name, parameters, lr=0.01)
    run_steps(optimizer, parameters, range(1))
    large, small = (optimizer.state[parameter]["exp_avg"] for parameter in parameters)
    assert type(large).__name__.startswith("OptimState") and type(small) is torch.Tensor


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learning_rate_can_change(name: str) -> None:
    parameters = make_parameters()
    optimizer = build_optimizer(name, parameters, lr=0.01)
    run_steps(optimizer, parameters, range(1))
    set_learning_rate(optimizer, 0.0)
    before = [parameter.detach().clone() for parameter in parameters]
    run_steps(optimizer, parameters, range(1))
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))


def test_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"optimizer='sgd': .*adamw, adamw8bit, adamw4bit, adamwfp8"):
        build_optimizer("sgd", make_parameters(), lr=0.1)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.optim", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install octavo\[optim\]"):
        build_optimizer("adamw4bit", make_parameters(), lr=0.1)
    assert build_optimizer("adamw", make_parameters(), lr=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_small_updates_of_bf16_weights_are_not_lost_with_stochastic_rounding(name: str) -> None:
    """An update of a 2,000th of a weight: to the nearest it is nothing."""
    moved = {}
    for stochastic in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
        optimizer = build_optimizer(name, [weight], lr=5e-4, weight_decay=0.0, stochastic_rounding=stochastic)
        for _ in range(4):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[stochastic] = 1 - weight.float().mean().item()
    assert moved[False] == 0 and abs(moved[True] - 4 * 5e-4) < 2e-4
