"""All modules of a model, in the order of `modules()`."""

from torch import nn

from octavo.nn.walk import modules_of


def test_order_of_modules():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), shared, nn.ModuleDict({"a": nn.Linear(1, 1), "b": shared}))
    model.register_module("none", None)
    model[0].around = model  # a module within itself
    assert modules_of(model) == list(model.modules())
    assert modules_of(shared) == [shared]
