"""Optimisers by name: they move every weight, their step hooks run once, their states survive a round trip exactly."""

import copy
import io
import sys
from typing import Any

import pytest
import torch
from allocations import allocated
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_and_names_as_torch_takes_them(name: str) -> None:
    large, small = make_parameters()
    optimizer = build_optimizer(name, [{"params": [large]}, {"params": [small], "weight_decay": 0.0}], lr=0.01)
    run_steps(optimizer, [large, small], range(1))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert build_optimizer(name, nn.Linear(64, 64).named_parameters(), lr=0.01)


def test_a_checkpoint_does_not_say_how_steps_are_computed() -> None:
    """One of a fused AdamW, as on a GPU; its counters may lie there, too."""
    parameters = make_parameters()
    fused = torch.optim.AdamW(parameters, lr=0.01, fused=True)
    run_steps(fused, parameters, range(2))
    for name in ("adamw", "adamw8bit"):
        optimizer = build_optimizer(name, parameters, lr=0.01)
        optimizer.load_state_dict(copy.deepcopy(fused.state_dict()))
        assert all(group.get("fused") is optimizer.defaults.get("fused") for group in optimizer.param_groups)
        assert all(int(state["step"]) == 2 for state in optimizer.state.values())
        run_steps(optimizer, parameters, range(1))


def test_a_checkpoint_of_torchao_with_4_bits_goes_on() -> None:
    import torchao.optim

    parameters = make_parameters()
    theirs = torchao.optim.AdamW4bit(parameters, lr=0.01, betas=(0.9, 0.95))
    with torch.compiler.set_stance("force_eager"):
        run_steps(theirs, parameters, range(3))
    ours = build_optimizer("adamw4bit", parameters, lr=0.01)
    ours.load_state_dict(theirs.state_dict())
    before, after = (o.state[parameters[0]]["exp_avg_sq"] for o in (theirs, ours))
    assert after.qmap[0] == 2**-15 and (after.dequantize() / before.dequantize()).log2().abs().max() < 0.6
    run_steps(ours, parameters, range(1))


def test_the_first_step_makes_states_and_no_more() -> None:
    """A fresh state is not converted: for a head of 500 million numbers that took twelve GiB."""
    weight = nn.Parameter(torch.zeros(512, 1024))
    optimizer: Any = build_optimizer("adamw4bit", [weight], lr=0.01)
    states: list[Any] = []
    made = allocated(lambda: states.append(optimizer._new_buffer(weight, False)))
    assert made < 0.6 * weight.numel() and states[0].dequantize().abs().max() == 0
