"""Tiny models that several ranks train, and the yardstick: the same ranks simulated in one process.

FP8 rounds by amax, so two half batches are not one whole batch, even if everything is right. `simulated` therefore
trains one model per rank, each with its part of the batch and with scales of its own, and averages their gradients
before each step. What ranks compute should have the same bits.

    expected = simulated("Llama", "block")
    actual = on_ranks(2, train, "fsdp2", "Llama", "block")     # every parameter, as NumPy arrays, by rank
    assert largest_difference(actual[0], expected) == 0
"""

from collections.abc import Callable, Iterable
from typing import Any

import decoder_cases
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import octavo
from octavo import FP8TrainingConfig
from octavo.optim import build_optimizer

RECIPES = ("delayed", "current", "channel", "block", "mx")
KINDS = ("MLP", "Llama", "FP8 head", "FP8 activations")
WORLD = 2
STEPS = 3
RATE = 1e-2
_CHANGES: dict[str, dict[str, Any]] = {"FP8 head": {"fp8_head": True}, "FP8 activations": {"activations": "fp8"}}
Numbers = dict[str, np.ndarray]


class MLP(nn.Module):
    """Three linears of odd sizes; its call returns the loss, as that of a decoder does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(40, 72), nn.Linear(72, 48, bias=False), nn.Linear(48, 24)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.second(self.first(x).relu()).relu()) - y).square().mean()


def config_of(kind: str, recipe: str) -> FP8TrainingConfig:
    return FP8TrainingConfig.from_recipe(recipe, **_CHANGES.get(kind, {}))


def plain(kind: str, **changes: Any) -> nn.Module:
    """The model before conversion; the same values whenever it is called. `changes`: of the Llama's configuration."""
    return MLP() if kind == "MLP" else decoder_cases.build("Llama", **changes)


def converted(kind: str, recipe: str, **changes: Any) -> nn.Module:
    model = plain(kind, **changes)
    octavo.convert_to_fp8(model, config_of(kind, recipe))
    return model


def batch(kind: str, step: int, rank: int) -> dict[str, Tensor]:
    """What one rank trains on in one step. All ranks have as many labels, so the mean of means is the mean."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind == "MLP":
        return {"x": torch.randn(37, 40, generator=generator), "y": torch.randn(37, 24, generator=generator)}
    ids = torch.randint(1, decoder_cases.SIZES["vocab_size"], (3, 21), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output.loss


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return build_optimizer("adamw", parameters, lr=RATE)


def simulated(
    kind: str,
    recipe: str,
    *,
    world: int = WORLD,
    steps: int = STEPS,
    build: Callable[[str, str], nn.Module] = converted,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
) -> Numbers:
    """The parameters after some steps of ranks that are all in this process."""
    models = [build(kind, recipe) for _ in range(world)]
    optimizers = [optimizer(p for p in model.parameters() if p.requires_grad) for model in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            loss_of(model, batch(kind, step, rank)).backward()
        average([[p for p in model.parameters() if p.requires_grad] for model in models])
        for each in optimizers:
            each.step()
            each.zero_grad()
    return numbers(models[0])


@torch.no_grad()
def average(parameters: list[list[nn.Parameter]]) -> None:
    """Give each model the mean of all models' gradients, divided before they are summed, as DDP does."""
    for same in zip(*parameters, strict=True):
        gradients = [p.grad for p in same if p.grad is not None]
        if gradients:
            mean = sum(gradient / len(same) for gradient in gradients)
            for p in same:
                p.grad = mean.clone()


def train(
    rank: int,
    engine: str,
    kind: str,
    recipe: str,
    *,
    steps: int = STEPS,
    build: Callable[[str, str], nn.Module] = converted,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
) -> Numbers:
    """On a rank: the parameters after some steps under "ddp" or "fsdp2"."""
    model = build(kind, recipe)
    wrapped = nn.parallel.DistributedDataParallel(model) if engine == "ddp" else shard(model)
    run(rank, wrapped, kind, optimizer([p for p in model.parameters() if p.requires_grad]), steps=steps)
    return numbers(model)


def run(rank: int, model: nn.Module, kind: str, optimizer: torch.optim.Optimizer, *, steps: int = STEPS) -> list[float]:
    """Train a wrapped model on a rank's part of each batch. Returns the losses of this rank."""
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(kind, step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shard(model: nn.Module, units: Callable[[nn.Module], list[Any]] | None = None, **options: Any) -> nn.Module:
    """`fully_shard` of each unit and then of the model. `units`: layers of a decoder unless told, linears of an MLP."""
    from torch.distributed.fsdp import fully_shard

    for unit in (layers if units is None else units)(model):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def layers(model: Any) -> list[Any]:
    return [model.first, model.second] if isinstance(model, MLP) else list(model.model.layers)


def numbers(model: nn.Module) -> Numbers:
    """Every parameter, gathered, as NumPy arrays: tensors cross between processes by memory that both must hold."""
    return {name: _whole(p.detach()).float().numpy().copy() for name, p in model.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def largest_difference(actual: Numbers, expected: Numbers) -> float:
    """The largest difference of any parameter, relative to the norm of all; 0.0 for equal bits. NaN is infinite."""
    assert actual.keys() == expected.keys()
    size = float(np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in expected.values())))
    largest = max(float(np.abs(actual[name] - expected[name]).max(initial=0)) for name in expected)
    return largest / size if np.isfinite(largest) else float("inf")
