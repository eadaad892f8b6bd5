"""The gated activation straight to FP8, in Triton's interpreter, against the specification.

Both compute in FP32, but `exp` is not the same to the last bit, so a value in a thousand may land on the other side of
a rounding boundary: one FP8 step.
"""

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    CONFIGS,
    assert_nearly_same,
    assert_on_neighbours,
    assert_same_state,
    gated_backward_spec,
    gated_spec,
    new_state,
    sample,
)

from octavo.kernels import gated as kernel
from octavo.numerics import E4M3, OperandRecipe, Quantized
from octavo.numerics.activation import ACTIVATIONS, dequantize_gate_up, gated, gated_backward, save_gate_up
from octavo.numerics.scaling import SCALE

SHAPES = [(33, 70), (1, 1), (65, 20)]
CASES = [("delayed", (33, 130)), ("delayed", (1, 1)), ("current", (65, 33)), ("E5M2", (32, 128))]
DELAYED, CURRENT, E5M2 = CONFIGS["delayed"].recipe, CONFIGS["current"].recipe, CONFIGS["E5M2"].recipe
RECIPES = {"delayed": DELAYED, "current": CURRENT, "E5M2": E5M2}


def assert_state(actual, expected, elements):
    """Counts may differ by the elements at a rounding boundary."""
    assert_same_state(actual, expected, atol=2 / elements)


def inputs(m, f, dtype=torch.float32):
    return sample(m, 2 * f, dtype=dtype).clamp(-30, 30), sample(m, f, dtype=dtype).clamp(-30, 30)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_forward(name, shape, activation):
    gate_up, _ = inputs(*shape)
    mine, theirs = new_state(), new_state()
    # A first use that is forgotten, one that is not, a later one, and one that its scale does not hold.
    for record, jump in ((False, 1), (True, 1), (True, 1), (True, 3)):
        gate_up = gate_up * jump
        actual = kernel.gated_quantize(gate_up, mine, RECIPES[name].x, activation, record=record)
        assert_nearly_same(actual, gated_spec(gate_up, theirs, RECIPES[name].x, activation, record=record))
        assert_state(mine, theirs, gate_up.numel() / 2)
        assert record or not mine.any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_backward(name, shape, activation):
    gate_up, dh = inputs(*shape)
    mine, theirs = new_state(), new_state()
    recipe = RECIPES[name]
    h_scale = gated(gate_up, activation).abs().max() / recipe.x.format.max / 3
    h_scale = h_scale.clamp(min=1e-3)
    how = (recipe.g, recipe.x, activation)
    for jump in (1, 1, 5):
        dh = dh * jump
        actual = kernel.gated_quantize_backward(dh, gate_up, h_scale, mine, *how)
        expected = gated_backward_spec(dh, gate_up, h_scale, theirs, *how)
        for one, other in zip(actual, expected, strict=True):
            assert_nearly_same(one, other)
        assert torch.equal(actual[1].data.view(torch.uint8), actual[0].data.view(torch.uint8).mT)
        assert_state(mine, theirs, gate_up.numel())


