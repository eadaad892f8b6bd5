"""convert_to_fp8: what is chosen, by name, filter and recipe; and a model that is left whole when it is refused."""

import logging

import pytest
import torch
from torch import nn

import octavo
from octavo import FP8Linear, FP8TrainingConfig, convert_to_fp8, fp8_autocast, restore
from octavo.models import BDH, BDHConfig
from octavo.models.bdh import fuse, unfuse

TINY = BDHConfig(dim=16, heads=2, neurons=32, layers=1)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))


class WithLora(nn.Module):
    """As PEFT names things, without PEFT."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(24, 24)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(24, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 24, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class OtherAdapter(nn.Module):
    """A layer of one of PEFT's other methods: it says which of its children are adapters."""

    adapter_layer_names = ("bottleneck", "modules_to_save")

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(24, 24)
        self.bottleneck = nn.ModuleDict({"default": nn.Linear(24, 4)})
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(24, 24)})


def state(model):
    """All that a conversion may change."""
    return [(type(module), dict(module.__dict__), dict(module._parameters)) for module in model.modules()]


@pytest.mark.parametrize("name", ["delayed", "current", "channel", "block", "mx", "BLOCK"])
def test_a_recipe_by_its_name(name):
    config = FP8TrainingConfig.from_recipe(name)
    model = build()
    convert_to_fp8(model, name)
    assert model[0].config == config
    assert FP8Linear(8, 8, config=name).config == config
    assert FP8Linear.from_linear(nn.Linear(8, 8), name).config == config
    assert fp8_autocast(name).config == config and octavo.FP8Autocast(name).config == config
    model = build()
    trainer = octavo.FP8Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), name)
    assert trainer.fp8_config == config
    if config.granularity == "tensor":
        assert fuse(BDH(TINY), name).config == config
    for take in (FP8Linear.from_linear, fp8_autocast, convert_to_fp8):
        with pytest.raises(ValueError, match=r"config='blocks': .*recipe: delayed, current, channel, block, mx"):
            take(*(() if take is fp8_autocast else (nn.Linear(8, 8),)), "blocks")


def test_a_filter_decides_beside_skip():
    seen = []

    def narrow(name, linear):
        seen.append((name, linear))
        return linear.in_features < 40

    model = build()
    model.lm_head = nn.Linear(24, 10)
    report = convert_to_fp8(model, filter=narrow)
    assert [entry.name for entry in report.in_fp8] == ["0"] and type(model[2]) is nn.Linear
    assert seen == [("0", model[0]), ("2", model[2])]  # not the head: config.skip has it
    assert {e.name: e.reason for e in report.not_in_fp8}["2"] == "left alone: filter says so"
    with pytest.raises(ValueError, match=r"has no nn\.Linear to convert, as it is"):
        convert_to_fp8(build(), filter=lambda *_: False)
    with pytest.raises(TypeError, match=r"filter returned None for '0'"):
        convert_to_fp8(build(), filter=lambda *_: None)
    with pytest.raises(TypeError, match=r"filter=\['0'\]: a function"):
        convert_to_fp8(build(), filter=["0"])


def test_adapters_stay_out_unless_named():
    model = nn.ModuleDict({"q": WithLora(), "k": OtherAdapter()})
    report = convert_to_fp8(model)
    whole = ["q.base_layer", "k.base_layer", "k.modules_to_save.default"]
    assert [entry.name for entry in report.in_fp8] == whole
    reasons = {entry.name: entry.reason for entry in report.not_in_fp8}
    assert set(reasons) == {"q.lora_A.default", "q.lora_B.default", "k.bottleneck.default"}
    assert all("an adapter" in reason for reason in reasons.values())
    restore(model)
    report = convert_to_fp8(model, include=("lora_A", "k.bottleneck*"))
    named = {"q.lora_A.default", "k.bottleneck.default"}
    assert {entry.name for entry in report.in_fp8} == {*whole, *named}
    restore(model)
    report = convert_to_fp8(model, filter=lambda *_: True)
    assert not any(entry.name in reasons for entry in report.in_fp8)
    restore(model)
    with pytest.raises(ValueError, match="include='lora_C': no adapter"):
        convert_to_fp8(model, include=("lora_C",))
    with pytest.raises(ValueError, match="include='base_layer': no adapter"):
        convert_to_fp8(model, include=("base_layer",))
    with pytest.raises(ValueError, match="include='lora_A': a sequence"):
        convert_to_fp8(model, include="lora_A")


def test_a_trainer_leaves_adapters_alone():
    model = WithLora()
    model.base_layer.requires_grad_(False)
    octavo.FP8Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=nn.functional.mse_loss)
    assert type(model.base_layer) is FP8Linear
    assert type(model.lora_A["default"]) is type(model.lora_B["default"]) is nn.Linear


