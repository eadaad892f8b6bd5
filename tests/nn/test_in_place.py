"""Outputs that code outside changes in place, as it may those of `nn.Linear`: they are no views."""

import pytest
import torch
from torch import nn

import octavo
from octavo.nn.frozen import FROZEN_GRANULARITIES, FP8FrozenLinear
from octavo.nn.linear import FP8Linear
from octavo.nn.linear_function import linear
from octavo.ops.adapters import Adapter, Adapters

SHAPES = [(8, 64), (2, 5, 64), (2, 3, 1, 64)]
RECIPES = ["delayed", "current", "channel", "block", "mx"]


def layers():
    """Functions of x that end in a product in FP8."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 33)
    for recipe in RECIPES:
        yield recipe, FP8Linear.from_linear(plain, recipe)
    for granularity in FROZEN_GRANULARITIES:
        yield f"frozen {granularity}", FP8FrozenLinear.from_linear(plain, granularity)
    yield "adapters", adapted(FP8FrozenLinear.from_linear(plain, "channel"))
    yield "autocast", lambda x: in_autocast(plain, x)


def adapted(base):
    down, up = nn.Parameter(torch.randn(4, 64)), nn.Parameter(torch.randn(33, 4))
    adapters = Adapters((Adapter(0, 33, 0.5),), (down,), (up,))
    return lambda x: linear(x, base.as_weight(), base.spec(x), base.states, bias=base.bias, adapters=adapters)


def in_autocast(plain, x):
    with octavo.fp8_autocast():
        return plain(x)


LAYERS = dict(layers())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_an_output_is_changed_in_place(name, shape):
    layer, x = LAYERS[name], torch.randn(shape)
    other = torch.randn(*shape[:-1], 33)
    gradients = []
    for in_place in (False, True):
        mine, added = x.clone().requires_grad_(), other.clone().requires_grad_()
        y = layer(mine)
        assert y.shape == other.shape and not y._is_view()
        if in_place:
            y += added
            nn.functional.relu(y, inplace=True)
        else:
            y = nn.functional.relu(y + added)
        y.square().sum().backward()
        gradients.append((y.detach(), mine.grad, added.grad))
    for actual, expected in zip(*gradients, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_an_output_without_gradients_is_changed_with_them(name):
    with torch.no_grad():
        y = LAYERS[name](torch.randn(2, 3, 64))
    y += torch.randn(2, 3, 33, requires_grad=True)
    y.sum().backward()


def test_an_activation_in_place_between_converted_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64))
    octavo.convert_to_fp8(model)
    model(torch.randn(8, 64)).sum().backward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(8, 64)).sum().backward()
