"""Settings: complete from a few options, checked, plain in JSON, and clear about what a resumed run may change."""

import json
import math
from typing import Any

import pytest

from octavo.models import BDHConfig
from octavo.numerics import FP8TrainingConfig
from octavo.training.settings import HARMLESS, TrainSettings, settings_from_options


def make(**options: Any) -> TrainSettings:
    return settings_from_options({"device": "cpu", **options})


def test_without_options_on_a_cpu() -> None:
    settings = make()
    assert settings.shape == BDHConfig.preset("tiny") and settings.name == "bdh-tiny"
    assert (settings.precision, settings.dtype, settings.optimizer) == ("fp8", "float32", "adamw")
    assert settings.fp8 == FP8TrainingConfig() and settings.data is None and settings.tf32


def test_without_options_on_a_gpu() -> None:
    settings = make(device="cuda")
    assert settings.size == "100m" and settings.dtype == "bfloat16"


def test_options_change_the_shape_and_the_name() -> None:
    settings = make(size="25m", dim=64, neurons=32)
    assert settings.shape == BDHConfig(dim=64, heads=4, neurons=32, layers=6) and settings.name == "bdh-custom"
    assert make(dropout=0.1).size == "tiny"


def test_precision_decides_the_dtype() -> None:
    assert make(precision="bf16").dtype == "bfloat16"
    assert make(precision="fp32").dtype == "float32"
    assert make(dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(ValueError, match="dtype='float32': precision bf16 computes in bfloat16"):
        make(precision="bf16", dtype="float32")


def test_fp8_options_refine_a_recipe() -> None:
    assert make(recipe="block").fp8 == FP8TrainingConfig.from_recipe("block")
    assert make(fp8={"granularity": "channel"}).fp8.scaling == "current"
    assert make(recipe="current", fp8={"fp8_format": "e4m3"}).fp8.fp8_format == "E4M3"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("batch", -1),
        ("seq", 1.5),
        ("lr", 0),
        ("lr", math.nan),
        ("warmup", -1),
        ("clip", -1.0),
        ("clip", math.nan),
        ("beta1", 1.0),
        ("held_out", 0.0),
        ("schedule", "linear"),
        ("optimizer", "sgd"),
        ("precision", "fp4"),
        ("dtype", "half"),
        ("device", "tpu"),
        ("size", "7b"),
        ("model", "gpt"),
        ("data", ""),
        ("seed", -1),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        make(**{field: value})


def test_compare_needs_fp8() -> None:
    with pytest.raises(ValueError, match="compare=True"):
        make(compare=True, precision="fp32")
    other = make(compare=True).in_bf16()
    assert (other.precision, other.dtype, other.compare) == ("bf16", "bfloat16", False)


def test_round_trip_through_json() -> None:
    settings = make(recipe="block", fp8={"margin": [0, 0, 1]}, dim=64, data="text.txt")
    assert TrainSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(ValueError, match="colour='red': no such setting"):
        TrainSettings.from_dict({**settings.to_dict(), "colour": "red"})
    with pytest.raises(ValueError, match="lr is missing"):
        TrainSettings.from_dict({name: value for name, value in settings.to_dict().items() if name != "lr"})


def test_the_rate_rises_then_falls_to_almost_nothing() -> None:
    settings = make(lr=1.0, warmup=4, steps=104)
    rates = [settings.learning_rate(step) for step in range(1, 105)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert math.isclose(rates[54], 0.5) and 0 < rates[-1] < 1e-3
    constant = make(lr=1.0, warmup=0, schedule="constant")
    assert {constant.learning_rate(step) for step in (1, 10, 10_000)} == {1.0}


def test_a_resumed_run_keeps_its_settings() -> None:
    base = make(size="25m", dim=64, lr=0.5, recipe="block", steps=9)
    assert settings_from_options({}, base) == base
    assert settings_from_options({"log_interval": 3, "dim": 64}, base) == base.replace(log_interval=3)


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.5}, {"seed": 3}, {"batch": 3}, {"dim": 64}, {"precision": "bf16"}, {"fp8": {"margin": 1}}],
)
def test_what_changes_the_curve_is_named(options: dict[str, Any]) -> None:
    base = make()
    changed = base.changes_to_curve(settings_from_options(options, base))
    name = next(iter(options))
    assert {"dim": "shape"}.get(name, name) in changed


def test_what_does_not_change_the_curve() -> None:
    base = make()
    options = {
        "log_interval": 3,
        "save_interval": 4,
        "evaluation_batches": 2,
        "sample_bytes": 1,
        "compare": True,
        "data": "x",
        "steps": 999,
        "ranks": 2,
        "strategy": "fsdp2",
    }
    assert set(options) == set(HARMLESS)
    assert base.changes_to_curve(settings_from_options(options, base)) == []


def test_fp8_options_without_fp8_are_an_error():
    with pytest.raises(ValueError, match=r"precision='bf16'.*option of FP8"):
        settings_from_options({"precision": "bf16", "recipe": "mx"})
    with pytest.raises(ValueError, match=r"precision='fp32': margin is an option"):
        settings_from_options({"precision": "fp32", "fp8": {"margin": 1}})
