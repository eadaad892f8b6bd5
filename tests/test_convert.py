"""convert_to_fp8 and restore: the same Parameters, a report that leaves nothing out."""

import pytest
import torch
from torch import nn

import octavo
from octavo import FP8Linear, FP8TrainingConfig, convert_to_fp8, restore


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
    model.lm_head = nn.Linear(24, 10)
    model.attention = nn.MultiheadAttention(24, 2)
    model.conv = nn.Conv1d(4, 4, 3)
    model.raw = Raw()
    return model


def test_report_lists_every_linear_with_its_reason():
    report = convert_to_fp8(build())
    assert {e.name: e.precision for e in report} == {
        "0": "fp8",
        "2": "fp8",
        "lm_head": "float32",
        "attention": "float32",
        "attention.out_proj": "float32",
        "conv": "float32",
        "raw.weight": "float32",
    }
    reasons = {e.name: e.reason for e in report.not_in_fp8}
    assert "config.skip" in reasons["lm_head"] and "subclass" in reasons["attention.out_proj"]
    assert "high precision" in reasons["conv"] and "fp8_autocast" in reasons["raw.weight"]
    text = str(report)
    assert "2 of 7 in FP8" in text and "24 → 48" in text and "E4M3·E4M3→E5M2 per tensor" in text
    assert report.table().row_count == 7


@pytest.mark.parametrize("built", ["before", "after"])
def test_optimizer_trains_the_same_weights(built):
    model = build()
    before = dict(model.named_parameters())
    if built == "before":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    convert_to_fp8(model)
    if built == "after":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.lm_head(nn.Sequential.forward(model[:3], torch.randn(8, 24))).square().sum().backward()
    optimizer.step()
    assert all(p is before[name] for name, p in model.named_parameters())
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, values[name])}
    assert moved >= {"0.weight", "0.bias", "2.weight", "2.bias", "lm_head.weight"}


def test_restore_undoes_it_exactly():
    model = build()
    modules, parameters, attributes = list(model.modules()), list(model.parameters()), set(vars(model[0]))
    fired = []
    model[0].register_forward_hook(lambda *_: fired.append(1))
    x = torch.randn(3, 24)
    expected = model[:3](x)
    report = convert_to_fp8(model)
    assert model.octavo_report is report and model.octavo_fused is report.fused
    assert not torch.equal(model[:3](x), expected)
    restore(model)
    assert not hasattr(model, "octavo_report") and not hasattr(model, "octavo_fused")
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert type(model[0]) is nn.Linear and set(vars(model[0])) == attributes
    assert torch.equal(model[:3](x), expected) and len(fired) == 3


def test_state_dict_keys_stay():
    model = build()
    keys = list(model.state_dict())
    convert_to_fp8(model)
    assert list(model.state_dict()) == keys
    build().load_state_dict(model.state_dict())


def test_skip_takes_names_parts_and_patterns():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), "head": nn.Linear(8, 8)})
    report = convert_to_fp8(model, FP8TrainingConfig(skip=("head", "layers.1*")))
    assert [e.name for e in report.in_fp8] == ["layers.0", "layers.2"]
    model = nn.ModuleDict({"head": nn.Linear(8, 8), "header": nn.Linear(8, 8), "overhead": nn.Linear(8, 8)})
    report = convert_to_fp8(model, FP8TrainingConfig(skip=("head",)))  # a whole part of a name, not some of its letters
    assert [e.name for e in report.in_fp8] == ["header", "overhead"]


def test_linears_share_one_scaling_manager():
    model = build()
    report = convert_to_fp8(model)
    assert model[0].scaling is model[2].scaling is report.scaling
    assert report.scaling.names == ["0.x", "0.w", "0.g", "2.x", "2.w", "2.g"]


def test_errors():
    with pytest.raises(ValueError, match=r"no nn.Linear to convert.*fp8_autocast"):
        convert_to_fp8(nn.ReLU())
    with pytest.raises(ValueError, match=r"(?s)no nn.Linear to convert.*weight of torch.float64"):
        convert_to_fp8(nn.Linear(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"skip='typo'"):
        convert_to_fp8(build(), FP8TrainingConfig(skip=("typo",)))
    with pytest.raises(TypeError, match="list"):
        convert_to_fp8([build()])
    with pytest.raises(TypeError, match="FP8TrainingConfig"):
        convert_to_fp8(build(), 8)
    with pytest.raises(ValueError, match=r"config='E4M3': .* name of a recipe: delayed, current, channel, block, mx"):
        convert_to_fp8(build(), "E4M3")
    with pytest.raises(ValueError, match=r"fp8_dpa=True: .* Leave fp8_dpa out"):
        convert_to_fp8(build(), FP8TrainingConfig(fp8_dpa=True))
    model = build()
    convert_to_fp8(model)
    with pytest.raises(ValueError, match=r"already converted; call octavo.restore"):
        convert_to_fp8(model)


def test_a_lone_linear_and_a_tied_one():
    linear = nn.Linear(8, 8)
    convert_to_fp8(linear)
    assert isinstance(linear, FP8Linear)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    convert_to_fp8(model)
    assert model["b"].weight is model["a"].weight


def test_support_says_why_and_what_to_do():
    support = octavo.check_fp8_support()
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU; see tests/gpu")
    assert not support
    assert "FP8 not supported on this GPU: no CUDA device is visible" in str(support)
    assert "emulation" in str(support) and "adamw4bit" in str(support)
    assert "cpu has no FP8 tensor cores" in octavo.check_fp8_support("cpu").reason


@pytest.mark.parametrize(
    ("capability", "supported"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]
)
def test_support_by_compute_capability(monkeypatch, capability, supported):
    class Properties:
        major, minor = capability
        name = "a GPU"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    actual = octavo.check_fp8_support()
    assert bool(actual) is supported and f"{capability[0]}.{capability[1]}" in str(actual)


@pytest.mark.parametrize("architecture", ["gfx942:sramecc+:xnack-", "gfx90a", "gfx950"])
def test_no_amd_gpu_is_supported_as_long_as_no_kernel_runs_there(monkeypatch, architecture):
    class Properties:
        major, minor = 9, 4
        name, gcnArchName = "AMD Instinct MI300X", architecture

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.setattr(torch.version, "hip", "6.4")
    actual = octavo.check_fp8_support()
    assert not actual and architecture in actual.reason and "NVIDIA" in actual.reason
