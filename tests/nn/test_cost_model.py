"""Where FP8 pays, by shapes and by the rates of an architecture."""

import pytest
import torch
from torch import nn

from octavo import FP8TrainingConfig, convert
from octavo.decoders import choice
from octavo.kernels import tuning
from octavo.kernels.tuning import HOPPER, Rates
from octavo.nn import cost_model
from octavo.nn.frozen import FP8FrozenLinear
from octavo.tools.plan.gpus import GPUS
from octavo.tools.plan.options import options_of, why_bf16_products
from octavo.tools.shapes import make_case


@pytest.mark.parametrize(
    ("preset", "pays"),
    [("135m", False), ("360m", False), ("qwen3-0.6b", True), ("1b", True), ("8b", True), ("tiny", False)],
)
def test_products_by_frozen_weights(preset, pays):
    case = make_case(preset=preset, config=None, layers=None, tokens=None, seq=None, seed=0, device="cpu", force=True)
    shapes = [(linear.k, 1.0, linear.n) for linear in case.linears if linear.name != "head"]
    assert (not cost_model.why_not_frozen(shapes, HOPPER)) is pays


def test_inputs_that_are_quantised_once_for_several():
    """q, k and v one by one, each with its share of their common input, are as one."""
    one, several = [(1024, 1.0, 3072)], [(1024, 2 / 3, 2048), (1024, 1 / 6, 512), (1024, 1 / 6, 512)]
    assert cost_model.why_not_frozen(one, HOPPER) == cost_model.why_not_frozen(several, HOPPER) == ""
    assert "width of 640" in cost_model.why_not_frozen([(1024, 1.0, 1706)], HOPPER)


SLOW = HOPPER._replace(rates=Rates(bf16_flops=1e12, fp8_flops=2e12, bytes=1e15), frozen_width=100)


def test_an_architecture_brings_its_own_rates_and_width():
    assert "FP8 does not pay" in cost_model.why_not(256, 1024, 1024, HOPPER)
    assert cost_model.why_not(256, 1024, 1024, SLOW) == ""
    assert "but from 750 on" in cost_model.why_not_frozen([(512, 1.0, 512)], HOPPER)
    assert cost_model.why_not_frozen([(512, 1.0, 512)], SLOW) == ""


def test_a_conversion_asks_for_the_rates_of_its_device(monkeypatch):
    """Small layers stay in BF16 by Hopper's rates, not by those of a GPU whose products are slow."""
    monkeypatch.setattr(convert, "has_fp8_tensor_cores", lambda _: True)
    linear, config = nn.Linear(1024, 1024, device="meta"), FP8TrainingConfig()
    assert "FP8 does not pay" in convert._why_not_worth_it(linear, config, 256, 1024)
    asked = []
    monkeypatch.setattr(convert, "tuning_for", lambda device: asked.append(device) or SLOW)
    assert convert._why_not_worth_it(linear, config, 256, 1024) == ""
    assert asked == [torch.device("meta")]


def test_a_frozen_base_asks_for_the_width_of_its_device(monkeypatch):
    model = nn.Sequential(FP8FrozenLinear.from_linear(nn.Linear(256, 256), "channel"))
    assert "but from 750 on" in choice.choose_products(model) and not model[0].fp8_products
    monkeypatch.setattr(choice, "tuning_for", lambda _: SLOW)
    assert choice.choose_products(model) == "" and model[0].fp8_products


def test_a_plan_asks_for_the_width_of_its_gpu(monkeypatch):
    lora = {"config": None, "layers": None, "tokens": None, "seq": None, "seed": 0, "device": "cpu", "force": True}
    case = make_case(preset="135m", mode="lora", **lora)
    h100, ada = GPUS["h100"], GPUS["rtx4090"]
    assert why_bf16_products(case, None) == why_bf16_products(case, h100) == why_bf16_products(case, ada) != ""
    architectures = [(lowest, SLOW if lowest == (8, 0) else figures) for lowest, figures in tuning.ARCHITECTURES]
    monkeypatch.setattr(tuning, "ARCHITECTURES", tuple(architectures))
    assert why_bf16_products(case, None) == why_bf16_products(case, h100) != "" and why_bf16_products(case, ada) == ""
    options = {gpu: options_of(case, compiled=True, fp8_head=False, gpu=gpu) for gpu in (h100, ada)}
    assert any(not option.fp8_products for option in options[h100])
    assert not any(not option.fp8_products for option in options[ada])
    assert case.family.notes(case, h100) and not case.family.notes(case, ada)