def test_a_refused_conversion_changes_nothing():
    model = build()
    before, x = state(model), torch.randn(3, 24)
    expected = model(x)
    for refused in (
        lambda: convert_to_fp8(model, FP8TrainingConfig(emulate=False)),
        lambda: convert_to_fp8(model, FP8TrainingConfig(skip=("typo",))),
        lambda: convert_to_fp8(model, FP8TrainingConfig(fp8_head=True)),
        lambda: convert_to_fp8(model, include=("typo",)),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            refused()
        assert state(model) == before and torch.equal(model(x), expected) and "FP8" not in repr(model)
    convert_to_fp8(model)
    restore(model)
    assert state(model) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_conversion_that_breaks_off_is_undone(error, monkeypatch):
    model = build()
    before, honest, done = state(model), FP8Linear.convert_in_place, []

    def break_off(linear, config, scaling, name):
        if done:
            raise error
        done.append(name)
        return honest(linear, config, scaling, name)

    with monkeypatch.context() as patching:
        patching.setattr(FP8Linear, "convert_in_place", break_off)
        with pytest.raises(error):
            convert_to_fp8(model)
    assert done == ["0"] and state(model) == before
    convert_to_fp8(model)
    assert type(model[0]) is FP8Linear


def test_a_fused_bdh_is_restored_as_the_error_advises():
    model = BDH(TINY)
    tokens = torch.randint(256, (1, 8))
    expected = model(tokens, tokens)[1]
    before = state(model)
    fuse(model)
    with pytest.raises(ValueError, match=r"already converted; call octavo\.restore"):
        convert_to_fp8(model)
    assert model(tokens, tokens)[1].isfinite()
    restore(model)
    assert state(model) == before and torch.equal(model(tokens, tokens)[1], expected)
    with pytest.raises(TypeError, match="not fused"):
        unfuse(model)
    outer = nn.ModuleDict({"bdh": BDH(TINY), "linear": nn.Linear(8, 8)})
    fuse(outer["bdh"])
    restore(outer)
    assert type(outer["bdh"]) is BDH
    convert_to_fp8(outer)
    for refused in (FP8TrainingConfig(emulate=False), FP8TrainingConfig(granularity="block")):
        before = state(outer)
        with pytest.raises((RuntimeError, ValueError)):
            fuse(outer["bdh"], refused)
        assert state(outer) == before
    fuse(outer["bdh"])
    restore(outer)
    assert type(outer["bdh"]) is BDH and type(outer["linear"]) is nn.Linear
    assert not any("octavo" in key for module in outer.modules() for key in module.__dict__)


def test_every_public_name_is_listed():
    assert set(octavo.__all__) | set(octavo._LATER) <= set(dir(octavo))
    assert {"FastLanguageModel", "OctavoCallback", "convert_to_fp8", "__version__"} <= set(dir(octavo))


@pytest.fixture
def said(monkeypatch, caplog):
    monkeypatch.setattr("octavo.support._announced", set())
    caplog.set_level(logging.WARNING, logger="octavo")

    def lines():
        return [record.getMessage() for record in caplog.records if record.name == "octavo"]

    return lines


LINE = "emulated on cpu: no FP8 tensor cores; same numerics, slower"


def test_emulation_is_said_once_in_log_and_report(said):
    for model in (build(), build()):
        report = convert_to_fp8(model)
        assert LINE in report.summary() and LINE in str(report) and report.to_dict()["emulation"] == LINE
    assert said() == [f"FP8 is {LINE}"]


def test_the_autocast_says_it_with_its_first_product(said):
    context = fp8_autocast() if not torch.cuda.is_available() else fp8_autocast(FP8TrainingConfig())
    assert LINE not in str(context.report)
    for _ in range(2):
        with context:
            torch.randn(32, 32) @ torch.randn(32, 32)
    assert LINE in str(context.report) and said() == [f"FP8 is {LINE}"]


def test_a_fused_bdh_and_a_lone_linear_say_it(said):
    assert LINE in str(fuse(BDH(TINY))) and said() == [f"FP8 is {LINE}"]
    octavo.support._announced.clear()
    FP8Linear(8, 8)
    assert said() == 2 * [f"FP8 is {LINE}"]


def test_what_was_asked_for_is_in_the_report_alone(said):
    report = convert_to_fp8(build(), FP8TrainingConfig(emulate=True))
    assert "emulated on cpu: emulate=True" in report.summary() and not said()
    convert_to_fp8(build().to("meta"))  # nothing runs there
    assert not said()


def test_emulate_false_refuses_what_is_on_a_device_without_tensor_cores(monkeypatch):
    """Also after it was moved there, and products of tensors there."""
    config = FP8TrainingConfig(emulate=False)
    with monkeypatch.context() as patching:
        patching.setattr("octavo.support.has_fp8_tensor_cores", lambda _: True)  # as on a GPU
        model = build()
        report = convert_to_fp8(model, config)
        context = fp8_autocast(config)
        assert not report.emulation
    with pytest.raises(RuntimeError, match=r"emulate=False: .*no FP8 tensor cores"):
        model(torch.randn(3, 24))
    with context, pytest.raises(RuntimeError, match="emulate=False"):
        torch.randn(32, 32) @ torch.randn(32, 32)
