"""The gated activation to FP8 with a scale per block, in Triton's interpreter, against the specification."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_cases import CONFIGS, assert_nearly_same, new_state, sample

from octavo import FP8TrainingConfig
from octavo.kernels.gated import blocks as kernel
from octavo.kernels.launch import LaunchCache
from octavo.kernels.tuning import HOPPER
from octavo.numerics.activation import ACTIVATIONS, gated, gated_backward
from octavo.numerics.operand import quantize_operand

RECIPES = {
    "block": CONFIGS["block"].recipe,
    "block, channel wgrad": FP8TrainingConfig.from_recipe("block", wgrad="channel").recipe,
    "block, E5M2": FP8TrainingConfig.from_recipe("block", fp8_format="E5M2").recipe,
    "mx": CONFIGS["mx"].recipe,
    "mx, floor": FP8TrainingConfig.from_recipe("mx", mx_rule="floor").recipe,
}
CASES = [
    ("block", (33, 128)),
    ("block", (1, 256)),
    ("block, channel wgrad", (130, 128)),
    ("block, channel wgrad", (64, 256)),
    ("block, E5M2", (37, 128)),
    ("mx", (65, 128)),
    ("mx", (60, 256)),  # few enough tiles for underflow to be counted on all
    ("mx, floor", (20, 128)),
    ("block", (128, 128)),  # from here on whole tiles
    ("block, channel wgrad", (128, 128)),
    ("mx", (128, 128)),
]


def inputs(m, f):
    return sample(m, 2 * f).clamp(-30, 30), sample(m, f).clamp(-30, 30)


def assert_alike(actual, expected):
    if actual.scale.dtype == torch.uint8:
        assert torch.equal(actual.scale, expected.scale.view(torch.uint8))
        actual = actual._replace(scale=expected.scale)
    assert actual.scale.shape == expected.scale.shape
    assert_nearly_same(actual._replace(scale=actual.scale.float()), expected._replace(scale=expected.scale.float()))


def assert_state(actual, expected, elements):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2 / elements)


@pytest.mark.matrix
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_forward(name, shape, activation):
    gate_up, _ = inputs(*shape)
    recipe = RECIPES[name].x
    mine, theirs = new_state(), new_state()
    assert kernel.can_quantize(gate_up, recipe)
    for record in (False, True, True):
        actual = kernel.gated_quantize(gate_up, mine, recipe, activation, record=record)
        expected = quantize_operand(gated(gate_up, activation), theirs, recipe, record=record)[0]
        assert_alike(actual, expected)
        assert_state(mine, theirs, math.prod(shape))


@pytest.mark.matrix
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_backward(name, shape, activation):
    gate_up, dh = inputs(*shape)
    recipe = RECIPES[name]
    mine, theirs = new_state(), new_state()
    assert kernel.can_quantize_backward(gate_up, recipe.g, recipe.x)
    actual = kernel.gated_quantize_backward(dh, gate_up, mine, recipe.g, recipe.x, activation)
    expected = quantize_operand(gated_backward(dh, gate_up, activation), theirs, recipe.g, layout="both")
    expected += quantize_operand(gated(gate_up, activation), new_state(), recipe.x, record=False, layout="columns")
    for one, other in zip(actual, expected, strict=True):
        assert_alike(one, other)
    assert_state(mine, theirs, 2 * math.prod(shape))


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["block", "block, channel wgrad", "mx"])
def test_whole_columns_are_those_of_any_tiles(name, dtype, monkeypatch):
    gate_up, dh = (x.to(dtype) for x in inputs(128, 128))
    gate_up[5, 7], dh[100, 90] = math.inf, math.nan
    recipe = RECIPES[name]
    actual = kernel.gated_quantize_backward(dh, gate_up, new_state(), recipe.g, recipe.x, "silu")
    too_high = {name: tile._replace(rows=256) for name, tile in HOPPER.gated.whole_columns.items()}
    high = HOPPER._replace(gated=HOPPER.gated._replace(whole_columns=too_high))
    monkeypatch.setattr(kernel, "tuning_for", lambda _: high)
    monkeypatch.setattr(kernel, "_LAUNCHES", LaunchCache())
    expected = kernel.gated_quantize_backward(dh, gate_up, new_state(), recipe.g, recipe.x, "silu")
    for one, other in zip(actual, expected, strict=True):
        for part, whole in zip(one, other, strict=True):
            assert torch.equal(part.view(torch.uint8), whole.view(torch.uint8))


def test_nan_is_noticed():
    gate_up, dh = inputs(40, 128)
    gate_up[3, 7] = math.nan
    recipe = RECIPES["block, E5M2"]  # the interpreter has no NaN in E4M3
    mine, theirs = new_state(), new_state()
    actual = kernel.gated_quantize(gate_up, mine, recipe.x, "silu", record=True)
    assert_alike(actual, quantize_operand(gated(gate_up, "silu"), theirs, recipe.x)[0])
    assert_state(mine, theirs, gate_up.numel() / 2)
    mine, theirs = new_state(), new_state()
    actual = kernel.gated_quantize_backward(dh, gate_up, mine, recipe.g, recipe.x, "silu")[0]
    assert_alike(actual, quantize_operand(gated_backward(dh, gate_up, "silu"), theirs, recipe.g)[0])
    assert_state(mine, theirs, gate_up.numel())


def test_what_is_refused():
    x, block, mx = torch.randn(4, 256), RECIPES["block"], RECIPES["mx"]
    assert kernel.can_quantize(x, block.x) and kernel.can_quantize(x, mx.x)
    assert not kernel.can_quantize(x, CONFIGS["channel"].recipe.x)
    assert not kernel.can_quantize(x, CONFIGS["delayed"].recipe.x)
    assert not kernel.can_quantize(x, block.w)  # 128×128
    assert not kernel.can_quantize(x[:, :250], block.x)
    assert not kernel.can_quantize(x[:0], block.x) and not kernel.can_quantize(x.double(), block.x)
    assert not kernel.can_quantize_backward(x, replace(block.g, columns="channel"), block.x)
