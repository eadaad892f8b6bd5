"""Scales in the state that Accelerate saves: each rank has its own; another number of ranks gets the larger of each."""

from pathlib import Path

import torch
from ranks import on_ranks
from torch import nn

from octavo.numerics.scaling import LAST_AMAX

STEPS = 3


def prepared():
    """An Accelerator in FP8, its model and optimiser."""
    from accelerate import Accelerator

    import octavo

    torch.manual_seed(0)
    octavo.setup_fp8_mixed_precision_training(config="delayed")
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator, model, optimizer


def steps(rank, accelerator, model, optimizer, first):
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        loss = model(torch.randn(16, 32, generator=generator) * (1 + rank)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def amax(accelerator):
    return accelerator.fp8_reports[0].scaling.state_dict()["rows"][:, LAST_AMAX].tolist()


def save_and_go_on(rank, folder):
    ready = prepared()
    steps(rank, *ready, 0)
    ready[0].save_state(folder)
    return amax(ready[0]), steps(rank, *ready, STEPS)


def load_and_go_on(rank, folder):
    ready = prepared()
    ready[0].load_state(folder)
    return amax(ready[0]), steps(rank, *ready, STEPS)


def test_each_rank_goes_on_with_its_own_scales(tmp_path):
    folder = str(tmp_path / "state")
    saved = on_ranks(2, save_and_go_on, folder)
    assert {path.name for path in Path(folder).glob("fp8*")} == {"fp8_scaling_0.pt", "fp8_scaling_0.rank1.pt"}
    assert saved[0][0] != saved[1][0]
    assert on_ranks(2, load_and_go_on, folder) == saved
    larger = [max(pair) for pair in zip(saved[0][0], saved[1][0], strict=True)]
    assert all(amax == larger for amax, _ in on_ranks(3, load_and_go_on, folder))
    assert on_ranks(1, save_and_go_on, folder) and not (tmp_path / "state" / "fp8_scaling_0.rank1.pt").exists()
