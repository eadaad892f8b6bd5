"""Gradients applied within backward and states in host memory, on a GPU: the same weights, in less memory."""

import pytest
import torch
from torch import nn

from octavo.optim import OPTIMIZERS, build_optimizer, offload_states, step_in_backward


def build():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024, bias=False), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


HOW = {
    "plain": lambda _optimizer: None,
    "released": step_in_backward,
    "released and offloaded": lambda optimizer: step_in_backward(optimizer, offload=True),
    "offloaded": offload_states,
}


def run(name, how, steps=4):
    if name != "adamw":
        pytest.importorskip("torchao")
    model = build()
    optimizer = build_optimizer(name, model.parameters(), 1e-3)
    HOW[how](optimizer)
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))
    for _ in range(steps):
        model(x).float().square().mean().backward()
        held = sum(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return model, optimizer, held


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_weights(name):
    expected = [p.detach().clone() for p in run(name, "plain")[0].parameters()]
    for how in HOW:
        model, optimizer, held = run(name, how)
        for found, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-5)
        assert held == (0 if "released" in how else 6)
        for state in optimizer.state.values():
            moments = state["exp_avg"]
            parts = [getattr(moments, n) for n in moments.__tensor_flatten__()[0]] if name != "adamw" else [moments]
            if "offloaded" in how:
                assert all(part.device.type == "cpu" and part.is_pinned() for part in parts)
            else:
                assert all(part.is_cuda for part in parts)


def test_states_saved_and_loaded():
    _, optimizer, _ = run("adamw", "released and offloaded")
    states = optimizer.state_dict()
    other = build_optimizer("adamw", build().parameters(), 1e-3)
    step_in_backward(other, offload=True)
    other.load_state_dict(states)
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert theirs["exp_avg"].device.type == "cpu" and torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_less_memory():
    peaks = {}
    for how in HOW:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run("adamw", how)
        peaks[how] = torch.cuda.max_memory_allocated() - before
        del kept
    one = 2 * 1024 * 1024  # bytes of a weight, of its gradient and of each of its two moments
    assert peaks["plain"] - peaks["released"] > 4 * one
    assert peaks["plain"] - peaks["offloaded"] > 5 * one
    assert peaks["plain"] - peaks["released and offloaded"] > 10 * one
