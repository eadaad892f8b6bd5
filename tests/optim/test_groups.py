"""Several groups of parameters, each with its own settings, against torch's AdamW in FP32: every setting counts."""

import io

import pytest
import torch
from torch import nn

from octavo.optim import OPTIMIZERS, build_optimizer, offload_states, set_learning_rate, step_in_backward

# One setting differs from group to group; values are far apart, so that taking one for the other shows.
SETTINGS = {
    "lr": [{"lr": 1e-2}, {"lr": 1e-3}],
    "weight_decay": [{"weight_decay": 0.0}, {"weight_decay": 3.0}],
    "first beta": [{"betas": (0.0, 0.99)}, {"betas": (0.95, 0.99)}],
    "second beta": [{"betas": (0.0, 0.1)}, {"betas": (0.0, 0.99)}],
    "eps": [{"eps": 1e-8}, {"eps": 1.0}],
}
# Of the mean move of 8,192 elements: what the rounding of states leaves of itself there.
OFF_BY = {"adamw": 1e-4, "adamw8bit": 0.01, "adamwfp8": 0.02, "adamw4bit": 0.1}
SIZES = (1.0, 0.1, -0.5, 0.1, 0.1)  # of gradients, step by step: so that it matters how long means remember
WAYS = {
    "plain": lambda _: None,
    "released": step_in_backward,
    "released, offloaded": lambda optimizer: step_in_backward(optimizer, offload=True),
    "offloaded": offload_states,
}


def parameters():
    """Two of the same values, large enough for states of few bits."""
    torch.manual_seed(0)
    values = torch.rand(64, 128) + 0.5
    return [nn.Parameter(values.clone()) for _ in range(2)]


def groups(given, settings):
    return [{"params": [p], **more} for p, more in zip(given, settings, strict=True)]


def run(optimizer, given, sizes=SIZES):
    for seed, size in enumerate(sizes):
        g = size * (1 + 0.3 * torch.rand(64, 128, generator=torch.Generator().manual_seed(seed)))
        sum((p * g).sum() for p in given).backward()
        optimizer.step()
        optimizer.zero_grad()


def move(actual, start):
    return (actual - start).mean().item()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_setting_of_every_group_counts(name, setting, way):
    exact, given, start = parameters(), parameters(), parameters()[0]
    settings = SETTINGS[setting]
    run(torch.optim.AdamW(groups(exact, settings), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1), exact)
    optimizer = build_optimizer(name, groups(given, settings), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    WAYS[way](optimizer)
    run(optimizer, given)
    wanted, actual = ([move(p, start) for p in which] for which in (exact, given))
    assert abs(wanted[0] - wanted[1]) > 3 * OFF_BY[name] * abs(wanted[0])  # what would be seen
    assert actual == pytest.approx(wanted, rel=OFF_BY[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_new_rate_is_that_of_every_group(name):
    given, start = parameters(), parameters()
    optimizer = build_optimizer(name, groups(given, SETTINGS["lr"]), lr=1e-2, weight_decay=0.0)
    run(optimizer, given, (1.0,))
    before = [p.detach().clone() for p in given]
    assert not any(torch.equal(a, b) for a, b in zip(before, start, strict=True))
    set_learning_rate(optimizer, 0.0)
    run(optimizer, given, (1.0,))
    assert all(torch.equal(p, old) for p, old in zip(given, before, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_first_steps_are_as_large_as_the_rate(name):
    """Whatever the betas: means that begin at zero are corrected, by the count of steps, also after a checkpoint."""
    given = parameters()[:1]
    start = given[0].detach().clone()
    optimizer = build_optimizer(name, given, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.999))
    for step in range(3):
        given[0].grad = torch.ones_like(given[0])
        optimizer.step()
        assert (start - given[0]).mean().item() == pytest.approx(1e-2 * (step + 1), rel=0.1)
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        file.seek(0)
        optimizer = build_optimizer(name, given, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.999))
        optimizer.load_state_dict(torch.load(file, weights_only=True))
