"""A model with its optimiser, on one rank or on several, and steps of it: what tests of checkpoints save and load."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from octavo import convert_to_fp8, fp8_all_gather, share_amax
from octavo.optim import build_optimizer

STEPS = 3
PLACEMENTS = {"fsdp2": None, "columns": lambda parameter: Shard(parameter.dim() - 1)}


def build(recipe="delayed", optimizer="adamw", wrap="fsdp2", features=320, gather=False):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, features), nn.ReLU(), nn.Linear(features, 128, bias=False))
    convert_to_fp8(model, recipe)
    if wrap in PLACEMENTS:
        for layer in (model[0], model[2]):
            fully_shard(layer, shard_placement_fn=PLACEMENTS[wrap])
        fully_shard(model)
        if gather:
            fp8_all_gather(model)
            share_amax(model)
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    return model, build_optimizer(optimizer, model.parameters(), lr=3e-3)


def train(model, optimizer, first, own=None):
    """Losses of steps; `own`: a rank whose batches differ from those of the others."""
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step + 1000 * (own or 0))
        x = torch.randn(32, 64, generator=generator) * (1 + (own or 0))
        loss = model(nn.functional.dropout(x, 0.1)).square().mean() if own is not None else model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