@pytest.mark.matrix
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("name", "m", "f"), [("delayed", 33, 128), ("current", 64, 256), ("E5M2", 1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_kept_in_fp8(name, m, f, dtype, activation):
    gate_up, dh = inputs(m, f, dtype)
    recipe, mine, theirs = RECIPES[name], new_state(), new_state()
    saved = Quantized(torch.empty(m, 2 * f, dtype=E4M3.dtype), torch.empty(m, 2 * f // 128, dtype=torch.uint8))
    assert kernel.can_save(gate_up)
    actual = kernel.gated_quantize(gate_up, mine, recipe.x, activation, record=True, into=saved)
    assert_nearly_same(actual, gated_spec(gate_up, theirs, recipe.x, activation, record=True), share=5e-3)
    expected = save_gate_up(gate_up)
    assert torch.equal(saved.scale, expected.scale)
    assert torch.equal(saved.data.view(torch.uint8), expected.data.view(torch.uint8))

    gate_up_hp = dequantize_gate_up(saved).to(dtype)  # which is exact
    h_scale = (gated(gate_up_hp, activation).abs().max() / recipe.x.format.max).float().clamp(min=1e-3)
    mine, theirs, how = new_state(), new_state(), (recipe.g, recipe.x, activation)
    actual = kernel.gated_quantize_backward(dh, saved.data, h_scale, mine, *how, saved_scale=saved.scale)
    for one, other in zip(actual, gated_backward_spec(dh, gate_up_hp, h_scale, theirs, *how), strict=True):
        assert_nearly_same(one, other, share=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_quantising(activation, shape, dtype):
    gate_up, dh = inputs(*shape, dtype)
    gradient, h = kernel.gated_backward(dh, gate_up, activation)
    step = max(torch.finfo(dtype).eps, 1e-5)
    expected_h, expected = gated(gate_up, activation), gated_backward(dh, gate_up, activation)
    torch.testing.assert_close(kernel.gated(gate_up, activation), expected_h, rtol=step, atol=1e-6)
    torch.testing.assert_close(h, expected_h, rtol=step, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=step, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_round_to_the_dtype_first(dtype, activation):
    """With known scales, as the kernel would see them in training; BF16 is rounded before FP8, as in memory."""
    gate_up, dh = (x.clamp(-3, 3) for x in inputs(40, 33, dtype))
    h_scale = torch.tensor(0.02)
    mine, theirs = new_state(0.05), new_state(0.05)
    actual = kernel.gated_quantize(gate_up, mine, DELAYED.x, activation, record=True)
    assert_nearly_same(actual, gated_spec(gate_up, theirs, DELAYED.x, activation, record=True), share=5e-3)
    mine, theirs = new_state(1e-4), new_state(1e-4)
    how = (DELAYED.g, DELAYED.x, activation)
    backward = kernel.gated_quantize_backward(dh, gate_up, h_scale, mine, *how)
    for one, other in zip(backward, gated_backward_spec(dh, gate_up, h_scale, theirs, *how), strict=True):
        assert_nearly_same(one, other, share=5e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_unusual_values(activation):
    """Zeros, values that overflow `exp`, infinities and NaN: as the specification, NaN included."""
    gate_up = torch.tensor([[0.0, 200.0, -200.0, 1e30, -1e30, float("nan"), 1.0, float("inf")]]).repeat(3, 2)
    gate_up[:, 8:] = 1.0
    dh = torch.ones(3, 8)
    recipe = replace(DELAYED.x, format=E5M2.x.format)  # the interpreter has no NaN in E4M3
    mine, theirs = new_state(1.0), new_state(1.0)
    actual = kernel.gated_quantize(gate_up, mine, recipe, activation, record=True)
    assert_nearly_same(actual, gated_spec(gate_up, theirs, recipe, activation, record=True))
    assert_state(mine, theirs, 24)
    mine, theirs = new_state(1.0), new_state(1.0)
    how = (recipe, recipe, activation)
    backward = kernel.gated_quantize_backward(dh, gate_up, torch.tensor(1.0), mine, *how)
    for one, other in zip(backward, gated_backward_spec(dh, gate_up, torch.tensor(1.0), theirs, *how), strict=True):
        assert_nearly_same(one, other)
    assert_state(mine, theirs, 48)


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_overflows_by_its_scale_saturates_and_infinities_do_not(rounding, record):
    """h / scale may be beyond FP32: no NaN. An infinite h is NaN, however it is rounded."""
    recipe = replace(DELAYED.x, format=E5M2.x.format, rounding=rounding)
    gate_up = torch.full((3, 16), 30.0)
    gate_up[:, 8], gate_up[:, 9], gate_up[1, 2] = 1e30, -1e30, float("inf")
    actual = kernel.gated_quantize(gate_up, new_state(1e-20), recipe, "silu", record=record).data.float()
    assert actual[1, 2].isnan() and actual.isnan().sum() == 1
    assert (actual[:, 0] == E5M2.x.format.max).all() and (actual[:, 1] == -E5M2.x.format.max).all()
    dh = torch.ones(3, 8)
    dh[0, 0], dh[1, 1] = 1e30, float("inf")
    how = (recipe, recipe, "silu")
    rows, columns, h = kernel.gated_quantize_backward(dh, gate_up, torch.tensor(1e-20), new_state(1e-20), *how)
    expected = gated_backward_spec(dh, gate_up, torch.tensor(1e-20), new_state(1e-20), *how)
    for one, other in zip((rows, columns, h), expected, strict=True):
        assert torch.equal(one.data.float().isnan(), other.data.float().isnan())
        assert one.data.float().isnan().any() and not one.data.float().isnan().all()


def test_zeros_teach_nothing():
    state = new_state()
    q = kernel.gated_quantize(torch.zeros(5, 12), state, DELAYED.x, "silu", record=True)
    assert state[SCALE] == 0 and q.scale == 1 and not q.data.float().any()


def test_stochastic_rounding():
    recipe = OperandRecipe(E4M3, rounding="stochastic")
    gate_up, dh = inputs(40, 33)
    h = gated(gate_up, "silu")
    forward = kernel.gated_quantize(gate_up, new_state(), recipe, "silu", record=True)
    assert_on_neighbours(forward, h, slack=1e-5)
    rows, columns, h_columns = kernel.gated_quantize_backward(
        dh, gate_up, forward.scale, new_state(), recipe, recipe, "silu"
    )
    assert_on_neighbours(rows, gated_backward(dh, gate_up, "silu"), slack=1e-5)
    assert_on_neighbours(h_columns, h.mT, slack=1e-5)
    assert torch.equal(columns.data.view(torch.uint8), rows.data.view(torch.uint8).mT)
    assert not torch.equal(h_columns.data.view(torch.uint8), forward.data.view(torch.uint8).mT)


def test_what_is_refused():
    x = torch.randn(4, 8)
    assert kernel.can_quantize(x, DELAYED.x, DELAYED.g)
    assert not kernel.can_quantize(x, CONFIGS["channel"].recipe.x)
    assert not kernel.can_quantize(x, DELAYED.x, CONFIGS["block"].recipe.g)
    assert not kernel.can_quantize(x, replace(DELAYED.x, percentile=99.0))
    for bad in (x.double(), x[:0]):
        assert not kernel.can_quantize(bad, DELAYED.x) and not kernel.can_gate(bad)
