"""Which figures a device gets, and that tables have an entry for everything kernels ask for."""

import pytest
import torch

from octavo.kernels import tuning
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.quantize import modes
from octavo.kernels.tuning import ADA, BLACKWELL, HOPPER
from octavo.numerics import FP8TrainingConfig, activation
from octavo.numerics.config import RECIPES


@pytest.mark.parametrize(
    "capability, expected",
    [((8, 0), ADA), ((8, 9), ADA), ((9, 0), HOPPER), ((10, 0), BLACKWELL), ((10, 3), BLACKWELL), ((12, 0), BLACKWELL)],
    ids=str,
)
def test_figures_by_compute_capability(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    tuning.tuning_for.cache_clear()
    device = torch.device("cuda", 0)
    try:
        assert tuning.tuning_for(device) is expected
        assert tuning.may_overlap(device) is (capability >= (9, 0))
        assert tuning.tuning_for(device).gemm.cublas_blocks is (capability[0] == 9)
    finally:
        tuning.tuning_for.cache_clear()


def test_without_a_gpu_kernels_are_hoppers():
    assert tuning.tuning_for(torch.device("cpu")) is tuning.tuning_for(torch.device("meta")) is HOPPER
    assert tuning.may_overlap(torch.device("meta")) and not tuning.may_overlap(torch.device("cpu"))


def test_every_architecture_has_tiles_for_every_recipe():
    for _, figures in tuning.ARCHITECTURES:
        for name in RECIPES:
            for recipe in (getattr(FP8TrainingConfig.from_recipe(name).recipe, operand) for operand in "xwg"):
                rows, columns = modes.modes_of(recipe, "both")
                assert modes.tile_of(figures.quantize, rows, 0, False).programs >= 1
                assert modes.NAMES.get(columns, "channel") in figures.quantize.whole_columns
        widest = [tiles.wide[-1].widest for tiles in figures.quantize.whole_rows.values()]
        assert min(widest) == max(widest) == 32_768


def test_every_activation_has_a_kernel():
    assert list(ACTIVATIONS) == list(activation.ACTIVATIONS)
