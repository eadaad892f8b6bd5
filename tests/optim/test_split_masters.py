"""BF16 weights with FP32 masters: they train as FP32 weights do, by any optimiser, and a run resumes exactly."""

import copy
import io
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from octavo import FP8Trainer
from octavo.numerics import split as spec
from octavo.optim import (
    OPTIMIZERS,
    build_optimizer,
    keep_masters,
    measure_memory,
    offload_states,
    set_learning_rate,
    step_in_backward,
)
from octavo.optim.split_masters import LOW, has_master, master_at

transformers = pytest.importorskip("transformers")
LR = 1e-5
MAKERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=LR, foreach=False),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=LR, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=LR, fused=True),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=LR, amsgrad=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=LR),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=LR),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.9),
    "Adafactor": lambda groups: transformers.Adafactor(groups, lr=LR, relative_step=False, scale_parameter=False),
    "a user's own": lambda groups: Own(groups, lr=LR),
    **{name: lambda groups, name=name: build_optimizer(name, groups, lr=LR) for name in OPTIMIZERS},
}
every_optimizer = pytest.mark.parametrize("maker", MAKERS)


class Own(torch.optim.Optimizer):
    """Counts its steps in its groups, and looks at all gradients at once."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = torch.stack([p.grad.float().norm() for p in parameters]).norm()
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad / size, 0.1)
                p.sub_(state["mean"], alpha=group["lr"] / group["count"])
        return loss


def weights(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(dtype)) for s in ((64, 128), (33, 7), (5,))]


def groups_of(parameters):
    return [
        {"params": parameters[:2], "weight_decay": 0.1},
        {"params": parameters[2:], "weight_decay": 0.0, "lr": 3e-5},
    ]


def give(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)


def run(optimizer, parameters, seeds):
    for seed in seeds:
        give(parameters, seed)
        optimizer.step()
        optimizer.zero_grad()


def masters(optimizer, parameters):
    return [master_at(optimizer, p, torch.arange(p.numel(), device=p.device)).view(p.shape).clone() for p in parameters]


def trained(maker, *, steps=4, prepare=lambda _optimizer: None):
    parameters = weights()
    keep_masters(parameters)
    optimizer = MAKERS[maker](groups_of(parameters))
    prepare(optimizer)
    run(optimizer, parameters, range(steps))
    return parameters, optimizer


@every_optimizer
def test_the_steps_of_fp32_weights_bit_for_bit(maker):
    exact = weights(torch.float32)
    run(MAKERS[maker](groups_of(exact)), exact, range(4))
    parameters, optimizer = trained(maker)
    for actual, master, wanted in zip(parameters, masters(optimizer, parameters), exact, strict=True):
        assert torch.equal(master, wanted)
        assert actual.dtype == torch.bfloat16 and not torch.equal(wanted.bfloat16().float(), wanted)
        torch.testing.assert_close(actual, wanted.bfloat16(), rtol=2**-7, atol=0)
    if maker == "a user's own":
        assert [group["count"] for group in optimizer.param_groups] == [4, 4]


@pytest.mark.parametrize("elements", [1, 8192 + 231, 8192 + 232])
def test_some_at_a_time(elements, monkeypatch):
    """Masters of one parameter, of two, of some that just do not fit together: each takes its step."""
    whole, optimizer = trained("AdamW")
    monkeypatch.setattr("octavo.optim.split_masters._AT_A_TIME", elements)
    parameters, other = trained("AdamW")
    for actual, wanted in zip(masters(other, parameters), masters(optimizer, whole), strict=True):
        assert torch.equal(actual, wanted)


@every_optimizer
@pytest.mark.parametrize("first", [False, True], ids=["before the first step", "after a step"])
def test_a_run_resumes_exactly(maker, first):
    parameters, optimizer = trained(maker)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), [p.data for p in parameters]], file)
    run(optimizer, parameters, range(4, 7))
    file.seek(0)
    saved, values = torch.load(file, weights_only=True)
    others = weights()
    keep_masters(others)
    resumed = MAKERS[maker](groups_of(others))
    if first:
        run(resumed, others, range(1))
    for parameter, value in zip(others, values, strict=True):
        parameter.data.copy_(value)
    resumed.load_state_dict(saved)
    run(resumed, others, range(4, 7))
    for one, other in zip(masters(optimizer, parameters), masters(resumed, others), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["AdamW", "adamw8bit", "Adafactor"])
@pytest.mark.parametrize(
    "how",
    [step_in_backward, offload_states, lambda o: step_in_backward(o, offload=True)],
    ids=["released", "offloaded", "both"],
)
def test_with_gradients_released_or_states_on_the_host(name, how):
    def go(parameters, optimizer, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            given = [torch.randn(p.shape, generator=generator).bfloat16() for p in parameters]
            sum((p * g.to(p.dtype)).sum() for p, g in zip(parameters, given, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()

    exact = weights(torch.float32)
    go(exact, MAKERS[name](groups_of(exact)), range(5))
    parameters = weights()
    keep_masters(parameters)
    optimizer = MAKERS[name](groups_of(parameters))
    how(optimizer)
    go(parameters, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    keep_masters(others)
    resumed = MAKERS[name](groups_of(others))
    how(resumed)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    go(others, resumed, range(3, 5))
    for actual, wanted in zip(masters(resumed, others), exact, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-9)


def test_hooks_of_others_see_gradients_before_and_after_the_step():
    parameters = weights()
    keep_masters(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=LR)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(parameters[0].grad is not None))

    def halve(*_):
        for p in parameters:
            p.grad.mul_(0.0)

    for _ in range(2):
        give(parameters, 0)
        given = [p.grad for p in parameters]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(parameters, given, strict=True))
        optimizer.register_step_post_hook(lambda *_: seen.append(parameters[0].grad is not None))
    before = masters(optimizer, parameters)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.state.clear()
    optimizer.register_step_pre_hook(halve)  # registered after the first step, and still heard before it
    give(parameters, 1)
    optimizer.step()
    assert seen == [True] * 6
    for one, other in zip(masters(optimizer, parameters), before, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-8, atol=0)


def test_a_closure_is_called_once_with_weights_in_bf16():
    parameters = weights()
    keep_masters(parameters)
    seen = []

    def closure():
        seen.append(parameters[0].dtype)
        give(parameters, 0)
        return torch.tensor(3.0)

    for maker in ("AdamW", "a user's own"):
        assert MAKERS[maker](groups_of(parameters)).step(closure) == 3
    assert seen == [torch.bfloat16] * 2
    with pytest.raises(ValueError, match=r"LBFGS evaluates .* master_weights=False"):
        torch.optim.LBFGS(parameters).step(closure)


class WithAList(torch.optim.Optimizer):
    """Keeps its parameters in a list of its own."""

    def __init__(self, parameters):
        self.list = list(parameters)
        super().__init__(self.list, {})

    @torch.no_grad()
    def step(self):
        for p in self.list:
            p.sub_(p.grad, alpha=0.1)


def test_an_optimizer_that_goes_around_masters_is_an_error():
    parameters = weights()
    keep_masters(parameters)
    optimizer = WithAList(parameters)
    give(parameters, 0)
    with pytest.raises(ValueError, match=r"WithAList has stepped a BF16 weight .* master_weights=False"):
        optimizer.step()
    assert all(mine is p for mine, p in zip(optimizer.param_groups[0]["params"], parameters, strict=True))


@pytest.mark.parametrize("maker", ["AdamW", "a user's own"])
def test_after_a_step_that_broke_off(maker, monkeypatch):
    parameters, optimizer = trained(maker)
    before = masters(optimizer, parameters)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(torch.Tensor, "lerp_", lambda *_: 1 / 0)
        broken.setattr(torch, "_foreach_lerp_", lambda *_: 1 / 0)
        give(parameters, 9)
        optimizer.step()
    run(optimizer, parameters, range(4, 5))
    assert all(p.dtype == torch.bfloat16 for p in parameters)
    for actual, old in zip(masters(optimizer, parameters), before, strict=True):
        assert 0 < (actual - old).abs().max() < 2e-4


def interrupted(monkeypatch):
    """Return weights whose second step breaks off behind the first of them, and what there was before it."""
    parameters, optimizer = trained("a user's own", steps=1)
    before = copy.deepcopy(optimizer.state_dict()), masters(optimizer, parameters)
    give(parameters, 1)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(torch.Tensor, "sub_", Mock(side_effect=[None, KeyboardInterrupt]))
        optimizer.step()
    return parameters, optimizer, *before


def test_a_checkpoint_after_a_step_that_broke_off_has_the_masters(monkeypatch):
    parameters, optimizer, before, _ = interrupted(monkeypatch)
    saved = optimizer.state_dict()
    assert [list(state) for state in saved["state"].values()] == [list(state) for state in before["state"].values()]
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(one is p for one, p in zip(mine, parameters, strict=True))


def test_back_to_a_checkpoint_after_a_step_that_broke_off(monkeypatch):
    """Neither the weights nor the states that were loaded are replaced by those of the step."""
    parameters, optimizer, saved, _ = interrupted(monkeypatch)
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    optimizer.load_state_dict(saved)
    for parameter, state in zip(parameters, saved["state"].values(), strict=True):
        assert not parameter.any()
        assert torch.equal(optimizer.state[parameter][LOW].view(torch.int16), state[LOW].view(torch.int16))


def test_gradients_that_come_after_a_step_that_broke_off_are_stepped(monkeypatch):
    parameters, optimizer, _, before = interrupted(monkeypatch)
    optimizer.zero_grad()
    run(optimizer, parameters, [2])
    assert not torch.equal(masters(optimizer, parameters)[0], before[0])
    assert all(p.grad is None for p in parameters)


def test_states_stay_where_there_is_no_memory_for_a_master(monkeypatch):
    parameters, optimizer = trained("a user's own")
    before = [dict(optimizer.state[p]) for p in parameters]
    give(parameters, 4)
    with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
        full.setattr("octavo.optim.split_masters.spec.join", Mock(side_effect=torch.OutOfMemoryError))
        optimizer.step()
    for parameter, state in zip(parameters, before, strict=True):
        assert optimizer.state[parameter].keys() == state.keys()
        assert all(optimizer.state[parameter][name] is value for name, value in state.items())


def test_masters_of_some_are_gone_when_others_are_made(monkeypatch):
    """They and their gradients take 8 bytes an element, which `_AT_A_TIME` limits."""
    made, alive = [], []
    join = spec.join

    def counting(*halves):
        alive.append(sum(one() is not None for one in made))
        master = join(*halves)
        made.append(weakref.ref(master.untyped_storage()))
        return master

    monkeypatch.setattr("octavo.optim.split_masters._AT_A_TIME", 1)
    monkeypatch.setattr("octavo.optim.split_masters.spec.join", counting)
    trained("AdamW", steps=1)
    assert alive == [0, 0, 0]


class Lookahead(torch.optim.Optimizer):
    """Has another optimiser step the weights, in groups that both have."""

    def __init__(self, fast):
        super().__init__(fast.param_groups, {})
        self.fast, self.param_groups = fast, fast.param_groups

    def step(self, closure=None):
        return self.fast.step(closure)


@pytest.mark.parametrize("maker", ["AdamW", "a user's own"])
def test_an_optimizer_that_holds_another_leaves_masters_to_it(maker):
    alone, optimizer = trained(maker)
    parameters = weights()
    keep_masters(parameters)
    fast = MAKERS[maker](groups_of(parameters))
    run(Lookahead(fast), parameters, range(4))
    assert list(fast.state) == parameters
    for actual, wanted in zip(masters(fast, parameters), masters(optimizer, alone), strict=True):
        assert torch.equal(actual, wanted)


def test_with_a_loss_scale_and_a_schedule():
    def go(parameters, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            given = [torch.randn(p.shape, generator=generator).bfloat16() for p in parameters]
            loss = sum((p * g.to(p.dtype)).sum() for p, g in zip(parameters, given, strict=True))
            if seed == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()

    exact, parameters = weights(torch.float32), weights()
    go(exact, MAKERS["AdamW"](groups_of(exact)))
    keep_masters(parameters)
    optimizer = MAKERS["AdamW"](groups_of(parameters))
    go(parameters, optimizer)
    for actual, wanted in zip(masters(optimizer, parameters), exact, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=LR / 20)  # clipped gradients were rounded to BF16
        assert not torch.equal(actual, actual.bfloat16().float())


def test_two_bytes_and_fp32_means_beside_a_bf16_weight():
    parameters, optimizer = trained("AdamW")
    state = optimizer.state[parameters[0]]
    assert {name: x.dtype for name, x in state.items() if x.dim()} == {
        "exp_avg": torch.float32, "exp_avg_sq": torch.float32, LOW: torch.bfloat16
    }  # fmt: skip
    saved = optimizer.state_dict()["state"][0]
    assert all(x.dtype == torch.bfloat16 for name, x in saved.items() if name != "step")
    assert saved["exp_avg"].untyped_storage().data_ptr() == state["exp_avg"].untyped_storage().data_ptr()  # no copy
    model = nn.ParameterList(parameters)
    assert measure_memory(model, optimizer).states == sum(10 * p.numel() for p in parameters)


def test_a_plain_optimizer_reads_the_checkpoint_and_the_other_way_round():
    _, optimizer = trained("AdamW")
    plain = weights()
    other = MAKERS["AdamW"](groups_of(plain))
    other.load_state_dict(optimizer.state_dict())
    run(other, plain, range(2))
    assert other.state[plain[0]]["exp_avg"].dtype == torch.bfloat16
    keep_masters(plain)
    run(other, plain, range(2))
    assert other.state[plain[0]]["exp_avg"].dtype == torch.float32 and LOW in other.state[plain[0]]


def test_stochastic_rounding_was_a_choice():
    parameters = weights()
    keep_masters(parameters)
    optimizer = build_optimizer("adamw8bit", parameters, lr=LR, stochastic_rounding=True)
    run(optimizer, parameters, range(2))
    assert not has_master(optimizer, parameters[0]) and LOW not in optimizer.state[parameters[0]]


def test_weights_that_are_loaded_between_steps_count():
    parameters, optimizer = trained("AdamW")
    loaded = torch.randn(64, 128).bfloat16()
    parameters[0].data.copy_(loaded)
    set_learning_rate(optimizer, 0.0)
    run(optimizer, parameters, range(1))
    assert torch.equal(parameters[0], loaded)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return self.body(x).float().square().mean()


def test_fp8_trainer_keeps_masters_unless_told_otherwise():
    moved = {}
    for master_weights in (True, False):
        model = Small().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        trainer = FP8Trainer(
            model, optimizer, gradient_accumulation_steps=2, max_grad_norm=1.0, master_weights=master_weights
        )
        weight = model.body[0].weight
        before = masters(optimizer, [weight])[0]
        for i in range(8):
            trainer.training_step((torch.randn(8, 32, generator=torch.Generator().manual_seed(i)).bfloat16(),))
        moved[master_weights] = (masters(optimizer, [weight])[0].float() != before.float()).float().mean().item()
        assert trainer.step == 4
    assert moved[True] > 0.99 and moved[False] < 0.5


@pytest.mark.parametrize("options", [{}, {"offload": "optimizer"}, {"release_gradients": True}], ids=str)
def test_fp8_trainer_resumes_masters_exactly(options):
    def fresh():
        model = Small().bfloat16()
        return FP8Trainer(model, torch.optim.AdamW(model.parameters(), lr=LR), **options)

    data = [(torch.randn(8, 32, generator=torch.Generator().manual_seed(i)).bfloat16(),) for i in range(6)]
    trainer = fresh()
    for batch in data[:3]:
        trainer.training_step(batch)
    torch.save(trainer.state_dict(), file := io.BytesIO())
    for batch in data[3:]:
        trainer.training_step(batch)
    file.seek(0)
    resumed = fresh()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for batch in data[3:]:
        resumed.training_step(batch)
    for t in (trainer, resumed):
        assert all(LOW in t.optimizer.state[p] for p in t.model.parameters())
    actual, wanted = (masters(t.optimizer, list(t.model.parameters())) for t in (resumed, trainer))
    assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_weights_that_are_pruned_after_a_step_stay_numbers(optimizer_class):
    weight = nn.Parameter(torch.randn(1000).bfloat16())
    keep_masters([weight])
    optimizer = optimizer_class([weight], lr=1e-3)
    for _ in range(3):
        weight.grad = torch.full_like(weight, 0.37)
        optimizer.step()
        with torch.no_grad():
            weight[::2] = 0.0
        assert weight.isfinite().all()
