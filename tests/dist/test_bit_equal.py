"""DDP and FSDP2 compute what the same ranks compute one after another in one process, to the bit."""

from functools import partial

import pytest
import torch
from dist_cases import KINDS, RATE, RECIPES, adamw, converted, largest_difference, numbers, plain, simulated, train
from ranks import on_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer

from octavo.optim import build_optimizer, keep_masters, offload_states


def both(rank, cases):
    return [train(rank, engine, kind, recipe) for kind, recipe in cases for engine in ("ddp", "fsdp2")]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_simulated_ones(kind):
    cases = [(kind, recipe) for recipe in RECIPES]
    by_rank = on_ranks(2, both, cases)
    start = numbers(plain(kind))
    for place, case in enumerate(cases):
        expected = simulated(*case)
        assert largest_difference(expected, start) > 1e-3  # it has learned
        for actual in by_rank:
            ddp, fsdp2 = actual[2 * place : 2 * place + 2]
            assert largest_difference(ddp, expected) == 0, ("ddp", *case)
            assert largest_difference(fsdp2, expected) == 0, ("fsdp2", *case)


class Own(torch.optim.Optimizer):
    """A user's own optimiser, with momentum."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": RATE})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                p.sub_(state["mean"].lerp_(p.grad, 0.5), alpha=group["lr"])


def states_on_the_host(parameters):
    optimizer = adamw(parameters)
    offload_states(optimizer)
    return optimizer


def with_masters(kind, recipe):
    model = converted(kind, recipe).bfloat16()
    keep_masters(model.parameters())
    return model


OPTIMIZERS = [adamw, partial(build_optimizer, "adamw8bit", lr=RATE), Own, states_on_the_host]


def states_on_ranks(parameters):
    """ZeRO-1: each rank steps some of the weights, and sends them to the others."""
    return ZeroRedundancyOptimizer(parameters, Own)


def with_each_optimizer(rank):
    every = [*OPTIMIZERS, states_on_ranks]
    return [train(rank, "ddp", "Llama", "block", build=with_masters, optimizer=each) for each in every]


def test_bf16_weights_with_fp32_masters():
    """DDP averages gradients by hooks that torch drops from a Parameter whose data change their dtype."""
    by_rank = on_ranks(2, with_each_optimizer)
    for place, optimizer in enumerate([*OPTIMIZERS, Own]):  # the last beside states on ranks
        expected = simulated("Llama", "block", build=with_masters, optimizer=optimizer)
        for actual in by_rank:
            assert largest_difference(actual[place], expected) == 0, optimizer
