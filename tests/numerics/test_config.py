"""FP8TrainingConfig and the recipes it stands for."""

import copy
import dataclasses
import itertools
import json
import math
import pickle
from dataclasses import replace

import pytest
import torch

from octavo.numerics import E4M3, E5M2, FP8TrainingConfig, OperandRecipe
from octavo.numerics.config import ALGORITHMS, FP8_FORMATS, RECIPES
from octavo.numerics.formats import FORMATS
from octavo.numerics.operand import quantize_operand
from octavo.numerics.quantize import GRANULARITIES, MX_RULES

DEFAULTS = {
    "fp8_format": "HYBRID",
    "amax_history_len": 32,
    "amax_compute_algo": "max",
    "margin": 0,
    "fp8_dpa": False,
    "granularity": "tensor",
    "scaling": "delayed",
    "amax_update_interval": 1,
    "percentile": None,
    "rounding": "nearest",
    "skip": ("lm_head",),
    "mx_rule": "up",
    "fp8_head": False,
    "fast_accumulation": "all",
    "activations": "bf16",
    "wgrad": None,
    "emulate": None,
}
INTERESTING = [
    {},
    {"fp8_format": "e5m2", "margin": [0, 1, 2.5], "rounding": {"g": "stochastic"}},
    {"granularity": "block", "skip": ["a", "model.layers.0.*"], "emulate": True},
    {"granularity": "mx", "mx_rule": "floor", "fp8_dpa": True, "emulate": False},
    {"granularity": "block", "wgrad": "channel", "fp8_head": True},
    {"scaling": "current", "percentile": 99.99, "margin": {"g": 3}},
    {"amax_history_len": 7, "amax_compute_algo": "ema", "amax_update_interval": 4, "margin": -1},
]


def test_defaults():
    config = FP8TrainingConfig()
    assert {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} == DEFAULTS


@pytest.mark.parametrize("name", ["hybrid", "Hybrid", "HYBRID", "e4m3", "E4M3", "e5M2"])
def test_the_format_is_taken_in_any_case(name):
    config = FP8TrainingConfig(fp8_format=name)
    assert config.fp8_format == name.upper()
    assert config == FP8TrainingConfig(fp8_format=name.upper())


BAD = [
    ("fp8_format", ["E3M4", "", None, 8, "E4M3_FNUZ", ("E4M3",)]),
    ("amax_history_len", [0, -1, 1.5, 2.0, True, "32", None, math.nan]),
    ("amax_update_interval", [0, -1, 1.5, True, "1", None]),
    ("amax_compute_algo", ["min", "MAX", None, 1]),
    (
        "margin",
        ["1", None, True, math.nan, math.inf, 17, -17, (1, 2), (1, 2, 3, 4), (0, 0, "1"), {"y": 1}, {"x": None}],
    ),
    ("fp8_dpa", ["yes", None, 2]),
    ("fp8_head", ["yes", None, 2]),
    ("fast_accumulation", ["backward", None, True]),
    ("activations", ["e4m3", None, True]),
    ("wgrad", ["tensor", "block", "", 1, True]),
    ("granularity", ["row", "Tensor", None, 128]),
    ("scaling", ["dynamic", "", 1]),
    ("percentile", [0, -1, 100.1, math.nan, "99", True]),
    ("rounding", ["up", None, ("nearest", "nearest"), ("nearest", "nearest", "up"), {"q": "nearest"}, {"x": "up"}]),
    ("skip", ["lm_head", None, 5, (1, 2)]),
    ("mx_rule", ["ceil", None]),
    ("emulate", ["no", 2]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD for value in values])
def test_a_bad_value_raises_naming_field_and_value(field, value):
    with pytest.raises(ValueError) as error:
        FP8TrainingConfig(**{field: value})
    assert str(error.value).startswith(f"{field}=")
    shown = value.upper() if field == "fp8_format" and isinstance(value, str) else value
    inner = list(shown.values()) if isinstance(shown, dict) else shown if isinstance(shown, tuple) else []
    assert any(repr(v) in str(error.value) or str(v).upper() in str(error.value) for v in (shown, *inner))


@pytest.mark.parametrize("granularity", ["channel", "block", "mx"])
def test_delayed_scaling_and_percentiles_are_per_tensor(granularity):
    with pytest.raises(ValueError, match=f"scaling='delayed'.*granularity='{granularity}'"):
        FP8TrainingConfig(granularity=granularity, scaling="delayed")
    with pytest.raises(ValueError, match=r"percentile=99.9.*granularity='tensor'"):
        FP8TrainingConfig(granularity=granularity, percentile=99.9)


