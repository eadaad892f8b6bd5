"""`fp8_autocast` under FSDP2: weights that `skip` names stay in high precision, however Parameters are replaced."""

import pytest
from dist_cases import MLP, adamw, largest_difference, numbers, run, shard, simulated
from ranks import on_ranks

from octavo import FP8TrainingConfig, fp8_autocast


class UnderAutocast(MLP):
    """An MLP whose head stays in high precision. `given`: the context knows the model."""

    def __init__(self, recipe, *, given):
        super().__init__()
        config = FP8TrainingConfig.from_recipe(recipe, skip=("head",))
        self.__dict__["context"] = fp8_autocast(config, model=self if given else None)

    def forward(self, x, y):
        with self.context:
            return super().forward(x, y)


def given(_kind, recipe):
    return UnderAutocast(recipe, given=True)


def not_given(_kind, recipe):
    return UnderAutocast(recipe, given=False)


def sharded(rank, build, recipe, units):
    model = build("MLP", recipe)
    shard(model, every_linear if units == "linears" else nothing)
    run(rank, model, "MLP", adamw(model.parameters()))
    return numbers(model), [(entry.precision, entry.name) for entry in model.context.report.entries]


def every_linear(model):
    return [model.first, model.second, model.head]


def nothing(_model):
    return []


@pytest.mark.parametrize("build", [given, not_given])
def test_skipped_weights_stay_in_high_precision(build):
    expected = simulated("MLP", "current", build=build)
    for units in ("linears", "the model"):
        for actual, products in on_ranks(2, sharded, build, "current", units):
            assert [precision for precision, _ in products] == ["fp8", "fp8", "float32"], products
            assert largest_difference(actual, expected) == 0
            if build is given:
                assert [name for _, name in products][:2] == ["linear.0[first.weight]", "linear.1[second.weight]"]
