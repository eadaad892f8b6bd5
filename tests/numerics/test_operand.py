"""Quantising an operand: layouts, the delayed scale, and what the row learns."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy_fp8 import NAMES, codes, decode, round_nearest, same, sample, spread
from numpy_fp8 import quantize as numpy_quantize

from octavo.numerics import E4M3, E5M2, FP8ScalingManager, FP8TrainingConfig, OperandRecipe, get_format
from octavo.numerics.operand import LAYOUTS, quantize_operand
from octavo.numerics.scaling import AMAX, CALLS, NON_FINITE, RESCALED, SATURATED, SCALE, SEEN, SLOTS, UNDERFLOW

CURRENT = {
    "tensor": OperandRecipe(E4M3),
    "channel": OperandRecipe(E4M3, "channel"),
    "block 1x128": OperandRecipe(E4M3, "block", (1, 128)),
    "block 128x128": OperandRecipe(E4M3, "block", (128, 128)),
    "mx up": OperandRecipe(E4M3, "mx"),
    "mx floor": OperandRecipe(E4M3, "mx", mx_rule="floor"),
}
DELAYED = OperandRecipe(E4M3, delayed=True)
by_kind = pytest.mark.parametrize("kind", CURRENT)


def new_state(scale=0.0):
    state = torch.zeros(SLOTS)
    state[SCALE] = scale
    return state


def expected(x, recipe):
    """Data and scale in numpy, contracting along the last dimension of `x`."""
    return numpy_quantize(
        decode(x), recipe.format.name, recipe.granularity, block=recipe.block, margin=recipe.margin, rule=recipe.mx_rule
    )


def losses(x, data, scale, recipe):
    """Shares of elements that the clamp changed and that became zero, by looking at every element."""
    x = decode(x).astype(np.float32)
    scale = spread(np.asarray(scale, np.float32), x.shape, recipe.granularity, recipe.block)
    with np.errstate(invalid="ignore"):
        v = np.abs(x * (np.float32(1) / scale))
    saturated = np.isfinite(v) & (v > recipe.format.saturation_threshold)
    underflow = (x != 0) & (decode(data) == 0)
    return saturated.mean(), underflow.mean()


@by_kind
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (130, 131), (2, 3, 33, 35)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_match_numpy(kind, shape, dtype):
    recipe, x = CURRENT[kind], sample(*shape).to(dtype)
    both = [expected(x, recipe), expected(x.mT, recipe)]
    for layout, wanted in (("rows", both[:1]), ("columns", both[1:]), ("both", both)):
        actual = quantize_operand(x, new_state(), recipe, layout=layout)
        assert len(actual) == len(wanted)
        for q, (data, scale) in zip(actual, wanted, strict=True):
            assert q.data.is_contiguous()
            assert same(q.data, data)
            assert q.scale.shape == scale.shape and np.array_equal(decode(q.scale), scale)


@by_kind
def test_columns_come_from_the_high_precision_values(kind):
    """Quantised by itself along the other dimension; equal to the transpose only where scales are symmetric."""
    rows, columns = quantize_operand(sample(130, 131), new_state(), CURRENT[kind], layout="both")
    transposed = np.array_equal(codes(columns.data), codes(rows.data.mT))
    assert transposed is (kind in ("tensor", "block 128x128"))
    if kind == "block 128x128":
        assert torch.equal(columns.scale, rows.scale.mT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_non_zero_use_takes_its_own_amax_and_keeps_it_for_the_step(layout):
    state = new_state()
    x = sample(33, 50)
    quantize_operand(torch.zeros(33, 50), state, DELAYED, layout=layout)
    assert state[SCALE] == 0 and state[SEEN] == 1
    first = quantize_operand(x, state, DELAYED, layout=layout)
    scale = decode(first[0].scale)
    assert scale == expected(x, DELAYED)[1] and state[SCALE] == scale
    later = quantize_operand(x * 1.03, state, DELAYED, layout=layout)  # no more than rounding takes off
    assert decode(later[0].scale) == scale and state[SCALE] == scale
    view = x.mT if layout == "columns" else x
    scaled = decode(view * 1.03).astype(np.float32) * (np.float32(1) / np.float32(scale))
    assert same(later[0].data, round_nearest(scaled, "E4M3"))
    assert state[AMAX] == (x * 1.03).abs().max() and state[SEEN] == 3 and state[CALLS] == 3 and state[RESCALED] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1.08, 2.0, 1e3, 1e20, 1e-10])
def test_a_tensor_that_the_delayed_scale_does_not_hold_takes_its_own(name, layout, factor):
    recipe = OperandRecipe(get_format(name), delayed=True)
    state, x = new_state(), sample(33, 50)
    quantize_operand(x, state, recipe, layout=layout)
    state[AMAX] = 0.0  # another step
    jumped = x * factor
    current = quantize_operand(jumped, new_state(), replace(recipe, delayed=False), layout=layout)
    before = state.clone()
    for record in (False, True, True):
        actual = quantize_operand(jumped, state, recipe, record=record, layout=layout)
        for mine, theirs in zip(actual, current, strict=True):
            assert torch.equal(mine.scale, theirs.scale) and np.array_equal(codes(mine.data), codes(theirs.data))
        assert record or torch.equal(state, before)  # without recording, for this use alone
    assert state[RESCALED] == 1 and state[SATURATED] == 0 and state[SCALE] == current[0].scale


def test_a_margin_below_one_saturates_as_much_as_it_asks_for():
    recipe = OperandRecipe(E4M3, margin=0.5, delayed=True)
    state, x = new_state(), torch.arange(1.0, 101.0)[None]
    for factor in (1.0, 1.0, 10.0):
        q = quantize_operand(x * factor, state, recipe)[0]
        assert q.scale == torch.tensor(50 * factor) / 448
    assert state[RESCALED] == 1 and state[SATURATED] == 3 * torch.tensor(49.0) / 100


def test_delayed_scales_follow_the_manager():
    m = FP8ScalingManager(history_len=2, margin=1.0)
    state = m.register("x")
    for amax, in_force in ((2.0, 2.0), (8.0, 8.0), (1.0, 8.0), (1.0, 8.0), (1.02, 1.0), (4.0, 4.0)):
        x = torch.tensor([[amax, -amax / 2]])
        q = quantize_operand(x, state, DELAYED)[0]
        assert q.scale == torch.tensor(in_force) / 448
        m.step()
    assert m.get_scale("x") == 448.0 / 4


def test_margin_and_percentile_shape_the_scale():
    x = torch.arange(1.0, 101.0)[None]
    state = new_state()
    q = quantize_operand(x, state, OperandRecipe(E4M3, margin=2.0, percentile=50.0))[0]
    assert q.scale == torch.tensor(50.0) / 448 * 2
    assert state[AMAX] == 50
    # Beyond 50 × 2 × 464/448 = 103.57 nothing lies; at half the percentile's headroom, 52 to 100 do.
    assert state[SATURATED] == 0
    state = new_state()
    quantize_operand(x, state, OperandRecipe(E4M3, percentile=50.0))
    assert state[SATURATED] == torch.tensor(49.0) / 100  # |x| > 50 × 464/448 = 51.8


@by_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_recording_the_row_is_left_alone(kind, layout):
    state, x = torch.rand(SLOTS), sample(33, 50)
    before = state.clone()
    actual = quantize_operand(x, state, CURRENT[kind], record=False, layout=layout)
    assert torch.equal(state, before)
    again = quantize_operand(x, state, CURRENT[kind], record=True, layout=layout)
    assert all(np.array_equal(codes(a.data), codes(b.data)) for a, b in zip(actual, again, strict=True))
    assert not torch.equal(state, before)


def test_recomputing_without_recording_meets_the_same_scale():
    state, x = new_state(), sample(33, 50)
    for jump in (1.0, 100.0):  # a first use, and one that takes its own scale
        first = quantize_operand(x * jump, state, DELAYED)[0]
        quantize_operand(x * jump * 1.02, state, DELAYED)
        again = quantize_operand(x * jump, state, DELAYED, record=False)[0]
        assert np.array_equal(codes(first.data), codes(again.data)) and torch.equal(first.scale, again.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_saturated_and_underflown_shares_are_exact(dtype, name, layout):
    recipe = OperandRecipe(get_format(name), delayed=True)
    x = (torch.randn(64, 65, generator=torch.Generator().manual_seed(0)) ** 5).to(dtype)
    x[0] = 0
    for amax in (0.3, 1.003, 2.9, 1e4):
        state = new_state(amax / recipe.format.max)
        q = quantize_operand(x, state, recipe, layout=layout)[0]
        view = x.mT if layout == "columns" else x
        saturated, underflow = losses(view, q.data, decode(q.scale), recipe)
        assert (state[SATURATED].item(), state[UNDERFLOW].item()) == (np.float32(saturated), np.float32(underflow))
        assert state[CALLS] == 1


def test_the_saturation_limit_is_not_rounded_to_the_dtype_of_x():
    """466 / 1.003 = 464.6 is beyond 464, where the clamp changes values; in BF16 the limit itself rounds to 466."""
    state = new_state(1.003)
    x = torch.full((1, 64), 466.0, dtype=torch.bfloat16)
    assert quantize_operand(x, state, DELAYED)[0].scale == torch.tensor(466.0) / 448
    assert state[RESCALED] == 1
    with_margin = replace(DELAYED, margin=1.003 * 448 / 466)  # which asks for a scale of 1.003
    state = new_state(1.003)
    assert quantize_operand(x, state, with_margin)[0].scale == torch.tensor(1.003)
    assert state[SATURATED] == 1


@by_kind
def test_losses_of_current_scales(kind):
    recipe, x = CURRENT[kind], sample(130, 132) * torch.tensor([1e-9, 1.0])[torch.arange(132) % 2]
    for layout in ("rows", "columns"):
        state = new_state()
        q = quantize_operand(x, state, recipe, layout=layout)[0]
        saturated, underflow = losses(x.mT if layout == "columns" else x, q.data, decode(q.scale), recipe)
        assert bool(saturated > 0) is (kind == "mx floor")
        assert (state[SATURATED].item(), state[UNDERFLOW].item()) == (np.float32(saturated), np.float32(underflow))
        assert state[AMAX] == x.abs().max() and state[SEEN] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_non_finite_input_is_noted_and_counts_neither_as_saturated_nor_as_lost(bad, name):
    for big in (1.0, 1e9):  # alone, and beside a value that the scale does not hold
        recipe, state = OperandRecipe(get_format(name), delayed=True), new_state(1.0)
        q = quantize_operand(torch.tensor([[bad, big, 1.0, 1e-30]]), state, recipe)[0]
        assert np.isnan(decode(q.data)[0, 0]) and np.isfinite(decode(q.data)[0, 1:]).all()
        assert (state[NON_FINITE], state[AMAX]) == (1, big)
        lost = 0.25 if big == 1 or "E5M2" in name else 0.5  # beside 1e9, E4M3 has nothing for 1
        assert (state[SATURATED], state[UNDERFLOW], state[RESCALED]) == (0, lost, big > 1)


def test_one_non_finite_use_stops_the_history():
    m = FP8ScalingManager(history_len=2, margin=1.0)
    state = m.register("x")
    quantize_operand(torch.ones(1, 4), state, DELAYED)
    m.step()
    quantize_operand(torch.tensor([[8.0, math.inf]]), state, DELAYED)
    quantize_operand(torch.tensor([[8.0, 1.0]]), state, DELAYED)
    m.step()
    assert m.get_scale("x") == 448 and m.state_dict()["_steps"].tolist() == [1]


def test_float64_beyond_float32_does_not_zero_the_rest():
    q = quantize_operand(torch.tensor([[1e300, 1.0, 2.0]], dtype=torch.float64), new_state(), CURRENT["tensor"])[0]
    assert decode(q.data)[0, 2] == 448 and np.isnan(decode(q.data)[0, 0])


@by_kind
@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (2, 0, 40)])
def test_empty_operands(kind, shape):
    """An expert that no token went to."""
    state = new_state()
    rows, columns = quantize_operand(torch.zeros(shape), state, CURRENT[kind], layout="both")
    assert rows.data.shape == shape and columns.data.shape == torch.zeros(shape).mT.shape
    assert state.isfinite().all() and state[NON_FINITE] == 0


@by_kind
def test_the_row_stays_out_of_autograd(kind):
    for value in (1.0, math.inf):
        state = new_state()
        quantize_operand(torch.tensor([[value, 2.0]], requires_grad=True), state, CURRENT[kind], layout="both")
        assert not state.requires_grad


def test_stochastic_operands_use_the_global_generator_and_are_reproducible():
    recipe, x = FP8TrainingConfig(rounding="stochastic").recipe.g, sample(33, 50)
    assert recipe.format is E5M2 and recipe.rounding == "stochastic"
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        rows, columns = quantize_operand(x, new_state(), recipe, layout="both")
        assert np.array_equal(codes(columns.data), codes(rows.data.mT))  # one draw serves both layouts
        runs.append(codes(rows.data))
    assert np.array_equal(runs[0], runs[1]) and not np.array_equal(runs[0], runs[2])