@pytest.mark.parametrize("granularity", [g for g in GRANULARITIES if g != "block"])
def test_wgrad_is_for_blocks_only(granularity):
    with pytest.raises(ValueError, match=f"wgrad='channel': only with granularity='block', not '{granularity}'"):
        FP8TrainingConfig(granularity=granularity, wgrad="channel")


def test_wgrad_changes_the_columns_of_x_and_g_only():
    plain = FP8TrainingConfig.from_recipe("block").recipe
    channel = FP8TrainingConfig.from_recipe("block", wgrad="channel").recipe
    assert (channel.x.columns, channel.w.columns, channel.g.columns) == ("channel", None, "channel")
    for name in ("x", "w", "g"):
        assert dataclasses.replace(getattr(channel, name), columns=None) == getattr(plain, name)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FP8TrainingConfig().margin = 1


@pytest.mark.parametrize("options", INTERESTING)
def test_round_trip_through_json(options):
    config = FP8TrainingConfig(**options)
    assert FP8TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert FP8TrainingConfig.from_dict(config.to_dict()).recipe == config.recipe
    assert set(config.to_dict()) == set(DEFAULTS)


def test_from_dict_names_an_unknown_field_and_the_choices():
    with pytest.raises(ValueError, match=r"fp8_fromat='E4M3': no such field; choose from .*fp8_format"):
        FP8TrainingConfig.from_dict({"fp8_fromat": "E4M3"})


def test_equality_and_hash():
    for a, b in itertools.product(INTERESTING, repeat=2):
        same = a == b
        assert (FP8TrainingConfig(**a) == FP8TrainingConfig(**b)) is same
        if same:
            assert hash(FP8TrainingConfig(**a)) == hash(FP8TrainingConfig(**b))
    assert len({FP8TrainingConfig(**options) for options in INTERESTING * 2}) == len(INTERESTING)


@pytest.mark.parametrize(
    ("field", "spellings"),
    [
        ("margin", [(0, 0, 2), [0, 0, 2], {"g": 2}, {"x": 0, "w": 0, "g": 2}]),
        ("margin", [1, 1.0, (1, 1, 1), {"x": 1, "w": 1, "g": 1}]),
        ("rounding", ["nearest", ["nearest"] * 3, {"x": "nearest"}]),
        ("skip", [["a"], ("a",)]),
        ("fp8_format", ["e4m3", "E4M3"]),
    ],
)
def test_two_spellings_of_one_configuration_are_equal(field, spellings):
    configs = {FP8TrainingConfig(**{field: spelling}) for spelling in spellings}
    assert len(configs) == 1


@pytest.mark.parametrize(
    ("margin", "factors"),
    [
        (0, (1, 1, 1)),
        (3, (8, 8, 8)),
        (0.5, (2**0.5, 2**0.5, 2**0.5)),
        ((0, 1, 2), (1, 2, 4)),
        ([0, 0, -1], (1, 1, 0.5)),
        ({"g": 2}, (1, 1, 4)),
    ],
)
def test_margin_is_an_exponent_for_people_and_a_factor_in_recipes(margin, factors):
    recipe = FP8TrainingConfig(margin=margin).recipe
    assert (recipe.x.margin, recipe.w.margin, recipe.g.margin) == factors


@pytest.mark.parametrize("rounding", [("nearest", "nearest", "stochastic"), {"g": "stochastic"}])
def test_rounding_per_operand(rounding):
    recipe = FP8TrainingConfig(rounding=rounding).recipe
    assert (recipe.x.rounding, recipe.w.rounding, recipe.g.rounding) == ("nearest", "nearest", "stochastic")
    everywhere = FP8TrainingConfig(rounding="stochastic").recipe
    assert {everywhere.x.rounding, everywhere.w.rounding, everywhere.g.rounding} == {"stochastic"}


@pytest.mark.parametrize(
    ("fp8_format", "formats"), [("HYBRID", (E4M3, E4M3, E5M2)), ("E4M3", (E4M3,) * 3), ("E5M2", (E5M2,) * 3)]
)
def test_formats_of_the_operands(fp8_format, formats):
    recipe = FP8TrainingConfig(fp8_format=fp8_format).recipe
    assert (recipe.x.format, recipe.w.format, recipe.g.format) == formats


