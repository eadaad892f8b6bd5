"""A second gradient of a weight before `optimizer.step()`, where each is applied within backward: refused."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo import FP8Trainer, FP8TrainingConfig, convert_to_fp8
from octavo.optim import build_optimizer, offload_master, step_in_backward


class Twice(nn.Module):
    """One linear used twice, each time in a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(64, 64)
        self.reentrant = reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant).relu()
        return x.square().mean()


def inputs(seed=0):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def release(model, optimizer, how):
    if how == "master":
        convert_to_fp8(model, FP8TrainingConfig.from_recipe("current"))
        return offload_master(model, optimizer)
    return step_in_backward(optimizer, offload=how == "offload")


@pytest.mark.parametrize("how", ["plain", "offload", "master"])
def test_reentrant_checkpoints_of_a_shared_weight(how):
    model = Twice(reentrant=True)
    release(model, torch.optim.SGD(model.parameters(), lr=0.1), how)
    with pytest.raises(RuntimeError, match=r"a second gradient .*use_reentrant=False"):
        model(inputs()).backward()


def test_other_checkpoints_of_a_shared_weight_step_once():
    actual = []
    for early in (False, True):
        model = Twice(reentrant=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if early:
            step_in_backward(optimizer)
        for seed in range(2):
            model(inputs(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        actual.append(model.shared.weight.detach().clone())
    torch.testing.assert_close(*actual)


@pytest.mark.parametrize("how", ["plain", "offload", "master"])
def test_two_backwards_before_a_step(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = build_optimizer("adamw", model.parameters(), 1e-2)
    release(model, optimizer, how)
    for seed in range(2):
        model(inputs(seed)).square().mean().backward()
        optimizer.step()
    model(inputs()).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"Call optimizer.step\(\) after each backward\(\)"):
        model(inputs()).square().mean().backward()


def test_a_step_that_broke_off_in_the_trainer_can_be_tried_again():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = FP8Trainer(model, optimizer, loss_fn=nn.functional.mse_loss, release_gradients=True)
    batch = inputs().detach(), inputs(1).detach()

    def broken(_gradient):
        raise torch.OutOfMemoryError("none left")

    handle = model[0].weight.register_hook(broken)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.training_step(batch)
    handle.remove()
    trainer.training_step(batch)
    assert trainer.step == 1


def test_of_weights_that_are_one_product_each_counts():
    """q, k and v are stepped together when all have a gradient; a second one of q alone would wait for the others."""
    from decoder_cases import batch, build

    model = build()
    convert_to_fp8(model, FP8TrainingConfig.from_recipe("current"))
    offload_master(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(**batch()).loss.backward()
    weight = model.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(RuntimeError, match="a second gradient"):
        weight.backward(torch.ones_like(weight))
