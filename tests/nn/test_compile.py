"""The autocast and the layers under `torch.compile(fullgraph=True)`: one graph, same numbers, live scales."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from octavo import FP8TrainingConfig, convert_to_fp8, fp8_autocast
from octavo.models.bdh import BDH, BDHConfig
from octavo.tracing import refuse_transforms

RECIPES = ("delayed", "current", "channel", "block", "mx")


def test_functions_are_marked_as_torch_marks_them():
    """By the attribute that its decorator sets, which would import Dynamo with `import octavo`."""

    def function():
        pass

    torch.compiler.assume_constant_result(function)
    assert function.__dict__ and refuse_transforms.__dict__ == function.__dict__


class Model(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 16, 32) * 0.1)
        self.linear = nn.Linear(32, 16)
        self.lm_head = nn.Parameter(torch.randn(20, 16) * 0.1)
        self.checkpointed = checkpointed

    def block(self, x):
        x = F.layer_norm(x + self.linear(F.relu(x @ self.w)).mean(1, keepdim=True), (16,))
        return x + torch.einsum("bhtd,bhsd->bhts", x, x).mean()

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return (x @ self.lm_head.mT).square().mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_dynamo_takes_for_variables(dynamic):
    """It does so with numbers of which it saw others before, and with all under `dynamic=True`."""
    x = torch.randn(8, 64)
    for margin in range(3):
        config = FP8TrainingConfig(margin=margin, skip=())
        layers = nn.Sequential(nn.Linear(64, 64))
        convert_to_fp8(layers, config)
        expected = layers.eval()(x)
        assert torch.equal(torch.compile(layers, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x), expected)
        plain = nn.Linear(64, 64)
        with fp8_autocast(config, model=plain):
            torch.compile(plain, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x).sum().backward()
        assert plain.weight.grad.any()


@pytest.mark.parametrize("autocast", [False, True])
def test_transforms_are_refused(autocast):
    """Compiled, weights under `torch.func.grad` would pass for frozen ones: gradients of zeros."""
    model = nn.Sequential(nn.Linear(64, 64))
    x = torch.randn(8, 64)
    if not autocast:
        convert_to_fp8(model, FP8TrainingConfig(skip=()))
    context = fp8_autocast(model=model, enabled=autocast)

    def loss(parameters):
        with context:
            return torch.func.functional_call(model, parameters, (x,)).sum()

    compiled = torch.compile(lambda parameters: torch.func.grad(loss)(parameters), backend="aot_eager")
    with pytest.raises(Exception, match=r"FP8 products know no transforms of torch\.func"):
        compiled(dict(model.named_parameters()))


def train(model, function, context, steps=3):
    """Three optimiser steps; losses, and gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with context:
            loss = function(torch.randn(2, 1, 8, 16, generator=generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters()]


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_autocast_around_a_compiled_model(recipe, checkpointed):
    config = FP8TrainingConfig.from_recipe(recipe)
    eager_model = Model()
    losses, gradients = train(eager_model, eager_model, fp8_autocast(config, model=eager_model))
    model = Model(checkpointed)
    context = fp8_autocast(config, model=model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses_compiled, gradients_compiled = train(model, compiled, context)
    assert losses_compiled == losses
    for mine, theirs in zip(gradients_compiled, gradients, strict=True):
        assert torch.equal(mine, theirs) and mine.isfinite().all()
    assert len(context.report.in_fp8) == 6 and len(context.report.not_in_fp8) == 1
    if recipe == "delayed":
        assert context.scaling.state_dict()["_steps"].tolist() == [3] * 18
    statistics = context.scaling.statistics()
    assert len(statistics) == 18 and all(values["amax"] > 0 for values in statistics.values())


def test_autocast_inside_a_compiled_function():
    eager_model = Model()
    losses, _ = train(eager_model, eager_model, fp8_autocast(model=eager_model))
    model = Model()
    context = fp8_autocast(model=model)

    def forward(x):
        with context:
            return model(x)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert train(model, compiled, fp8_autocast(enabled=False))[0] == losses
    assert len(context.report.in_fp8) == 6, "traced once, not once a step"


def test_bdh_compiles_with_inductor():
    torch.manual_seed(0)
    model = BDH(BDHConfig(dim=32, heads=2, neurons=64, layers=2))
    tokens = torch.randint(256, (2, 24))
    context, compiled_context = fp8_autocast(model=model), fp8_autocast(model=model)
    with context:
        loss = model(tokens, tokens)[1]
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with compiled_context:
        compiled_loss = torch.compile(model, fullgraph=True)(tokens, tokens)[1]
    compiled_loss.backward()
    # Inductor fuses the element-wise parts, whose last bits then differ, and a value may round to the next FP8 step.
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-3, atol=0)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert F.cosine_similarity(parameter.grad.flatten(), gradient.flatten(), dim=0) > 0.999
    assert len(compiled_context.report.in_fp8) == 10


@pytest.mark.parametrize("recipe", RECIPES)
def test_converted_linears_compile_once_for_all_layers(recipe):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(10)))
        convert_to_fp8(model, FP8TrainingConfig.from_recipe(recipe))
        return model

    eager, compiled = build(), build()
    graphs = CompileCounterWithBackend("aot_eager")
    for layer in compiled:
        layer.compile(fullgraph=True, backend=graphs)
    for model in (eager, compiled):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(5, 16, requires_grad=True)).square().sum().backward()
            optimizer.step()
    assert graphs.frame_count == 1, "one graph serves all ten layers"
    for mine, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, theirs)