EXPECTED = {
    # recipe: granularity, delayed, format of x, w, g, block of x, w, g
    "delayed": ("tensor", True, (E4M3, E4M3, E5M2)),
    "current": ("tensor", False, (E4M3, E4M3, E5M2)),
    "channel": ("channel", False, (E4M3, E4M3, E5M2)),
    "block": ("block", False, (E4M3, E4M3, E4M3)),
    "mx": ("mx", False, (E4M3, E4M3, E4M3)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_named_recipes(name):
    config = FP8TrainingConfig.from_recipe(name)
    granularity, delayed, formats = EXPECTED[name]
    operands = (config.recipe.x, config.recipe.w, config.recipe.g)
    assert tuple(o.format for o in operands) == formats
    for operand in operands:
        assert (operand.granularity, operand.delayed) == (granularity, delayed)
        assert (operand.rounding, operand.margin, operand.percentile, operand.mx_rule) == ("nearest", 1.0, None, "up")
    if granularity == "block":
        assert [o.block for o in operands] == [(1, 128), (128, 128), (1, 128)]
    assert (config == FP8TrainingConfig()) is (name == "delayed")
    assert FP8TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_recipes_take_overrides_and_unknown_names_are_refused():
    assert set(RECIPES) == set(EXPECTED)
    assert FP8TrainingConfig.from_recipe("block", margin=1).recipe.x.margin == 2.0
    assert FP8TrainingConfig.from_recipe("mx", fp8_format="e5m2").recipe.x.format is E5M2
    with pytest.raises(ValueError, match="recipe='fast': choose one of delayed, current, channel, block, mx"):
        FP8TrainingConfig.from_recipe("fast")


def test_replace_checks_again():
    config = FP8TrainingConfig(margin=1).replace(amax_history_len=4)
    assert (config.margin, config.amax_history_len) == (1, 4)
    with pytest.raises(ValueError, match="amax_history_len=0"):
        config.replace(amax_history_len=0)
    # `scaling` was not given, so it still follows the granularity.
    assert FP8TrainingConfig().replace(granularity="block").scaling == "current"


def test_an_option_that_the_granularity_cannot_honour_is_refused_or_honoured():
    """MX scales are powers of two: headroom of 2^margin is representable, so asking for it may not be ignored."""
    try:
        operand = FP8TrainingConfig(granularity="mx", margin=2).recipe.x
    except ValueError as error:
        assert "margin" in str(error)
        return
    x = torch.ones(1, 32)
    plain = quantize_operand(x, torch.zeros(8), FP8TrainingConfig(granularity="mx").recipe.x)[0].scale.float()
    assert torch.equal(quantize_operand(x, torch.zeros(8), operand)[0].scale.float(), plain * 4)


def test_operand_recipes_survive_encoding():
    for format, granularity, rule, block in itertools.product(
        FORMATS.values(), GRANULARITIES, MX_RULES, ((1, 128), (128, 128))
    ):
        for rounding, margin, delayed, percentile in (
            ("nearest", 1.0, False, None),
            ("stochastic", 2.0**0.3, True, 99.99),
            ("nearest", 2.0**-16, False, 100 / 3),
        ):
            recipe = OperandRecipe(format, granularity, block, rounding, margin, delayed, percentile, rule)
            assert OperandRecipe.decode(recipe.encode()) == recipe
    encoded = {OperandRecipe(f, g).encode() for f in FORMATS.values() for g in GRANULARITIES}
    assert len(encoded) == len(FORMATS) * len(GRANULARITIES)


@pytest.mark.parametrize("options", INTERESTING)
def test_every_operand_of_a_config_survives_encoding(options):
    recipe = FP8TrainingConfig(**options).recipe
    for operand in (recipe.x, recipe.w, recipe.g):
        assert OperandRecipe.decode(operand.encode()) == operand


def test_choices_are_the_documented_ones():
    assert tuple(FP8_FORMATS) == ("HYBRID", "E4M3", "E5M2")
    assert ALGORITHMS == ("max", "most_recent", "ema")


def test_a_recipe_prints_what_it_does():
    text = str(FP8TrainingConfig.from_recipe("channel").recipe)
    assert all(word in text for word in ("E4M3", "E5M2", "channel"))


def test_equal_operand_recipes_are_one_key():
    """Kernels find their plans by them; copies from another process, where strings hash otherwise, too."""
    recipe = FP8TrainingConfig(percentile=99).recipe.x
    same = replace(recipe, percentile=99.0, margin=1)
    assert same == recipe and hash(same) == hash(recipe)
    for copied in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), type(recipe).decode(recipe.encode())):
        assert copied == recipe and hash(copied) == hash(recipe)
